"""The RoPE of a stage: what it may become, before the run, and what it becomes, in the run.

A stage gives its method, names a factor table, searches for factors, or chooses a base (``auto``).
:func:`possible_methods` alone tells these apart before the run, and :func:`decide` in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import deciding
from ropewalk.rope import Linear, LongRope, NoRope, RopeMethod
from ropewalk.search import Candidate, Factors
from ropewalk.search.goal import NTK
from ropewalk.training.recipe.recipe import Recipe, Stage
from ropewalk.training.resolved import AtStage, RopeAt
from ropewalk.training.stage_rope.auto import auto_candidates, choose
from ropewalk.training.stage_rope.base import (
    Before,
    Decision,
    as_json,
    factors_file,
    stage_name,
    takes_recommended_base,
)
from ropewalk.training.stage_rope.given import given_method, table_method
from ropewalk.training.stage_rope.mixed import refuse_equal, two_ropes
from ropewalk.training.stage_rope.search import (
    candidate_of,
    search_factors,
    search_goals,
    search_of,
    search_summary,
)


def possible_methods(
    recipe: Recipe, number: int, before: Before, table: Factors | None = None
) -> dict[str, RopeMethod]:
    """The methods that a stage may get, by name; one, unless the run chooses among several.

    Args:
        recipe: the recipe.
        number: index of the stage, counted from 0.
        before: state before the stage.
        table: factor table that the stage names; None if it names none.

    Returns:
        Of a search, one method whose factors are 1s: they are unknown before the run, and 1s suffice to check
            everything else.

    Raises:
        RopewalkError: if the stage cannot have its method.
    """
    stage = recipe.stages[number]
    rope = stage.rope.limiting
    if rope.method == "auto":
        if stage.short_rows is not None:
            raise RopewalkError(
                f"{_short_rows(number)} needs a RoPE that is known before the run, but rope auto chooses one among "
                "several in it; set the stage's rope, for example to theta"
            )
        return auto_candidates(recipe, number, before)
    if rope.search is not None:
        ones = Candidate((1.0,) * (before.checkpoint[0].rotary_dim // 2))
        return {
            rope.method: _with_short_rows(
                search_goals(recipe, number, before)[1].extended(ones), number, stage, before
            )
        }
    given = given_method(stage, number, before) if table is None else table_method(stage, table, before)
    return {rope.method: _with_short_rows(given, number, stage, before)}


def _short_rows(number: int) -> str:
    return f"stages.{number}.short_rows"


def _with_short_rows(method: RopeMethod, number: int, stage: Stage, before: Before) -> RopeMethod:
    """The method, joined with the checkpoint's RoPE if the stage trains short rows with it."""
    if stage.short_rows is None:
        return method
    if isinstance(method, NoRope):
        raise RopewalkError(
            f"{_short_rows(number)} trains short rows with the checkpoint's RoPE, which a stage with rope none drops; "
            "leave out one of the two"
        )
    joined = two_ropes(method, stage.context, before.checkpoint, _short_rows(number))
    if stage.rope.limiting.search is None:
        refuse_equal(joined, _short_rows(number))
    return joined


def provisional_method(
    recipe: Recipe, number: int, before: Before, table: Factors | None
) -> tuple[RopeMethod, str]:
    """A method with which a stage can be verified before the run, and a remark on its origin.

    Args:
        recipe, number, before, table: as for :func:`possible_methods`.
    """
    name, method = next(iter(possible_methods(recipe, number, before, table).items()))
    rope = recipe.stages[number].rope.limiting
    if rope.method == "auto":
        return method, f"rope auto chooses the base during the run; verified with its first candidate, {name}"
    if rope.search is None:
        return method, "verified with the method of the run"
    goal = search_goals(recipe, number, before)[1]
    return (
        goal.extended(goal.seeds(goal.space())[NTK]),
        "the factors are searched during the run; verified with NTK, an initial candidate of the search",
    )


@dataclass(frozen=True)
class StageBounds:
    """Bounds on a stage's RoPE that are known before a run.

    Attributes:
        low, high: methods with the smallest and the largest base that the stage may get; factors to be searched are
            1s. Checking both ends suffices, because every rule is monotonic in the base.
        method: the method if it is known before the run; otherwise None.
        origin: method and length from which its recommended base is derived; None if they are not known yet.
    """

    low: RopeMethod
    high: RopeMethod
    method: RopeMethod | None
    origin: RopeAt | None


def bounds_of(recipe: Recipe, checkpoint: RopeAt, tables: Sequence[Factors | None] = ()) -> list[StageBounds]:
    """Bounds on the RoPE of all stages before a run.

    Args:
        recipe: the recipe.
        checkpoint: method and trained length of the recipe's model.
        tables: factor table of each stage; None for stages that name none.

    Raises:
        RopewalkError: if a stage cannot have its method.
    """
    low = high = Before.first(checkpoint)
    found: list[StageBounds] = []
    # Whether the method, or the origin of the next recommended base, contains factors that a search has yet to find.
    searched = origin_searched = False
    for number, (stage, table) in enumerate(
        zip(recipe.stages, tables or (None,) * len(recipe.stages), strict=True)
    ):
        # Without RoPE a model is trained at the length that it has (DroPE's recalibration).
        still = stage.rope.limiting.method == NoRope.name or not low.method.rotates
        if number == 0 and stage.context < low.length + (not still):
            raise RopewalkError(
                f"stages.0.context must be {'at least' if still else 'longer than'} the trained length of {low.length} "
                f"tokens, got {stage.context}"
            )
        _refuse_ambiguous(stage, low.method, number)
        # A base that the run will measure is known only within bounds; what holds at both ends is checked now.
        lows, highs = (
            list(possible_methods(recipe, number, before, table).values()) for before in (low, high)
        )
        ends = lows[0], highs[0]
        if len(lows) > 1:
            # Which candidate wins is unknown before the run, so the bounds are the extremes of all of them.
            first, last = (end([*lows, *highs], key=lambda base: base.rope_theta) for end in (min, max))
            ends = first, last
        origin = low.origin if low.origin == high.origin and not origin_searched else None
        # A later stage with method default keeps the factors found; any other method replaces them.
        searched = stage.rope.limiting.search is not None or (
            searched and stage.rope.limiting.method == "default"
        )
        if not takes_recommended_base(stage.rope.limiting):
            origin_searched = searched
        known = ends[0] if ends[0] == ends[1] and not searched else None
        found.append(StageBounds(*ends, known, origin))
        low, high = (before.after(stage, end) for before, end in zip((low, high), ends, strict=True))
    return found


def rope_identity(recipe: Recipe, number: int, before: Before, table: Factors | None) -> dict[str, Any]:
    """What decides a stage's RoPE, in the keys of the recipe: the method itself unless the run measures it.

    Args:
        recipe, number, before, table: as for :func:`possible_methods`.
    """
    rope = recipe.stages[number].rope.limiting
    methods = possible_methods(recipe, number, before, table)
    if not rope.measured:
        return as_json(methods[rope.method])
    # Those of a search hold 1s, but also all else that it starts from.
    return {**deciding(rope), "from": {name: as_json(method) for name, method in methods.items()}}


def decide(number: int, before: Before, at: AtStage) -> Decision:
    """Decide a stage's RoPE, as the recipe gives it or by a measurement.

    The table of a search is on disk at the return.

    Args:
        number: index of the stage, counted from 0.
        before: state before the stage.
        at: state of the run at the stage; every rank must call this function.

    Raises:
        RopewalkError: if there are too few documents to measure on.
        RunFailure: if no candidate has a finite loss.
    """
    recipe = at.resolved.recipe
    rope = recipe.stages[number].rope.limiting
    if rope.search is not None:
        table = search_factors(search_of(recipe, number, before, at.weights), at)
        found = search_goals(recipe, number, before)[1].extended(candidate_of(table))
        method = _with_short_rows(found, number, recipe.stages[number], before)
        return Decision(method, {"search": search_summary(table, factors_file(stage_name(number)))})
    methods = possible_methods(recipe, number, before, at.resolved.tables[number])
    if rope.method != "auto":
        return Decision(methods[rope.method])
    choice = choose(methods, number, before.length, at)
    return Decision(choice.method, {"choice": choice.to_json()})


def _refuse_ambiguous(stage: Stage, current: RopeMethod, number: int) -> None:
    rope = stage.rope.limiting
    factor = rope.parameter("factor")
    if isinstance(current, Linear) and rope.method == "linear" and number == 0 and factor is None:
        raise RopewalkError(
            f"the checkpoint is already scaled linearly by {current.factor:g}, and its config does not say whether "
            "max_position_embeddings includes that factor; set stages.0.rope.factor to the total factor"
        )
    if rope.method == "ntk" and number and factor is not None:
        raise RopewalkError(
            f"stages.{number}.rope.factor {factor:g}: after the first stage, method 'ntk' accepts no factor, because "
            "the factor would multiply the base of the previous stage; omit 'factor', or use method 'theta' with "
            "rope_theta"
        )
    if rope.method == LongRope.name and stage.positions == "reset":
        raise RopewalkError(
            f"stages.{number}.positions is 'reset', so longrope would select factors by the longest document instead "
            "of the context; set positions: continuous"
        )
