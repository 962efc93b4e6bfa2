"""attend: one call for every engine; it checks, dispatches, and never falls back."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.packing import PackedLayout

log = logging.getLogger("ropewalk")

EngineName = Literal["reference", "segments", "flex", "varlen"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
MAX_FLASH_HEAD_DIM = 256
FLEX_BLOCK = 128
"""Rows must be a multiple of FlexAttention's block on CUDA."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout | Sequence[PackedLayout],
    engine: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over packed rows, forward and backward.

    Args:
        query: ``[batch, num_heads, length, head_dim]``, RoPE already applied.
        key: ``[batch, num_kv_heads, length, head_dim]``; num_heads is a multiple of num_kv_heads.
        value: ``[batch, num_kv_heads, length, value_dim]``, same dtype and device.
        layout: one layout for every row of the batch, or one a row.
        engine: ``reference``, ``segments``, ``flex``, ``varlen``, or ``auto``, which takes what
            :func:`resolve_engine` says. A named engine never falls back to another.
        scale: multiplier of q·k; 1/sqrt(head_dim) if not given.
        softcap: soft cap of the scores (Gemma 2), none if not given.

    Returns:
        ``[batch, num_heads, length, value_dim]`` in the dtype of the input.

    Raises:
        RopewalkError: if shapes, dtypes or layouts contradict each other.
        EngineError: if the engine cannot do this; the message names one that can.

    Example:
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> attend(q, k, v, PackedLayout.from_lengths([3, 2])).shape
        torch.Size([1, 2, 6, 8])
    """
    layouts = _layouts_of(layout, len(query))
    _check_tensors(query, key, value, layouts)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if engine == "auto":
        widest = max(query.shape[-1], value.shape[-1])
        engine = resolve_engine(query.device, query.dtype, softcap, widest, query.shape[2])
        _say_once(engine, query.device)
    check_engine(
        engine,
        query.device,
        query.dtype,
        query.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        softcap=softcap,
        backward=needs_grad,
    )
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    plan = _plan(engine, layouts, query.device)
    output: Tensor = _module(engine).run(query, key, value, plan, scale, softcap)
    return output


def resolve_engine(
    device: torch.device | str,
    dtype: torch.dtype,
    softcap: float | None = None,
    head_dim: int = 64,
    length: int = FLEX_BLOCK,
) -> EngineName:
    """The engine that ``auto`` stands for: segments on a CPU; on CUDA varlen where it can, else flex where the
    row's length suits it, else segments, which can everything.

    Args:
        device: where the tensors live.
        dtype: their dtype; varlen needs a 16-bit one.
        softcap: soft cap of the scores, which varlen has not.
        head_dim: widest head; varlen ends at 256.
        length: tokens of a row; flex needs a multiple of 128.
    """
    if torch.device(device).type != "cuda":
        return "segments"
    if dtype in (torch.bfloat16, torch.float16) and softcap is None and head_dim <= MAX_FLASH_HEAD_DIM:
        return "varlen"
    return "segments" if length % FLEX_BLOCK else "flex"


def check_engine(
    engine: str,
    device: torch.device | str,
    dtype: torch.dtype,
    length: int,
    *,
    head_dim: int,
    value_dim: int | None = None,
    softcap: float | None = None,
    backward: bool = True,
) -> None:
    """Raise if an engine cannot do this; ask before a run starts, and nothing stops it halfway.

    Args:
        engine: an engine's name, or ``auto``.
        device, dtype: of queries, keys and values.
        length: tokens of a row.
        head_dim, value_dim: widths of a head; equal if value_dim is None.
        softcap: soft cap of the scores, None for none.
        backward: whether gradients are wanted.

    Raises:
        EngineError: naming the engine, what it cannot do, and an engine that can.
    """
    if engine == "auto":
        engine = resolve_engine(device, dtype, softcap, max(head_dim, value_dim or head_dim), length)
    require_engine_name(engine)
    on_cuda = torch.device(device).type == "cuda"
    reason = None
    if engine == "varlen":
        if not on_cuda:
            reason = f"needs CUDA, the tensors are on {device}; use engine segments"
        elif dtype not in (torch.bfloat16, torch.float16):
            reason = f"needs bfloat16 or float16, got {dtype}; use engine flex"
        elif softcap is not None:
            reason = f"has no soft cap (softcap={softcap}); use engine flex"
        elif (value_dim or head_dim) != head_dim or head_dim > MAX_FLASH_HEAD_DIM:
            reason = (
                f"needs equal head and value widths up to {MAX_FLASH_HEAD_DIM}, got {head_dim} and "
                f"{value_dim or head_dim}; use engine flex"
            )
    elif engine == "flex":
        if not on_cuda and backward:
            reason = f"has no backward on {device}; use engine segments, or torch.no_grad() for a forward"
        elif on_cuda and length % FLEX_BLOCK:
            reason = (
                f"needs rows of a multiple of {FLEX_BLOCK} tokens on CUDA, got {length}; use "
                f"{-(-length // FLEX_BLOCK) * FLEX_BLOCK} tokens or engine segments"
            )
    if reason is not None:
        raise EngineError(f"engine {engine} {reason}")


def require_engine_name(engine: str) -> None:
    """Raise if no engine has this name."""
    if engine not in ENGINES and engine != "auto":
        raise EngineError(f"unknown attention engine {engine!r}; choose one of auto, {', '.join(ENGINES)}")


def _layouts_of(layout: PackedLayout | Sequence[PackedLayout], batch: int) -> tuple[PackedLayout, ...]:
    layouts = (layout,) * batch if isinstance(layout, PackedLayout) else tuple(layout)
    if len(layouts) != batch:
        raise RopewalkError(f"got {len(layouts)} layouts for a batch of {batch} rows; give one, or one a row")
    return layouts


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, layouts: tuple[PackedLayout, ...]) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RopewalkError(
                f"{name} must be [batch, heads, length, head_dim], got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise RopewalkError(
                f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on {query.device}: "
                "they must agree"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3]:
        raise RopewalkError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit query {tuple(query.shape)}"
        )
    if key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
        raise RopewalkError(
            f"packed attention needs as many keys as queries, got query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise RopewalkError(f"num_heads {query.shape[1]} is not a multiple of num_kv_heads {key.shape[1]}")
    for layout in layouts:
        if layout.total_length != query.shape[2]:
            raise RopewalkError(
                f"the layout describes {layout.total_length} tokens, the tensors hold {query.shape[2]}"
            )


@cache
def _say_once(engine: str, device: torch.device) -> None:
    log.info("attention engine %s on %s (auto)", engine, device)


@lru_cache(maxsize=8)
def _plan(engine: str, layouts: tuple[PackedLayout, ...], device: torch.device) -> Any:
    """Index tensors and block masks, made once a batch of rows: every layer finds them here again.

    Layouts compare by identity, so the cache can never mix rows up; eight entries cover the rows in flight.
    """
    return _module(engine).plan(layouts, device)


def _module(engine: str) -> ModuleType:
    # Imported when asked for: flex pulls in torch's compiler, which a CPU user never needs.
    from importlib import import_module

    return import_module(f"ropewalk.attention.{engine}")
