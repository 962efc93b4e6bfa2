"""What other programs read from a config that says longrope, so that all of them compute the same."""

from __future__ import annotations

import math
from typing import Any

from ropewalk.rope.config import MSCALES, ORIGINAL, Config
from ropewalk.rope.methods import LongRope, longrope_attention_factor


def for_all_readers(config: Config) -> dict[str, Any]:
    """A copy of a config that says longrope so that every reader computes the same with it.

    transformers wants ``factor``, the longest input over the original length, and takes ``attention_factor``. vLLM
    takes ``short_mscale`` and ``long_mscale``, and without them the published ``√(1 + ln s / ln T)``: they are
    written where the attention factor is another.

    Args:
        config: as :func:`~ropewalk.rope.config.replace_methods` gives it in the 5.x spelling, with its final
            ``max_position_embeddings``. One that has another RoPE, or one for each layer type, comes back as it is.
    """
    entry = config.get("rope_parameters") or {}
    if entry.get("rope_type") != LongRope.name:
        return dict(config)
    factor = config["max_position_embeddings"] / entry[ORIGINAL]
    said = {**entry, "factor": factor}
    if not has_published_attention(entry["attention_factor"], factor, entry[ORIGINAL]):
        said |= dict.fromkeys(MSCALES, entry["attention_factor"])
    return {**config, "rope_parameters": said}


def has_published_attention(attention_factor: float, factor: float, original_length: int) -> bool:
    """Whether an attention factor is ``√(1 + ln s / ln T)``, to within what float32 cos and sin can tell."""
    return math.isclose(attention_factor, longrope_attention_factor(factor, original_length), rel_tol=2**-24)
