"""Factor tables that a user names beside the recipe: which stage each one is for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import explain
from ropewalk.search import read_factors
from ropewalk.training.recipe.recipe import Recipe


def with_tables(recipe: Recipe, tables: Sequence[str | Path]) -> Recipe:
    """The recipe whose stages take their factors from tables, as if each said ``rope: {method: longrope, factors: …}``.

    A table belongs to the stage whose context is its target length; one table of a recipe of one stage to that stage,
    if it reaches as far.

    Args:
        recipe: as it was read.
        tables: files of factor tables.

    Raises:
        RopewalkError: if a table is none, fits no stage or several, or another one has its stage already.
    """
    taken: dict[int, str | Path] = {}
    for path in tables:
        length = read_factors(Path(path).expanduser()).target_length
        number = _stage_of(recipe, path, length, len(tables))
        if number in taken:
            raise RopewalkError(
                f"the factor tables {taken[number]} and {path} are both for {length} tokens, and stage {number + 1} "
                "takes one; leave one of them out"
            )
        taken[number] = path
    stages = [
        {**stage.model_dump(), "rope": {"method": "longrope", "factors": str(taken[number])}}
        if number in taken
        else stage
        for number, stage in enumerate(recipe.stages)
    ]
    try:
        return Recipe.model_validate({**dict(recipe), "stages": stages})
    except ValidationError as error:
        raise RopewalkError(f"with the factor tables: {explain(error, Recipe)}") from error


def _stage_of(recipe: Recipe, path: str | Path, length: int, tables: int) -> int:
    contexts = [stage.context for stage in recipe.stages]
    if len(contexts) == tables == 1 and length >= contexts[0]:
        return 0
    fitting = [number for number, context in enumerate(contexts) if context == length]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(map(str, contexts))
    if fitting:
        raise RopewalkError(
            f"the factor table {path} is for {length} tokens, and {len(fitting)} stages have that context; name it in "
            "the recipe as rope: {method: longrope, factors: FILE}"
        )
    raise RopewalkError(
        f"the factor table {path} is for {length} tokens, and no stage has that context: they have {there}; give "
        "tables for these, or change the context"
    )
