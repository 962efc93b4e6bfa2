"""Choices of a model's architecture that make an extension of its context better or worse (OlmPool)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.models.config.layers import which_layers
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.norms import Placement, QkNorm, norms_of

FINDING = (
    "normalisation, grouped key/value heads, sliding windows and the length of pretraining: each choice alone has a "
    "minor effect on long contexts after an extension, three or more together lower the results by up to 47 %, and "
    "neither loss nor short benchmarks show it"
)
SOURCE = "Bertsch et al., arXiv:2608.10296 (OlmPool)"
STUDIED = "26 models of 7B parameters, extended alike; says nothing about other sizes, data or extensions"
"""Which choices compound in the numbers of the source, the source, and what it does not account for."""
PLACEMENTS = {"pre": "pre-norm", "post": "post-norm", "both": "norms before and after attention"}
QK_NORMS = {"none": "no QK norm", "head": "QK norm in each head", "layer": "QK norm over all heads"}


@dataclass(frozen=True)
class ExtensionChoices:
    """The choices that OlmPool varies, as a model's config shows them. None stands for what is not known.

    Attributes:
        norm_placement: ``pre``, ``post`` or ``both``: norms before attention, after it, or both.
        qk_norm: ``none``, ``head`` (queries and keys of each head are normalised) or ``layer`` (of all heads together).
        num_attention_heads, num_key_value_heads: heads of queries, and of keys and values; fewer of the latter are
            grouped.
        latent_attention: whether keys and values are compressed instead (multi-head latent attention).
        windowed_layers: numbers of the layers with a sliding window or chunks shorter than the trained length, from 0.
        num_layers: number of layers.
        sliding_window: the shortest of these windows in tokens.
        pretrained_length: tokens of the pretraining, which no config states, as the user gave them.

    Source: Bertsch et al., arXiv:2608.10296.
    """

    norm_placement: Placement | None
    qk_norm: QkNorm | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    latent_attention: bool
    windowed_layers: tuple[int, ...]
    num_layers: int
    sliding_window: int | None
    pretrained_length: int | None

    @property
    def note(self) -> str:
        """Which choices this model has, in one sentence, with the largest effect that the source found."""
        return (
            "choices that compound in an extension (OlmPool: three or more together cost up to 47 %): "
            f"{', '.join([*self._stated(), self._pretraining()])}"
        )

    def _stated(self) -> list[str]:
        if self.norm_placement is None or self.qk_norm is None:
            norms = ["norms not examined"]
        else:
            norms = [PLACEMENTS[self.norm_placement], QK_NORMS[self.qk_norm]]
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.latent_attention:
            shared = "multi-head latent attention"
        elif heads is None or kv_heads is None:
            shared = "number of heads unknown"
        else:
            shared = f"{kv_heads} key/value heads for {heads} query heads"
        if not self.windowed_layers:
            return [*norms, shared, "no sliding windows"]
        where = which_layers(self.windowed_layers, self.num_layers)
        return [*norms, shared, f"windows of {self.sliding_window:,} tokens in {where}"]

    def _pretraining(self) -> str:
        if self.pretrained_length is not None:
            return f"pretrained with {self.pretrained_length:,} tokens"
        return "pretraining length unknown (--pretrained-length)"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        layers = {"windowed_layers": list(self.windowed_layers)}
        return {**asdict(self), **layers, "finding": FINDING, "source": SOURCE, "caveat": STUDIED}


def extension_choices(config: ModelConfig, pretrained_length: int | None = None) -> ExtensionChoices:
    """Read the choices from a config.

    Args:
        config: the model's config.
        pretrained_length: tokens of the pretraining; None if unknown.

    Raises:
        RopewalkError: if the model was trained for fewer tokens than that.
    """
    if pretrained_length is not None and pretrained_length > config.trained_length:
        raise RopewalkError(
            f"--pretrained-length {pretrained_length} is more than the trained length of {config.trained_length} "
            "tokens; give the sequence length of the pretraining, which came before any extension (or set the trained "
            "length with --from)"
        )
    norms = norms_of(config.values)
    # A window of more tokens than the model was trained with has limited nothing (Phi-3).
    windows = {
        number: layer.window
        for number, layer in enumerate(config.layers)
        if layer.window is not None and layer.window < config.trained_length
    }
    return ExtensionChoices(
        norm_placement=None if norms is None else norms.placement,
        qk_norm=None if norms is None else norms.qk_norm,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        latent_attention=bool(config.values.get("kv_lora_rank")),
        windowed_layers=tuple(windows),
        num_layers=len(config.layers),
        sliding_window=min(windows.values(), default=None),
        pretrained_length=pretrained_length,
    )
