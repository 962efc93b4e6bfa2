"""Stages whose RoPE is given in the recipe, as a method with parameters or as a factor table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import explain
from ropewalk.rope import LongRope, RopeMethod, method_for_target
from ropewalk.search import Factors, read_factors
from ropewalk.training.recipe.recipe import Recipe, Stage
from ropewalk.training.recipe.rope import Rope
from ropewalk.training.stage_rope.base import (
    Before,
    refuse_start_tokens,
    takes_recommended_base,
)


def given_method(stage: Stage, number: int, before: Before) -> RopeMethod:
    """A method with its parameters from the recipe; parameters that are not given are derived.

    Args:
        stage: the stage's section of the recipe.
        number: index of the stage, counted from 0.
        before: state before the stage.

    Raises:
        RopewalkError: if the method or its parameters are invalid; the message says what is valid.
    """
    rope = stage.rope.limiting
    refuse_start_tokens(rope)
    parameters = rope.method_parameters()
    if rope.method == LongRope.name:
        if parameters["long_factor"] is None:
            raise RopewalkError(
                f"stages.{number}.rope: longrope needs factors; set either long_factor (a list), factors (a file that "
                "`ropewalk search` wrote), or search: {} (the run then searches for factors before the stage)"
            )
        if parameters["short_factor"] is None:
            # Texts up to the original length then keep the angles that they had before the run.
            parameters["short_factor"] = _short_factor(before.method)
    if takes_recommended_base(rope):
        # From the origin and not from the stage before, so that a run of three stages ends at the same base as a run of
        # one.
        return method_for_target(rope.method, *before.origin, stage.context, parameters=parameters)
    rope_theta = None if rope.rope_theta == "auto" else float(rope.rope_theta)
    return method_for_target(
        rope.method, before.method, before.length, stage.context, rope_theta=rope_theta, parameters=parameters
    )


def table_method(stage: Stage, table: Factors, before: Before) -> RopeMethod:
    """LongRoPE with the factors of a table that the recipe names.

    Args:
        stage: the stage's section of the recipe.
        table: content of the table.
        before: state before the stage.

    Raises:
        RopewalkError: if the table does not fit the model or the stage.
    """
    rope, context = stage.rope.limiting, stage.context
    refuse_start_tokens(rope)
    if table.start_tokens:
        raise RopewalkError(
            f"the factor table {rope.factors} has start_tokens {table.start_tokens}, which a transformers config "
            "cannot store, so other programs could not load the result; search again with --start-tokens 0"
        )
    if table.target_length < context:
        raise RopewalkError(
            f"the factor table {rope.factors} is for {table.target_length} tokens, but the stage has a context of "
            f"{context}; search factors for {context} tokens, or set a context of at most {table.target_length}"
        )
    method = table.method(before.method, before.length)
    attention_factor = rope.parameter("attention_factor")
    return method if attention_factor is None else replace(method, attention_factor=attention_factor)


def _short_factor(current: RopeMethod) -> tuple[float, ...]:
    """Default short factors: those of the checkpoint, or 1s if it has none."""
    return current.short_factor if isinstance(current, LongRope) else (1.0,) * (current.rotary_dim // 2)


def with_tables(recipe: Recipe, tables: Sequence[str | Path]) -> Recipe:
    """The recipe with factor tables assigned to stages, as if each had ``rope: {method: longrope, factors: …}``.

    A table is assigned to the stage whose context equals its target length. With one table and one stage, a longer
    target length is accepted.

    Args:
        recipe: the recipe.
        tables: files of factor tables.

    Raises:
        RopewalkError: if a file is not a factor table, matches no stage or several stages, or if two tables match the
            same stage.
    """
    taken: dict[int, str | Path] = {}
    for path in tables:
        length = read_factors(Path(path).expanduser()).target_length
        number = _stage_of(recipe, path, length, len(tables))
        if number in taken:
            raise RopewalkError(
                f"the factor tables {taken[number]} and {path} are both for {length} tokens, but stage {number + 1} "
                "takes only one table; omit one of the two"
            )
        taken[number] = path
    stages = [
        {**stage.model_dump(), "rope": _with_table(stage.rope, taken[number])} if number in taken else stage
        for number, stage in enumerate(recipe.stages)
    ]
    try:
        # Validated as a whole, because model_copy would not check the new sections.
        return Recipe.model_validate({**dict(recipe), "stages": stages})
    except ValidationError as error:
        raise RopewalkError(f"with the factor tables: {explain(error, Recipe)}") from error


def _with_table(rope: Rope, path: str | Path) -> dict[str, Any]:
    """The stage's rope section with factors from a table; sections of other layer types are kept."""
    longrope = {"method": "longrope", "factors": str(path)}
    return {**rope.model_dump(), "full_attention": longrope} if rope.by_layer_type else longrope


def _stage_of(recipe: Recipe, path: str | Path, length: int, tables: int) -> int:
    contexts = [stage.context for stage in recipe.stages]
    # With one table and one stage there is no doubt which belongs to which.
    if len(contexts) == tables == 1 and length >= contexts[0]:
        return 0
    fitting = [number for number, context in enumerate(contexts) if context == length]
    if len(fitting) == 1:
        return fitting[0]
    there = " and ".join(map(str, contexts))
    if fitting:
        raise RopewalkError(
            f"the factor table {path} is for {length} tokens, but {len(fitting)} stages have this context; in the "
            f"recipe, give the table to one of these stages with rope: {{method: longrope, factors: {path}}}"
        )
    raise RopewalkError(
        f"the factor table {path} is for {length} tokens, but the stages have contexts of {there} tokens; either use "
        "tables for these contexts, or change a context"
    )
