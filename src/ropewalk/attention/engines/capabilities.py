"""Which engine can do what: one predicate for ``auto``, for checks before a run, and for the ring.

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

PREFERRED: tuple[EngineName, ...] = ("varlen", "flex", "segments")
"""What ``auto`` takes on a GPU: the first of these that can. The last one always can."""

Capability = tuple[int, int]
"""Compute capability of a GPU, as ``torch.cuda.get_device_capability`` gives it."""
LEAST_CAPABILITY: Capability = (8, 0)
HALVES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
LEAST_FLEX_WIDTH = 16


@dataclass(frozen=True)
class AttentionSpec:
    """What decides which engines can run.

    Attributes:
        device: of queries, keys and values. Tensors on ``meta`` stand for a GPU's.
        dtype: theirs.
        head_dim: width of a head of queries and keys.
        value_dim: width of a head of values; ``head_dim`` if None.
        softcap: soft cap of the scores, None for none.
        sinks: whether heads have learned sinks.
        backward: whether gradients are wanted.
        ring: whether a rank has a part of the queries and the keys that they see (``parallel.ring``).
        capability: the GPU's; that of ``device`` if None, and 8.0 where this machine has no GPU to ask.
    """

    device: torch.device | str
    dtype: torch.dtype
    head_dim: int
    value_dim: int | None = None
    softcap: float | None = None
    sinks: bool = False
    backward: bool = True
    ring: bool = False
    capability: Capability | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Of a head of queries and keys, and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type in ("cuda", "meta")

    @property
    def gpu(self) -> Capability:
        """The compute capability to go by."""
        return self.capability or _capability_of(torch.device(self.device))


def why_not(engine: EngineName, spec: AttentionSpec) -> str | None:
    """Why an engine cannot do this, as a sentence that goes on from its name; None if it can."""
    if spec.ring and engine in ("reference", "flex"):
        return "needs all keys of a row at once, and parallel.ring brings those that a rank's queries see"
    if engine in ("reference", "segments"):
        return None
    if engine == "flex" and not spec.on_gpu:
        return (
            f"has no backward on {spec.device}, only a forward under torch.no_grad()"
            if spec.backward
            else None
        )
    if not spec.on_gpu:
        return f"needs CUDA, the tensors are on {spec.device}"
    found = _why_not_varlen(spec) if engine == "varlen" else _why_not_flex(spec)
    if found is None and spec.gpu < LEAST_CAPABILITY:
        least = _dotted(LEAST_CAPABILITY)
        return f"needs a GPU of compute capability {least} or later, this one has {_dotted(spec.gpu)}"
    return found


def resolve_engine(spec: AttentionSpec) -> EngineName:
    """The engine that ``auto`` stands for: segments on a CPU; on a GPU the first of varlen, flex and segments that can
    do this. The last one always can."""
    if not spec.on_gpu:
        return "segments"
    return next(engine for engine in PREFERRED if why_not(engine, spec) is None)


def check_engine(engine: str, spec: AttentionSpec) -> EngineName:
    """The engine that will run; ask before a run starts, and nothing stops it halfway.

    Args:
        engine: an engine's name, or ``auto``.
        spec: what it is to do.

    Raises:
        EngineError: if there is no such engine, or it cannot do this; the message says why, and which one can.
    """
    require_engine_name(engine)
    able = resolve_engine(spec)
    named = next((name for name in ENGINES if name == engine), able)
    reason = why_not(named, spec)
    if reason is not None:
        instead = ", or parallel.ring 1 and a larger parallel.sequence" if "parallel.ring" in reason else ""
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
        return f"has no soft cap (softcap={spec.softcap})"
    if spec.sinks:
        return "has no attention sinks: its kernel gives no gradient through the sum that they enter"
    if head_dim != value_dim or head_dim % 8 or head_dim > MAX_HEAD_DIM:
        limits = f"equal head and value widths, a multiple of 8 up to {MAX_HEAD_DIM}"
        return f"needs {limits}, got {head_dim} and {value_dim}"
    return None


def _why_not_flex(spec: AttentionSpec) -> str | None:
    head_dim, value_dim = spec.widths
    if spec.dtype not in (torch.float32, *HALVES):
        return f"needs float32, bfloat16 or float16 on CUDA, got {spec.dtype}"
    if min(spec.widths) < LEAST_FLEX_WIDTH:
        return f"needs head and value widths of at least {LEAST_FLEX_WIDTH} on CUDA, got {head_dim} and {value_dim}"
    if not _tiles_fit(max(spec.widths), spec.dtype, spec.gpu):
        return (
            f"has no tiles for head and value widths of {head_dim} and {value_dim} in {spec.dtype} that fit the shared "
            f"memory of a GPU of compute capability {_dotted(spec.gpu)}"
        )
    return None


def _tiles_fit(width: int, dtype: torch.dtype, capability: Capability) -> bool:
    """Whether torch's default tiles of this width fit a GPU; widths are rounded up to powers of two there.

    GPUs for data centres (8.0, 9.0, 10.x) have 163 KiB of shared memory a block or more, the others of their
    generations 99. Known to fail: a width of 192 on an 8.6 and an 8.9 (pytorch issue 180278).
    """
    row_bytes = (1 << (width - 1).bit_length()) * dtype.itemsize
    if capability in ((8, 0), (9, 0)) or capability[0] == 10:
        # 256 itself has tiles of its own in every dtype.
        return row_bytes <= 512 or width == MAX_HEAD_DIM
    return row_bytes <= 256


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


@cache
def _capability_of(device: torch.device) -> Capability:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return LEAST_CAPABILITY
