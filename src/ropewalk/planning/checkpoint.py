"""What of a checkpoint's config planning needs: one method, one trained length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope import RopeMethod, methods_from_config, trained_length

GLOBAL_LAYERS = "full_attention"


@dataclass(frozen=True)
class Checkpoint:
    """One RoPE setting to plan with.

    Attributes:
        method: of all layers, or of those with full attention.
        layer_type: which layers; None for all.
        trained_length: tokens, scaling included.
        notes: what a reader must know, a sentence each.
    """

    method: RopeMethod
    layer_type: str | None
    trained_length: int
    notes: Sequence[str]


def of_checkpoint(config: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint's setting from its config.

    Args:
        config: the decoder's config as a mapping.

    Raises:
        RopewalkError: if it states no length, or has no layers with full attention.
    """
    methods = methods_from_config(config)
    layer_type = None if None in methods else GLOBAL_LAYERS
    if layer_type not in methods:
        known = ", ".join(map(str, methods))
        raise RopewalkError(f"none of this model's layer types has full attention ({known}); nothing to plan")
    method = methods[layer_type]
    notes = []
    if layer_type is not None:
        others = ", ".join(str(kind) for kind in methods if kind != layer_type)
        notes.append(
            f"layers of type {others} have a RoPE of their own and a short window; this is about {layer_type} layers"
        )
    if not method.trainable:
        notes.append(f"{method.name} is for inference only; the model was trained unscaled")
    return Checkpoint(method, layer_type, trained_length(config, method), tuple(notes))
