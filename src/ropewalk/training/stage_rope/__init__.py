"""RoPE of a stage: given in the recipe, read from a factor table, searched, or chosen among candidates (``auto``)."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.search import Factors
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.auto import AutoRope
from ropewalk.training.stage_rope.base import StageRope
from ropewalk.training.stage_rope.given import GivenRope, TableRope
from ropewalk.training.stage_rope.search import SearchRope


def stage_ropes(recipe: Recipe, tables: Sequence[Factors | None] = ()) -> list[StageRope]:
    """RoPE decisions of all stages of a recipe; both the checks before a run and the run itself use them.

    Args:
        recipe: the recipe.
        tables: factor table of each stage; None for stages that name none.
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
