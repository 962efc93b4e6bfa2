"""``ropewalk recipe``: list and show the shipped recipes, and check a recipe before a run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.output import JsonFlag, print_json, run_context, show, show_result
from ropewalk.dry_run.settings import TrainingMachine
from ropewalk.io.settings import COMMON, RECIPE_NAME, Overrides
from ropewalk.recipes import head_of, recipe_text, schema_text, shipped_recipes


def list_command(*, as_json: JsonFlag = False) -> None:
    """List the recipes that ropewalk ships, by model. A recipe is a YAML file with the settings of a training run."""
    from ropewalk.reporting.recipes import describe_recipes

    heads = {name: head_of(text) for name, text in shipped_recipes().items()}
    if as_json:
        print_json({name: asdict(head) for name, head in heads.items()})
    else:
        show(describe_recipes(heads))


def show_command(
    name: Annotated[
        str, Field(description="Name of the recipe, such as demo. `ropewalk recipe list` lists all names.")
    ],
) -> None:
    """Print a recipe that ropewalk ships. A recipe is a YAML file with the settings of a training run."""
    sys.stdout.write(recipe_text(name))


def schema_command() -> None:
    """Print the JSON Schema of recipes, by which editors complete and check keys.

    The first line of a shipped recipe names the schema of the latest version.
    """
    sys.stdout.write(schema_text())


def check_command(
    recipe: Annotated[str, Field(description=f"{RECIPE_NAME}.")],
    machine: TrainingMachine,
    *,
    overrides: Annotated[Overrides, COMMON] = (),
    as_json: JsonFlag = False,
) -> None:
    """Check a recipe without running it.

    Checks the recipe's keys and values. If the model is on this machine, also checks everything that a run checks
    before it trains. Downloads and writes nothing. Exits with status 2 if the recipe is wrong, names documents or a
    model that a run would not find, or surely needs more memory than the machine that trains has: this one, or the
    GPUs that --gpus and --gpu name. Memory is compared by a lower bound; ropewalk plan says what a step takes.
    """
    from ropewalk.dry_run.check import check
    from ropewalk.errors import RopewalkError
    from ropewalk.reporting.recipes import describe_check
    from ropewalk.training import load_recipe

    result = check(load_recipe(recipe, list(overrides)), machine, run_context())
    show_result(result, as_json, lambda found: describe_check(found, recipe))
    if not result.ready:
        where = "here" if machine.hardware is None else "there"
        raise RopewalkError(f"the recipe is not ready to run {where}; missing: {'; '.join(result.missing)}")


app = make_group(
    "recipe",
    "List or print the recipes that ropewalk ships, or check a recipe before a run.",
    [
        make_command(list_command, "list", "ropewalk recipe list"),
        make_command(show_command, "show", "ropewalk recipe show demo > my-recipe.yaml"),
        make_command(schema_command, "schema", "ropewalk recipe schema > recipe.schema.json"),
        make_command(check_command, "check", "ropewalk recipe check my-recipe.yaml --gpus 8 --gpu h100"),
    ],
)
