"""SGLang, which loads configs with transformers 5."""

from __future__ import annotations

import math
from dataclasses import replace

from ropewalk.compatibility.reader import Checkpoint, Methods, Reader, refuse_unknown
from ropewalk.compatibility.vllm import KNOWN, deepseek_yarn, formula, published_longrope
from ropewalk.rope import Default, DynamicNtk, Linear, LongRope, Proportional, RopeMethod, Yarn
from ropewalk.rope.theory.scaling import ntk_theta


def _read(checkpoint: Checkpoint) -> Methods:
    refuse_unknown(checkpoint.methods(), KNOWN)
    return {None: _changed(checkpoint.method(), checkpoint)}


def _changed(method: RopeMethod, checkpoint: Checkpoint) -> RopeMethod:
    match method:
        case Yarn() if checkpoint.completed.get("qk_rope_head_dim"):
            return deepseek_yarn(method)
        case Yarn():
            return replace(method, attention_factor=_attention_factor(method, checkpoint))
        case LongRope():
            return published_longrope(method, checkpoint)
        case Proportional():
            # It reads the share of pairs that rotate, and no factor.
            return replace(method, factor=1.0)
        case DynamicNtk():
            # Computed once, for the length times the factor.
            scale = method.factor * method.factor - (method.factor - 1)
            return Default(method.rotary_dim, ntk_theta(method.rotary_dim, method.rope_theta, scale))
        case _:
            return method


def _attention_factor(method: Yarn, checkpoint: Checkpoint) -> float:
    """Both mscales if both are given, also as 0; it drops ``attention_factor``."""
    entry = checkpoint.completed.get("rope_parameters") or checkpoint.completed.get("rope_scaling") or {}
    mscale, all_dim = entry.get("mscale"), entry.get("mscale_all_dim")
    # transformers ignores an mscale of 0; SGLang computes with it.
    if mscale is None or all_dim is None:
        return formula(method.factor)
    log_factor = math.log(method.factor)
    return float((0.1 * mscale * log_factor + 1) / (0.1 * all_dim * log_factor + 1))


def _served(checkpoint: Checkpoint) -> int:
    # It multiplies the stated length by a factor that comes without the original length.
    factors = [
        method.factor
        for method in checkpoint.methods().values()
        if isinstance(method, (Linear, DynamicNtk, Proportional))
    ]
    return int(checkpoint.length * factors[-1]) if factors else checkpoint.length


def _launch(model: str, checkpoint: Checkpoint) -> str:
    command = _launch_short(model, checkpoint.length)
    if all(method.switch_length is None for method in checkpoint.methods().values()):
        return command
    # Of an input that is read in parts, or that begins like an earlier one, keys would have the short factors.
    return f"{command} --chunked-prefill-size -1 --disable-radix-cache"


def _launch_short(model: str, tokens: int) -> str:
    return f"python -m sglang.launch_server --model-path {model} --context-length {tokens}"


SGLANG = Reader(
    "sglang",
    "SGLang 0.5",
    "sglang/srt/layers/rotary_embedding and srt/utils/hf_transformers/common.py of 0.5.23",
    _read,
    _served,
    _launch,
    # Phi3LongRoPEScaledRotaryEmbedding.forward: torch.any(positions > original), over all tokens of the pass.
    chooses="pass",
    launch_short=_launch_short,
    # Llama4Attention in srt/models/llama4.py.
    every_fourth=("llama4_text",),
)
