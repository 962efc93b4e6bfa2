"""RoPE of layer types that do not limit the context, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import RopeMethod, method_for_target
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.recipe.rope import Rope


def ropes_of_other_layers(
    recipe: Recipe, config: ModelConfig, trained_length: int
) -> tuple[dict[str, RopeMethod], ...]:
    """RoPE of each layer type that does not limit the context, for each stage; empty if all layers share one RoPE.

    A layer type that a stage does not name keeps its RoPE. The result does not depend on measurements of the run.

    Args:
        recipe: the recipe.
        config: config of the checkpoint.
        trained_length: trained length of the checkpoint, tokens.

    Raises:
        RopewalkError: if a stage names a layer type without a RoPE of its own, or its method does not fit.
    """
    current, length = config.other_ropes, trained_length
    found = []
    for number, stage in enumerate(recipe.stages):
        for kind, rope in stage.rope.by_layer_type.items():
            if kind not in config.methods:
                raise RopewalkError(f"stages.{number}.rope.{kind}: {_not_there(config.methods)}")
            # The layers that limit the context are not in it: the stage decides their RoPE.
            if kind in current:
                try:
                    current = {**current, kind: _method(rope, current[kind], length, stage.context)}
                except RopewalkError as error:
                    raise RopewalkError(f"stages.{number}.rope.{kind}: {error}") from error
        found.append(current)
        length = stage.context
    return tuple(found)


def _method(rope: Rope, current: RopeMethod, length: int, context: int) -> RopeMethod:
    rope_theta = None if rope.rope_theta == "auto" else float(rope.rope_theta)
    return method_for_target(
        rope.method, current, length, context, rope_theta=rope_theta, parameters=rope.method_parameters()
    )


def _not_there(methods: Mapping[str | None, RopeMethod]) -> str:
    if None in methods:
        return "all layers of the model share one RoPE; write the method directly under rope, without layer types"
    return f"the model has no RoPE for this layer type; choose one of {', '.join(map(str, methods))}"


def described(method: RopeMethod) -> str:
    """One-line description, such as ``yarn, rope_theta 500,000, factor 8``."""
    stated = {key: value for key, value in method.to_entry().items() if isinstance(value, int | float)}
    return ", ".join([method.name, *(f"{key} {value:,g}" for key, value in stated.items())])
