"""vLLM, before and after its version 0.30 took over yarn's attention factor. It loads configs with transformers 5."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from ropewalk.compatibility.reader import (
    Checkpoint,
    Methods,
    Reader,
    refuse_unknown,
    transformed,
)
from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, Proportional, RopeMethod, Yarn
from ropewalk.rope.methods.longrope import MSCALES, longrope_attention_factor

KNOWN = (Default, Linear, DynamicNtk, Llama3, LongRope, Proportional, Yarn)

BY_LAYER = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "step3p5")
"""Types for which it has code that reads the method of each layer type."""
THROUGH_TRANSFORMERS = ("olmo3", "smollm3")
"""Types without code of their own, which 0.33 runs with the model code of transformers."""
OWN_YARN = ("gpt_oss",)
"""Types whose code passes yarn on without the attention factor, in every version."""


def _current(checkpoint: Checkpoint) -> Methods:
    if checkpoint.model_type in THROUGH_TRANSFORMERS:
        return checkpoint.methods()
    return _read(checkpoint, reads_factor=checkpoint.model_type not in OWN_YARN)


def _before(checkpoint: Checkpoint) -> Methods:
    return _read(checkpoint, reads_factor=False)


def _read(checkpoint: Checkpoint, reads_factor: bool) -> Methods:
    refuse_unknown(checkpoint.methods(), KNOWN)
    if checkpoint.model_type not in BY_LAYER:
        # Refuses layer types with methods of their own.
        checkpoint.method()

    def change(method: RopeMethod) -> RopeMethod:
        if isinstance(method, Yarn):
            # Only latent attention (DeepSeek) has this key; vLLM then takes its own yarn.
            if checkpoint.completed.get("qk_rope_head_dim"):
                return deepseek_yarn(method)
            return method if reads_factor else replace(method, attention_factor=formula(method.factor))
        if isinstance(method, LongRope):
            return published_longrope(method, checkpoint)
        if isinstance(method, Proportional) and method.factor != 1:
            return replace(method, factor=1.0)
        if isinstance(method, DynamicNtk):
            # Its base is computed once, for max_position_embeddings, where dynamic NTK changes nothing yet.
            return Default(method.rotary_dim, method.rope_theta)
        return method

    return transformed(checkpoint, change)


def formula(factor: float) -> float:
    """yarn's published attention factor, ``0.1·ln s + 1``."""
    return 0.1 * math.log(factor) + 1


def deepseek_yarn(method: Yarn) -> Yarn:
    """yarn as vLLM and SGLang compute it for latent attention: from the two mscales alone, 1 and 0 if absent."""
    log_factor = math.log(method.factor)
    above = 0.1 * (1 if method.mscale is None else method.mscale) * log_factor + 1
    below = 0.1 * (method.mscale_all_dim or 0) * log_factor + 1
    return replace(method, attention_factor=above / below, truncate=True)


def published_longrope(method: LongRope, checkpoint: Checkpoint) -> LongRope:
    """longrope as vLLM and SGLang compute it: ``short_mscale`` and ``long_mscale``, otherwise the formula."""
    original = method.original_max_position_embeddings
    entry = checkpoint.completed.get("rope_parameters") or checkpoint.completed.get("rope_scaling") or {}
    # ropewalk reads a config with two different values as an error.
    stated = next((entry[key] for key in MSCALES if entry.get(key) is not None), None)
    ratio = checkpoint.length / original
    published = longrope_attention_factor(ratio, original) if ratio > 1 else 1.0
    return replace(method, attention_factor=published if stated is None else float(stated))


def _served(checkpoint: Checkpoint) -> int:
    return _length(checkpoint, checkpoint.length)


def _served_before(checkpoint: Checkpoint) -> int:
    scaled = [method for method in checkpoint.methods().values() if isinstance(method, Yarn)]
    if scaled:
        return int(scaled[-1].original_max_position_embeddings * scaled[-1].factor)
    return _length(checkpoint, checkpoint.length)


def _length(checkpoint: Checkpoint, length: int) -> int:
    methods = checkpoint.methods().values()
    # Without --max-model-len it stays within the original length, so that the short factors apply.
    longrope = [method for method in methods if isinstance(method, LongRope)]
    if longrope:
        return longrope[0].original_max_position_embeddings
    if "gemma3" in checkpoint.model_type:
        return length
    # It takes max_position_embeddings for the length before scaling.
    factors = [method.factor for method in methods if isinstance(method, (Linear, DynamicNtk, Proportional))]
    return int(length * factors[-1]) if factors else length


def _launch(model: str, checkpoint: Checkpoint) -> str:
    return f"vllm serve {model} --max-model-len {checkpoint.length}"


def _launch_short(model: str, tokens: int) -> str:
    return f"vllm serve {model} --max-model-len {tokens}"


def _overrides(model: str, checkpoint: Checkpoint) -> str | None:
    """The attention factor under the key that these versions read: ``attn_factor``, relative to the formula."""
    method = checkpoint.methods().get(None)
    if not isinstance(method, Yarn) or checkpoint.completed.get("qk_rope_head_dim"):
        return None
    if checkpoint.model_type in OWN_YARN:
        return None
    ratio = method.frequencies().attention_factor / formula(method.factor)
    entry = {"rope_type": method.name, **method.to_entry(), "attn_factor": ratio}
    overrides = json.dumps({"rope_parameters": entry}, separators=(",", ":"))
    return f"{_launch(model, checkpoint)} --hf-overrides '{overrides}'"


VLLM = Reader(
    "vllm",
    "vLLM 0.30 and later",
    "vllm/model_executor/layers/rotary_embedding and vllm/config/model.py of 0.33.0",
    _current,
    _served,
    _launch,
    chooses="start",
    launch_short=_launch_short,
)
VLLM_BEFORE_030 = Reader(
    "vllm-0.22",
    "vLLM 0.22 to 0.29",
    "vllm/model_executor/layers/rotary_embedding and vllm/config/model.py of 0.25.0 and 0.29.0",
    _before,
    _served_before,
    _launch,
    _overrides,
    chooses="start",
    launch_short=_launch_short,
)
