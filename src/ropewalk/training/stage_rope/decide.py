"""The RoPE of a stage: what it may become, before the run, and what it becomes, in the run.

A stage gives its method, names a factor table, searches for factors, or chooses a base (``auto``).
:func:`possible_methods` alone tells these apart before the run, and :func:`decide` in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.rope import Linear, LongRope, RopeMethod
from ropewalk.search import Candidate, Factors
from ropewalk.search.goal import NTK
from ropewalk.training.recipe.recipe import Recipe, Stage
from ropewalk.training.resolved import AtStage, ResolvedRecipe, RopeAt
from ropewalk.training.stage_rope.auto import auto_candidates, choose, recorded_choice
from ropewalk.training.stage_rope.base import (
    Before,
    Decision,
    factors_file,
    stage_name,
    takes_recommended_base,
)
from ropewalk.training.stage_rope.given import given_method, refuse_other_table, table_method
from ropewalk.training.stage_rope.search import (
    candidate_of,
    check_stage_rows,
    kept_factors,
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
        return auto_candidates(recipe, number, before)
    if rope.search is not None:
        ones = Candidate((1.0,) * (before.checkpoint[0].rotary_dim // 2))
        return {rope.method: search_goals(recipe, number, before)[1].extended(ones)}
    given = given_method(stage, number, before) if table is None else table_method(stage, table, before)
    return {rope.method: given}


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
        if number == 0 and stage.context <= low.length:
            raise RopewalkError(
                f"stages.0.context must be longer than the trained length of {low.length} tokens, got {stage.context}"
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


def check_stage(number: int, trained: int, at: AtStage, outdated: Collection[str]) -> None:
    """Raise now if a stage's RoPE could not be decided when the run reaches it.

    Args:
        number: index of the stage, counted from 0.
        trained: trained length of the model at the stage, tokens.
        at: state of the run at the stage; its weights are not used.
        outdated: files in the run's folder that will be moved away.

    Raises:
        RopewalkError: with advice on what to change.
    """
    stage, table = at.resolved.recipe.stages[number], at.resolved.tables[number]
    kept = at.output / factors_file(stage_name(number))
    if stage.rope.limiting.search is not None:
        check_stage_rows(number, trained, at, outdated)
    # Without a copy, or with one that is about to be moved away, there is nothing to contradict.
    elif table is not None and kept.name not in outdated and kept.is_file():
        refuse_other_table(stage, table, kept)


def settled(
    resolved: ResolvedRecipe, number: int, before: Before, output: Path, begun: bool
) -> Decision | None:
    """The decision on a stage's RoPE if it needs no measurement, otherwise None.

    Args:
        resolved: the recipe.
        number: index of the stage, counted from 0.
        before: state before the stage.
        output: folder of the run, which may contain an earlier decision.
        begun: whether the stage has already been trained; its decision is never measured again.

    Raises:
        RopewalkError: if the decision of a stage that has started is missing, or belongs to another recipe.
    """
    recipe = resolved.recipe
    rope = recipe.stages[number].rope.limiting
    if rope.search is not None:
        kept = kept_factors(search_of(recipe, number, before), recipe, output, begun)
        return None if kept is None else _searched(recipe, number, before, kept)
    methods = possible_methods(recipe, number, before, resolved.tables[number])
    if rope.method != "auto":
        return Decision(methods[rope.method])
    choice = recorded_choice(methods, number, output, begun)
    return None if choice is None else Decision(choice.method, {"choice": choice.to_json()})


def decide(number: int, before: Before, at: AtStage) -> Decision:
    """Decide a stage's RoPE: as it is settled already, or by a measurement, whose result is on disk at the return.

    Args:
        number: index of the stage, counted from 0.
        before: state before the stage.
        at: state of the run at the stage; every rank must call this function.

    Raises:
        RopewalkError: if there are too few documents to measure on.
        RunFailure: if no candidate has a finite loss.
    """
    recipe = at.resolved.recipe
    # Measuring takes all ranks, so they must agree on whether it is needed.
    known = at.context.world.on_rank_0(lambda: settled(at.resolved, number, before, at.output, False))
    if known is not None:
        return known
    if recipe.stages[number].rope.limiting.search is not None:
        return _searched(
            recipe, number, before, search_factors(search_of(recipe, number, before, at.weights), at)
        )
    choice = choose(possible_methods(recipe, number, before), number, before.length, at)
    return Decision(choice.method, {"choice": choice.to_json()})


def _searched(recipe: Recipe, number: int, before: Before, table: Factors) -> Decision:
    method = search_goals(recipe, number, before)[1].extended(candidate_of(table))
    return Decision(method, {"search": search_summary(table, factors_file(stage_name(number)))})


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
