"""The RoPE method of each stage: derived from the one before, or chosen by ``auto`` from a few bases."""

from __future__ import annotations

from dataclasses import fields

from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    MethodParameters,
    Ntk,
    RopeMethod,
    candidate,
    method_for_target,
)
from ropewalk.training.recipe import Recipe, Rope, Stage

AUTO = "auto"
AUTO_CANDIDATES = ("critical-dimension", "ntk", "current")
AUTO_ROWS = 4


def possible_methods(
    recipe: Recipe, current: RopeMethod, trained_length: int
) -> list[tuple[RopeMethod, RopeMethod]]:
    """The methods of each stage with the smallest and with the largest base that it may get.

    They are the same where nothing is left to choose. In between nothing new can happen: every rule gives a larger
    base for a larger one, so what is refused for neither end is refused for none.

    Args:
        current: method of the checkpoint.
        trained_length: tokens.

    Raises:
        RopewalkError: if a stage cannot have its method.
    """
    low = high = current
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
        else:
            low, high = (stage_method(stage.rope, end, length, stage.context) for end in (low, high))
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
    if not isinstance(current, Default | DynamicNtk | Ntk):
        scaled = "the checkpoint is" if number == 0 else "the stage before leaves the checkpoint"
        raise RopewalkError(
            f"stages.{number}.rope: auto chooses among bases of unscaled RoPE, and {scaled} "
            f"{current.name}-scaled; choose {current.name} to scale it further, or default"
        )
    # A dynamic-NTK checkpoint was trained unscaled, and could not be trained with otherwise.
    base = (
        current.as_default() if isinstance(current, Ntk) else Default(current.rotary_dim, current.rope_theta)
    )
    bases = {}
    for name in stage.rope.candidates or AUTO_CANDIDATES:
        try:
            method = candidate(name, base, length, stage.context)
        except RopewalkError as error:
            raise RopewalkError(f"stages.{number}.rope.candidates: {name}: {error}") from error
        bases[name] = Default(method.rotary_dim, method.rope_theta)
    return bases


def stage_method(rope: Rope, current: RopeMethod, length: int, context: int) -> RopeMethod:
    """The method of a stage that says which, from the one before it.

    Args:
        rope: what the stage says; any method but ``auto``.
        current: method of the checkpoint or the stage before.
        length, context: tokens, before and from the stage on.
    """
    if rope.start_tokens:
        raise RopewalkError(
            f"start_tokens {rope.start_tokens} has no place in a transformers config, so the result would not load "
            "elsewhere; set it to 0"
        )
    parameters = MethodParameters(**{f.name: getattr(rope, f.name) for f in fields(MethodParameters)})
    rope_theta = None if rope.rope_theta == "auto" else float(rope.rope_theta)
    return method_for_target(
        rope.method, current, length, context, rope_theta=rope_theta, parameters=parameters
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
