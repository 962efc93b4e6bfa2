"""A run as tests call it: its summary as JSON values, and what ranks run; spawned processes import it by name."""

import yaml

from ropewalk import training
from ropewalk.io.progress import Silent
from ropewalk.parallel import World, joined
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.file import parse_recipe


def extend(recipe, resume=False, reporter=None, world=None):
    """The summary of a run, as ``summary.json`` has it."""
    context = RunContext(world or World(), reporter=reporter or Silent())
    return training.extend(recipe, context, resume).to_json()


def extended(values, resume=False):
    """The summary of a run of the ranks."""
    with joined("cpu") as world:
        return extend(parse_recipe(yaml.safe_dump(values), "test"), resume=resume, world=world)
