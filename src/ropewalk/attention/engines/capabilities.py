"""Capabilities of each engine: one predicate for ``auto``, for checks before a run, and for context parallelism.

The limits of the CUDA engines are those of torch 2.13's sources: ``varlen`` is FlashAttention 2
(``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``), ``flex`` a Triton kernel
(``torch/_inductor/kernel/flex``, its default tiles in ``torch/_inductor/template_heuristics/triton.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ropewalk.attention.choices import ENGINES, EngineName
from ropewalk.errors import EngineError

PREFERRED: tuple[EngineName, ...] = ("varlen", "flex", "sdpa")
"""Engines that ``auto`` tries on a GPU, in this order. The last one supports everything."""

Capability = tuple[int, int]
"""Compute capability of a GPU, as returned by ``torch.cuda.get_device_capability``."""
SIMULATED = "simulated"
"""Type of the device on which :mod:`ropewalk.dry_run` plays a GPU."""
LEAST_CAPABILITY: Capability = (8, 0)
HALVES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
LEAST_FLEX_WIDTH = 16
HOPPER: Capability = (9, 0)
"""The GPUs on which cuDNN is faster than FlashAttention 2, where torch prefers it for heads of up to 256 dimensions
(``sdp_utils.cpp``, ``check_cudnn_tensor_shapes`` and ``check_prefer_cudnn_attention``)."""


@dataclass(frozen=True)
class AttentionSpec:
    """The properties of a call that decide which engines can run it.

    Attributes:
        device: device of queries, keys and values. Tensors on ``meta`` are treated as on a GPU.
        dtype: dtype of queries, keys and values.
        head_dim: head dimension of queries and keys.
        value_dim: head dimension of values; None for ``head_dim``.
        softcap: soft cap of the scores; None for none.
        sinks: whether heads have learned sinks.
        backward: whether gradients are needed.
        ring: whether each rank has only part of the queries and the keys that they see (``parallel.ring``).
        one_run: whether a query sees all earlier tokens of its row, in every layer (``full``, without windows).
        capability: compute capability of the GPU; None for that of ``device``, or 8.0 if this machine has no GPU.
    """

    device: torch.device | str
    dtype: torch.dtype
    head_dim: int
    value_dim: int | None = None
    softcap: float | None = None
    sinks: bool = False
    backward: bool = True
    ring: bool = False
    one_run: bool = False
    capability: Capability | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Head dimension of queries and keys, and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type in ("cuda", "meta", SIMULATED)

    @property
    def gpu(self) -> Capability:
        """The compute capability to check against."""
        return self.capability or capability_of(torch.device(self.device))


def why_not(engine: EngineName, spec: AttentionSpec) -> str | None:
    """The reason why an engine cannot run this, as a phrase that continues its name; None if it can run it."""
    if spec.ring and engine in ("reference", "flex"):
        return (
            "needs all keys of a row at once, but with parallel.ring a rank receives only the keys that its queries "
            "attend to"
        )
    # Both are plain torch operations, which run wherever torch does.
    if engine in ("reference", "sdpa"):
        return None
    if engine == "flex" and not spec.on_gpu:
        return (
            f"has no backward on {spec.device}, only a forward under torch.no_grad()"
            if spec.backward
            else None
        )
    if not spec.on_gpu:
        return f"needs CUDA, but the tensors are on {spec.device}"
    found = _why_not_varlen(spec) if engine == "varlen" else _why_not_flex(spec)
    if found is None and spec.gpu < LEAST_CAPABILITY:
        least = _dotted(LEAST_CAPABILITY)
        return f"needs a GPU of compute capability {least} or higher, but this GPU has {_dotted(spec.gpu)}"
    return found


def resolve_engine(spec: AttentionSpec) -> EngineName:
    """The engine that ``auto`` selects without measuring.

    It is sdpa on a CPU; on a GPU the first of varlen, flex and sdpa that can run this. sdpa always can. On Hopper, sdpa
    comes first for rows of one run, also in a ring, for which it runs cuDNN: 0.73 of the rate of products, where
    FlashAttention 2 has 0.44 and FlexAttention 0.53 (docs/scaling.md). On other GPUs cuDNN is slower than
    FlashAttention.
    """
    if not spec.on_gpu or (spec.one_run and takes_cudnn(spec)):
        return "sdpa"
    return next(engine for engine in PREFERRED if why_not(engine, spec) is None)


def takes_cudnn(spec: AttentionSpec) -> bool:
    """Whether torch's dense attention runs cuDNN for these heads on such a GPU, unless another cuDNN is in its way."""
    return spec.gpu == HOPPER and _why_not_varlen(spec) is None


def check_engine(engine: str, spec: AttentionSpec) -> EngineName:
    """The engine that will run. Call this before a run starts, so that an unsupported engine cannot stop it later.

    Args:
        engine: name of an engine, or ``auto``.
        spec: properties of the attention to run.

    Raises:
        EngineError: if the engine does not exist or cannot run this; the message says why, and which one can.
    """
    require_engine_name(engine)
    able = resolve_engine(spec)
    named = next((name for name in ENGINES if name == engine), able)
    reason = why_not(named, spec)
    if reason is not None:
        instead = (
            ", or set parallel.ring to 1 and raise parallel.sequence" if "parallel.ring" in reason else ""
        )
        raise EngineError(f"engine {named} {reason}; use engine {able}{instead}")
    return named


def require_engine_name(engine: str) -> None:
    """Raise if no engine has this name."""
    if engine not in ENGINES and engine != "auto":
        raise EngineError(f"unknown attention engine {engine!r}; choose one of auto, {', '.join(ENGINES)}")


def _why_not_varlen(spec: AttentionSpec) -> str | None:
    head_dim, value_dim = spec.widths
    if spec.dtype not in HALVES:
        return f"needs bfloat16 or float16, got {spec.dtype}"
    if spec.softcap is not None:
        return f"does not support a soft cap (softcap={spec.softcap})"
    if head_dim != value_dim or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        limits = f"the same head dimension for keys and values, a multiple of 8 up to {MAX_HEAD_DIM}"
        return f"needs {limits}, got {head_dim} for keys and {value_dim} for values"
    return None


def _why_not_flex(spec: AttentionSpec) -> str | None:
    head_dim, value_dim = spec.widths
    if spec.dtype not in (torch.float32, *HALVES):
        return f"needs float32, bfloat16 or float16 on CUDA, got {spec.dtype}"
    if min(spec.widths) < LEAST_FLEX_WIDTH:
        return (
            f"needs head dimensions of at least {LEAST_FLEX_WIDTH} on CUDA, got {head_dim} for keys and "
            f"{value_dim} for values"
        )
    if not _tiles_fit(max(spec.widths), spec.dtype, spec.gpu):
        return (
            f"needs more shared memory than a GPU of compute capability {_dotted(spec.gpu)} has, with head "
            f"dimensions of {head_dim} for keys and {value_dim} for values in {spec.dtype}"
        )
    return None


def _tiles_fit(width: int, dtype: torch.dtype, capability: Capability) -> bool:
    """Whether torch's default tiles for this head dimension fit a GPU; torch rounds it up to a power of two.

    Data-centre GPUs (8.0, 9.0, 10.x) have at least 163 KiB of shared memory per block, other GPUs of the same
    generations 99 KiB. Known to fail: a head dimension of 192 on 8.6 and 8.9 (pytorch issue 180278).
    """
    row_bytes = (1 << (width - 1).bit_length()) * dtype.itemsize
    if capability in ((8, 0), (9, 0)) or capability[0] == 10:
        # torch has smaller tiles for a head dimension of exactly 256, in every dtype.
        return row_bytes <= 512 or width == MAX_HEAD_DIM
    return row_bytes <= 256


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


_played: Capability = LEAST_CAPABILITY


def play_gpu(capability: Capability) -> None:
    """Let the simulated device of this process answer for a GPU of this compute capability."""
    global _played
    _played = capability


def capability_of(device: torch.device) -> Capability:
    """Compute capability of a device: of its GPU, or of the one that the simulated device plays; 8.0 for others."""
    return _played if device.type == SIMULATED else _real_capability_of(device)


@cache
def _real_capability_of(device: torch.device) -> Capability:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return LEAST_CAPABILITY
