"""What a stage's RoPE is: given, from a factor table, searched for, or chosen; one decision, in one place."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.search import Factors
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.auto import AutoRope
from ropewalk.training.stage_rope.base import StageRope
from ropewalk.training.stage_rope.given import GivenRope, TableRope
from ropewalk.training.stage_rope.search import SearchRope


def stage_ropes(recipe: Recipe, tables: Sequence[Factors | None] = ()) -> list[StageRope]:
    """The RoPE of each stage of a recipe, to be asked before the run and in it.

    Args:
        recipe: as it was written.
        tables: the factor table of each stage that names one.
    """
    named = tables or (None,) * len(recipe.stages)
    return [_stage_rope(recipe, number, table) for number, table in enumerate(named)]


def _stage_rope(recipe: Recipe, number: int, table: Factors | None) -> StageRope:
    rope = recipe.stages[number].rope.limiting
    if rope.method == "auto":
        return AutoRope(recipe, number)
    if rope.search is not None:
        return SearchRope(recipe, number)
    return GivenRope(recipe, number) if table is None else TableRope(recipe, number, table)
