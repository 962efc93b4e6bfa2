"""llama.cpp with a GGUF file of its own converter: what that file leaves out, and what ``ropewalk export --gguf`` adds.

Measured against llama.cpp itself: ``python -m benchmarks.llama_cpp``.
"""

from __future__ import annotations

from dataclasses import replace

from ropewalk.compatibility.reader import Checkpoint, Methods, Reader, RefusedConfigError, UnreadConfigError
from ropewalk.compatibility.vllm import formula
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.gguf import gguf_rope
from ropewalk.rope import Default, Linear, Llama3, LongRope, RopeMethod, Yarn
from ropewalk.rope.methods.longrope import longrope_attention_factor

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3",
}  # fmt: skip
"""llama.cpp's architecture by type of model, for those that were tried."""
EVERY_FOURTH = ("cohere2", "llama4_text", "smollm3")
"""Types whose layers without RoPE no key of a GGUF file states: each fourth has none (src/models/smollm3.cpp and
llama4.cpp, n_no_rope_layer_step; cohere2.cpp, whose converter writes no pattern of windows)."""
ORIGINAL_OF_LLAMA3 = 8192
"""The length that the converter takes for the original one of llama3, whatever the config says."""


def _read(checkpoint: Checkpoint) -> Methods:
    return {None: _converted(checkpoint.method(), checkpoint)}


def _converted(method: RopeMethod, checkpoint: Checkpoint) -> RopeMethod:
    # A base and a factor: the converter writes them for every architecture, so these need no trial.
    if isinstance(method, (Default, Linear)):
        return method
    architecture = ARCHITECTURES.get(checkpoint.model_type)
    if architecture is None:
        raise UnreadConfigError(
            f"the rope type {method.name!r} was not tested with the model type {checkpoint.model_type!r}"
        )
    unscaled = Default(method.rotary_dim, method.rope_theta)
    match method:
        case Yarn():
            # It reads neither the attention factor nor the ends of the ramp from a file.
            return replace(
                method, attention_factor=formula(method.factor), beta_fast=32.0, beta_slow=1.0, truncate=True
            )
        case Llama3():
            # Only the converter's class for Llama writes the factors of llama3; without them llama.cpp does not scale.
            if architecture != "llama":
                return unscaled
            return replace(method, original_max_position_embeddings=ORIGINAL_OF_LLAMA3)
        case LongRope():
            if architecture != "phi3":
                return unscaled
            # Its converter writes the formula's attention factor, whatever the config states.
            original = method.original_max_position_embeddings
            published = longrope_attention_factor(checkpoint.length / original, original)
            return replace(method, attention_factor=published)
        case _:
            raise RefusedConfigError(f"it does not implement the rope type {method.name!r}")


def _option(model: str, checkpoint: Checkpoint) -> str | None:
    if checkpoint.model_type not in ARCHITECTURES:
        return None
    try:
        gguf_rope(checkpoint.method(), ARCHITECTURES[checkpoint.model_type])
    except RopewalkError:
        # A file has no field that would express this method.
        return None
    return f"ropewalk export {model} --gguf CONVERTED.gguf --out FILE.gguf"


def _served(checkpoint: Checkpoint) -> int:
    return checkpoint.length


def _launch(model: str, checkpoint: Checkpoint) -> str:
    return f"llama-server -m FILE.gguf -c {checkpoint.length}"


def _launch_short(model: str, tokens: int) -> str:
    return f"llama-server -m FILE.gguf -c {tokens}"


LLAMA_CPP = Reader(
    "llama.cpp",
    "llama.cpp",
    "convert_hf_to_gguf.py, src/llama-context.cpp and src/llama-model.cpp of autumn 2026",
    _read,
    _served,
    _launch,
    _option,
    chooses="start",
    launch_short=_launch_short,
    every_fourth=EVERY_FOURTH,
)
