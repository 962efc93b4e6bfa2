"""mlx-lm, which reads ``config.json`` itself, with code for each type of model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ropewalk.compatibility.reader import (
    Checkpoint,
    Methods,
    Reader,
    RefusedConfigError,
    UnreadConfigError,
    refuse_unknown,
    stated_methods,
)
from ropewalk.compatibility.vllm import KNOWN
from ropewalk.errors import RopewalkError
from ropewalk.rope import LongRope, RopeMethod, Yarn
from ropewalk.rope.methods.base import ORIGINAL
from ropewalk.rope.methods.longrope import longrope_attention_factor

BASES: Mapping[str, float | None] = {
    "apertus": None, "bitnet": 1e4, "dots1": None, "gpt_oss": 1.5e5, "granite": None, "granitemoe": None,
    "llama": 1e4, "mistral": 1e4, "olmo2": 1e4, "olmoe": 1e4, "qwen2": 1e6, "seed_oss": 1e4, "smollm3": 1e4,
}  # fmt: skip
"""Types that read ``rope_theta`` and ``rope_scaling``, with the base where a file states none; None: it stops."""
UNSCALED: Mapping[str, float | None] = {
    "cohere": 8e6, "ernie4_5": None, "ernie4_5_moe": None, "gemma": 1e4, "gemma2": 1e4, "helium": None,
    "mixtral": 1e6, "qwen2_moe": 1e6, "qwen3_moe": None, "starcoder2": 1e5,
}  # fmt: skip
"""Types that read ``rope_theta`` alone: a scaling has no effect."""
LONGROPE = ("phi3",)
"""Types with code for longrope and linear alone, which want the older key ``type``."""
BY_LAYER = ("gemma3_text",)
"""Types whose windowed layers have ``rope_local_base_freq``."""
BOTH = ("qwen3",)
"""Types that read the newer key ``rope_parameters`` as well."""


def _read(checkpoint: Checkpoint) -> Methods:
    refuse_unknown(checkpoint.methods(), KNOWN)
    kind = checkpoint.model_type
    if kind in BY_LAYER:
        return _by_layer(checkpoint)
    if kind not in (*BASES, *UNSCALED, *LONGROPE, *BOTH):
        raise UnreadConfigError(f"the program's code for {kind or 'this model'} was not examined")
    stated = checkpoint.stated
    newer = stated.get("rope_parameters") or {} if kind in BOTH else {}
    theta = (
        stated.get("rope_theta") or newer.get("rope_theta") or {**BASES, **UNSCALED, "phi3": 1e4}.get(kind)
    )
    if theta is None:
        raise RefusedConfigError("it needs rope_theta at the top level of config.json")
    scaling = {} if kind in UNSCALED else stated.get("rope_scaling") or newer or {}
    if kind in LONGROPE:
        # It looks for the original length at the top level alone.
        scaling = _of_phi(scaling) | {ORIGINAL: stated.get(ORIGINAL, 4096)} if scaling else {}
    elif scaling.get("rope_type", scaling.get("type")) == "longrope" and ORIGINAL not in scaling:
        raise RefusedConfigError(f"it needs {ORIGINAL} inside rope_scaling")
    method = _method(checkpoint, theta, scaling)
    return {None: _changed(method, checkpoint, scaling)}


def _method(checkpoint: Checkpoint, theta: float, scaling: Mapping[str, Any]) -> RopeMethod:
    """The method of these two keys, without what the config says elsewhere."""
    dropped = ("rope_parameters", "rope_scaling", "rope_local_base_freq", ORIGINAL)
    known = {key: value for key, value in checkpoint.completed.items() if key not in dropped}
    try:
        (method,) = stated_methods(known | {"rope_theta": theta, "rope_scaling": dict(scaling)}).values()
    except RopewalkError as error:
        raise RefusedConfigError(str(error)) from error
    return method


def _by_layer(checkpoint: Checkpoint) -> Methods:
    stated = checkpoint.stated
    scaling = stated.get("rope_scaling") or {}
    full = _method(checkpoint, stated.get("rope_theta", 1e6), scaling)
    return {
        "full_attention": _changed(full, checkpoint, scaling),
        "sliding_attention": _method(checkpoint, stated.get("rope_local_base_freq", 1e4), {}),
    }


def _of_phi(scaling: Mapping[str, Any]) -> dict[str, Any]:
    missing = [key for key in ("long_factor", "type") if key not in scaling]
    if missing:
        raise RefusedConfigError(
            f"the program's code for phi3 needs {' and '.join(map(repr, missing))} in rope_scaling"
        )
    return dict(scaling) if scaling["type"] in ("longrope", "su", "linear") else {}


def _changed(method: RopeMethod, checkpoint: Checkpoint, scaling: Mapping[str, Any]) -> RopeMethod:
    match method:
        case Yarn():
            # A single mscale counts; transformers needs both. The ends of the ramp are always rounded.
            log_factor = math.log(method.factor)
            mscale, all_dim = scaling.get("mscale", 1), scaling.get("mscale_all_dim", 0)
            attention = (0.1 * mscale * log_factor + 1) / (0.1 * all_dim * log_factor + 1)
            original = scaling.get(ORIGINAL, 4096)
            return replace(
                method,
                truncate=True,
                attention_factor=attention,
                original_max_position_embeddings=original,
            )
        case LongRope():
            # The attention factor of the two lengths, whatever the config states.
            original = method.original_max_position_embeddings
            ratio = checkpoint.length / original
            published = longrope_attention_factor(ratio, original) if ratio > 1 else 1.0
            return replace(method, attention_factor=published)
        case _:
            return method


def _served(checkpoint: Checkpoint) -> None:
    return None


def _launch(model: str, checkpoint: Checkpoint) -> str:
    return f"mlx_lm.server --model {model}"


MLX_LM = Reader(
    "mlx-lm",
    "mlx-lm 0.32",
    "mlx_lm/models/rope_utils.py and the model's module of 0.32.2",
    _read,
    _served,
    _launch,
    # The long factors for every input.
    chooses="start",
)
