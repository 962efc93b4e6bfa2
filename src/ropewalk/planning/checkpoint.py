"""What of a checkpoint's config planning needs: one method, one trained length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope import RopeMethod, head_dim, methods_from_config, trained_length
from ropewalk.rope.layers import FULL, attention_of_layers, layer_notes


@dataclass(frozen=True)
class Checkpoint:
    """One RoPE setting to plan with.

    Attributes:
        method: of all layers, or of those with full attention.
        head_dim: dimensions of a head, rotated or not.
        trained_length: tokens, scaling included.
        plannable: whether some layer both has RoPE and sees everything before it; a base for a longer context has no
            meaning elsewhere.
        notes: what a reader must know, a sentence each.
    """

    method: RopeMethod
    head_dim: int
    trained_length: int
    plannable: bool
    notes: Sequence[str]


def of_checkpoint(config: Mapping[str, Any], given_length: int | None = None) -> Checkpoint:
    """Read a checkpoint's setting from its config.

    Args:
        config: the decoder's config as a mapping.
        given_length: the trained length where the user knows better, tokens.

    Raises:
        RopewalkError: if it states no length and none is given, or it has no layers with full attention.
    """
    methods = methods_from_config(config)
    layer_type = None if None in methods else FULL
    if layer_type not in methods:
        known = ", ".join(map(str, methods))
        raise RopewalkError(f"none of this model's layer types has full attention ({known}); nothing to plan")
    method = methods[layer_type]
    length = trained_length(config, method) if given_length is None else given_length
    plannable = any(layer.rotates and layer.kind == FULL for layer in attention_of_layers(config))
    return Checkpoint(
        method, head_dim(config), length, plannable, tuple(_notes(config, methods, method, layer_type))
    )


def _notes(
    config: Mapping[str, Any],
    methods: Mapping[str | None, RopeMethod],
    method: RopeMethod,
    layer_type: str | None,
) -> list[str]:
    notes = layer_notes(config)
    if layer_type is not None:
        others = ", ".join(str(kind) for kind in methods if kind != layer_type)
        notes.append(f"layers of type {others} have a RoPE of their own; this is about {layer_type} layers")
    if not method.trainable:
        notes.append(
            f"{method.name} is for inference only: the model was trained unscaled and is planned for so"
        )
    if method.rotary_dim < head_dim(config):
        notes.append(
            f"{method.rotary_dim} of {head_dim(config)} dimensions of a head are rotated; the others compare tokens "
            "alike at every distance, so a context bound, which counts the rotated ones alone, is cautious here"
        )
    return notes
