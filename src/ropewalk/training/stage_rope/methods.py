"""The RoPE method of each stage: from the one before, chosen by ``auto``, or with factors from a table or a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    Default,
    Linear,
    LongRope,
    RopeMethod,
    candidate,
    method_for_target,
)
from ropewalk.search import Candidate, Factors, Goal, goal_of
from ropewalk.search.goal import NTK
from ropewalk.training.recipe.recipe import Recipe, Rope, Stage

AUTO = "auto"
AUTO_CANDIDATES = ("critical-dimension", "ntk", "current")
AUTO_ROWS = 4


def possible_methods(
    recipe: Recipe,
    current: RopeMethod,
    trained_length: int,
    tables: Sequence[Factors | None] = (),
) -> list[tuple[RopeMethod, RopeMethod]]:
    """The methods of each stage with the smallest and with the largest base that it may get.

    They are the same where no base is left to choose; a search for factors has 1s in their place. In between nothing
    new can happen: every rule gives a larger base for a larger one, so what is refused for neither end is refused for
    none.

    Args:
        current: method of the checkpoint.
        trained_length: tokens.
        tables: the factor table of each stage that names one.

    Raises:
        RopewalkError: if a stage cannot have its method.
    """
    low = high = current
    checkpoint = (current, trained_length)
    origins = [checkpoint, checkpoint]
    length = trained_length
    possible = []
    for number, stage in enumerate(recipe.stages):
        if number == 0 and stage.context <= length:
            raise RopewalkError(
                f"stages.0.context {stage.context} is not longer than the {length} tokens the model is trained for"
            )
        _refuse_ambiguous(stage, low, number)
        if stage.rope.method == AUTO:
            if not recipe.exact_rope:
                raise RopewalkError(
                    f"stages.{number}.rope: auto measures through ropewalk's rotary module; set exact_rope: true"
                )
            bases = [*auto_candidates(stage, low, length, number).values()]
            if high != low:
                bases += auto_candidates(stage, high, length, number).values()
            low, high = (end(bases, key=lambda base: base.rope_theta) for end in (min, max))
        elif stage.rope.search is not None:
            _refuse_start_tokens(stage.rope)
            _refuse_unsearchable(recipe, number)
            goals = [search_goals(stage, end, length, checkpoint, number)[1] for end in (low, high)]
            low, high = (goal.extended(Candidate((1.0,) * (current.rotary_dim // 2))) for goal in goals)
        else:
            table = tables[number] if tables else None
            low, high = (
                stage_method(stage.rope, end, length, stage.context, origin, table)
                for end, origin in zip((low, high), origins, strict=True)
            )
        origins = [origin_after(stage, end, origin) for end, origin in zip((low, high), origins, strict=True)]
        possible.append((low, high))
        length = stage.context
    return possible


def auto_candidates(stage: Stage, current: RopeMethod, length: int, number: int) -> dict[str, Default]:
    """The bases that an ``auto`` stage chooses from, by name.

    Args:
        stage: what the recipe says.
        current: method of the checkpoint or the stage before.
        length: tokens, before the stage.
        number: of the stage, counted from 0, for messages.

    Raises:
        RopewalkError: if the checkpoint is scaled, or a candidate has no base for this context.
    """
    # A dynamic-NTK checkpoint was trained unscaled, and could not be trained with otherwise.
    base = current.plain
    if not isinstance(base, Default):
        scaled = "the checkpoint is" if number == 0 else "the stage before leaves the checkpoint"
        raise RopewalkError(
            f"stages.{number}.rope: auto chooses among bases of unscaled RoPE, and {scaled} "
            f"{current.name}-scaled; choose {current.name} to scale it further, or default"
        )
    bases = {}
    for name in stage.rope.candidates or AUTO_CANDIDATES:
        try:
            method = candidate(name, base, length, stage.context)
        except RopewalkError as error:
            raise RopewalkError(f"stages.{number}.rope.candidates: {name}: {error}") from error
        bases[name] = Default(method.rotary_dim, method.rope_theta)
    return bases


def takes_recommended_base(rope: Rope) -> bool:
    """Whether a stage leaves its base to :func:`ropewalk.rope.theory.recommended_theta`."""
    return rope.method == "theta" and rope.rope_theta == "auto"


def origin_after(stage: Stage, method: RopeMethod, origin: tuple[RopeMethod, int]) -> tuple[RopeMethod, int]:
    """Method and length that the base of a later stage is derived from, after a stage.

    Bases that are recommended one after another all follow from what came before the first of them, so that a run in
    more stages ends with the same base.

    Args:
        stage: the stage that has just got its method.
        method: that method.
        origin: what the stage's own base was, or would have been, derived from.
    """
    return origin if takes_recommended_base(stage.rope) else (method, stage.context)


def stage_method(
    rope: Rope,
    current: RopeMethod,
    length: int,
    context: int,
    origin: tuple[RopeMethod, int],
    table: Factors | None = None,
) -> RopeMethod:
    """The method of a stage that says which, from the one before it.

    Args:
        rope: what the stage says; any method but ``auto``, and no search.
        current: method of the checkpoint or the stage before.
        length, context: tokens, before and from the stage on.
        origin: method and length that a recommended base is derived from: :func:`origin_after` of the stage before.
        table: the factor table that it names, if any.

    Raises:
        RopewalkError: if the method, its parameters or the table do not fit; the message says what would.
    """
    _refuse_start_tokens(rope)
    parameters = rope.method_parameters()
    if rope.method == LongRope.name:
        if table is not None:
            return _method_of_table(table, rope, current, length, context)
        if rope.long_factor is None:
            raise RopewalkError(
                "longrope needs factors: give long_factor (and short_factor if it is not to be 1s), factors: FILE, or "
                "search: {}"
            )
        if rope.short_factor is None:
            parameters["short_factor"] = _short_factor(current)
    if takes_recommended_base(rope):
        return method_for_target(rope.method, *origin, context, parameters=parameters)
    rope_theta = None if rope.rope_theta == "auto" else float(rope.rope_theta)
    return method_for_target(
        rope.method, current, length, context, rope_theta=rope_theta, parameters=parameters
    )


def _refuse_start_tokens(rope: Rope) -> None:
    if rope.start_tokens:
        raise RopewalkError(
            f"start_tokens {rope.start_tokens} has no place in a transformers config, so the result would not load "
            "elsewhere; set it to 0"
        )


def _short_factor(current: RopeMethod) -> tuple[float, ...]:
    """What short factors are where nobody says: those of the checkpoint, or 1s."""
    return current.short_factor if isinstance(current, LongRope) else (1.0,) * (current.rotary_dim // 2)


def _method_of_table(
    table: Factors, rope: Rope, current: RopeMethod, length: int, context: int
) -> RopeMethod:
    if table.start_tokens:
        raise RopewalkError(
            f"the factor table {rope.factors} has start_tokens {table.start_tokens}, which have no place in a "
            "transformers config, so the result would not load elsewhere; search again with start tokens 0"
        )
    if table.target_length < context:
        raise RopewalkError(
            f"the factor table {rope.factors} is for {table.target_length} tokens, and the stage has a context of "
            f"{context}; search for that length, or give a context of at most {table.target_length}"
        )
    method = table.method(current, length)
    if rope.attention_factor is not None:
        method = replace(method, attention_factor=rope.attention_factor)
    return method


def search_goals(
    stage: Stage, current: RopeMethod, length: int, checkpoint: tuple[RopeMethod, int], number: int
) -> tuple[Goal, Goal]:
    """What a stage's search measures candidates for, and what its result becomes a part of.

    Args:
        stage: whose rope has ``search``.
        current: method of the checkpoint or the stage before.
        length: tokens, before the stage.
        checkpoint: method and trained length of the recipe's model.
        number: of the stage, counted from 0, for messages.

    Raises:
        RopewalkError: if factors would come on top of another scaling, or the length needs none; or if the recipe's
            model, where it is to be measured, has other frequencies than the stage begins with.
    """
    assert stage.rope.search is not None
    try:
        goal = goal_of(current, length, stage.context, stage.rope.attention_factor)
        if stage.rope.search.weights == "current":
            return goal, goal
        own = goal_of(*checkpoint, stage.context, stage.rope.attention_factor)
    except RopewalkError as error:
        raise RopewalkError(f"stages.{number}.rope.search: {error}") from error
    here, there = ((g.current.rope_theta, g.original_length) for g in (goal, own))
    if here != there:
        raise RopewalkError(
            f"stages.{number}.rope.search.weights: the checkpoint has rope_theta {there[0]:g} and {there[1]} tokens, "
            f"the stage begins with {here[0]:g} and {here[1]}, so factors found on the one do not fit the other; "
            "choose current"
        )
    return own, goal


def stand_in(recipe: Recipe, current: RopeMethod, length: int) -> RopeMethod:
    """A method for the first stage of a recipe that is to search: what its search begins with, NTK's factors.

    Args:
        recipe: whose first stage searches.
        current: method of the checkpoint.
        length: tokens that it is trained for.
    """
    _, goal = search_goals(recipe.stages[0], current, length, (current, length), 0)
    return goal.extended(goal.seeds(goal.space())[NTK])


def _refuse_unsearchable(recipe: Recipe, number: int) -> None:
    if not recipe.exact_rope:
        raise RopewalkError(
            f"stages.{number}.rope: a search measures through ropewalk's rotary module; set exact_rope: true"
        )


def _refuse_ambiguous(stage: Stage, current: RopeMethod, number: int) -> None:
    rope = stage.rope
    if isinstance(current, Linear) and rope.method == "linear" and number == 0 and rope.factor is None:
        raise RopewalkError(
            f"the checkpoint is scaled by {current.factor:g} already, and its config cannot say whether "
            "max_position_embeddings counts that in; give the whole factor as stages.0.rope.factor"
        )
    if rope.method == "ntk" and number and rope.factor is not None:
        raise RopewalkError(
            f"stages.{number}.rope.factor {rope.factor:g}: an ntk factor multiplies the base of the stage before; "
            "leave it out, or give the base itself with method theta"
        )
    if rope.method == "longrope" and stage.positions == "reset":
        raise RopewalkError(
            f"stages.{number}: with positions reset, longrope would choose its factors by the longest document and "
            "not by the context; use positions continuous"
        )
