"""What ranks run in the tests of the longrope recipe; spawned processes import it by name."""

import yaml

from ropewalk.parallel import joined
from ropewalk.training import extend
from ropewalk.training.recipe.file import parse_recipe


def extended(values, resume=False):
    """The summary of a run of the ranks."""
    with joined("cpu") as world:
        return extend(parse_recipe(yaml.safe_dump(values), "test"), resume=resume, world=world)
