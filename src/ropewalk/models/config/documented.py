"""Lengths that publishers document for their models, where ``config.json`` says something else or less.

A model is recognised by the contents of its config, so that copies and fine-tunes of it are too, wherever they lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.rope import Default, RopeMethod, Yarn


@dataclass(frozen=True)
class Documented:
    """What a publisher documents of the lengths of one or more models.

    Attributes:
        name: the models.
        model_type: as their configs state it.
        shapes: their hidden sizes and numbers of layers.
        rope_theta: their base.
        stated: ``max_position_embeddings`` of their configs, tokens.
        native: tokens that they were trained for.
        source: where that is documented.
        factor: factor of the yarn with which the publisher serves longer texts without training; None if it documents
            none.
    """

    name: str
    model_type: str
    shapes: tuple[tuple[int, int], ...]
    rope_theta: float
    stated: int
    native: int
    source: str
    factor: int | None = None

    def matches(self, config: Mapping[str, Any], rope_theta: float) -> bool:
        """Whether a config is that of one of these models."""
        return (
            config.get("model_type") == self.model_type
            and (config.get("hidden_size"), config.get("num_hidden_layers")) in self.shapes
            and rope_theta == self.rope_theta
            and config.get("max_position_embeddings") == self.stated
        )

    @property
    def reaches(self) -> int:
        """Tokens that the publisher serves without training."""
        return self.native * (self.factor or 1)

    def length_note(self) -> str | None:
        """One sentence on a length that is not the config's; None if it is."""
        if self.native == self.stated:
            return None
        return (
            f"max_position_embeddings is {self.stated}, but {self.name}, whose shape this config has, is trained for "
            f"{self.native} tokens ({self.source}), which is taken as the trained length (set another with --from)"
        )

    def route_note(self) -> str | None:
        """One sentence on the publisher's way to longer texts without training; None if it documents none."""
        if self.factor is None:
            return None
        entry = {
            "rope_type": Yarn.name,
            "rope_theta": self.rope_theta,
            "factor": float(self.factor),
            "original_max_position_embeddings": self.native,
        }
        return (
            f"without training, the publisher of {self.name} serves up to {self.reaches:,} tokens with rope_parameters "
            f"{json.dumps(entry)} in config.json ({self.source}); this changes short texts too"
        )


_QWEN3 = "model card of Qwen/Qwen3-8B"
_QWEN2 = "arXiv:2407.10671, section 3.2, and arXiv:2412.15115, section 3.3"
_LARGE_QWEN2 = ((3584, 28), (5120, 48), (5120, 64), (8192, 80))

DOCUMENTED = (
    Documented(
        "Qwen3 4B, 8B, 14B or 32B", "qwen3", ((2560, 36), (4096, 36), (5120, 40), (5120, 64)), 1e6, 40960, 32768,
        _QWEN3, 4,
    ),
    Documented(
        "Qwen3 0.6B or 1.7B", "qwen3", ((1024, 28), (2048, 28)), 1e6, 40960, 32768, "model card of Qwen/Qwen3-0.6B"
    ),
    Documented(
        "Qwen3 30B-A3B or 235B-A22B", "qwen3_moe", ((2048, 48), (4096, 94)), 1e6, 40960, 32768,
        "model card of Qwen/Qwen3-30B-A3B", 4,
    ),
    # Their base models state 131,072, and those for chat 32,768.
    Documented("Qwen2 or Qwen2.5, 7B to 72B", "qwen2", _LARGE_QWEN2, 1e6, 131072, 32768, _QWEN2, 4),
    Documented("Qwen2 or Qwen2.5, 0.5B or 1.5B", "qwen2", ((896, 24), (1536, 28)), 1e6, 131072, 32768, _QWEN2),
    Documented(
        "Qwen2 or Qwen2.5, 7B to 72B", "qwen2", _LARGE_QWEN2, 1e6, 32768, 32768,
        "model card of Qwen/Qwen2.5-7B-Instruct", 4,
    ),
    Documented("Mistral 7B v0.1", "mistral", ((4096, 32),), 1e4, 32768, 8192, "arXiv:2310.06825, table 1"),
    Documented(
        "Mistral NeMo", "mistral", ((5120, 40),), 1e6, 1024000, 131072,
        "model card of mistralai/Mistral-Nemo-Base-2407",
    ),
)  # fmt: skip
"""One entry for each config; only what a source documents."""


def documented(config: Mapping[str, Any], method: RopeMethod) -> Documented | None:
    """What is documented of a model with this config; None if nothing, or if it is scaled in another way.

    Args:
        config: a decoder's values.
        method: the RoPE method of the layers that limit the context.
    """
    found = next((each for each in DOCUMENTED if each.matches(config, method.rope_theta)), None)
    if found is None or isinstance(method, Default):
        return found
    route = isinstance(method, Yarn) and (method.factor, method.original_max_position_embeddings)
    return found if route == (found.factor, found.native) else None
