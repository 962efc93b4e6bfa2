"""``attend``: one entry point for all engines. It validates, dispatches, and never falls back silently."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention import packed
from ropewalk.attention.choices import EngineName
from ropewalk.attention.engines.capabilities import AttentionSpec, check_engine
from ropewalk.attention.engines.runs import Kernel
from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.attention.options import EVERYTHING, PLAIN, AttentionOptions, Locality
from ropewalk.errors import RopewalkError

log = logging.getLogger("ropewalk")

KERNELS: tuple[EngineName, ...] = ("sdpa", "varlen")
"""Engines that attend within runs, to which the anchor and sinks are merged; the others compute whole rows."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout | Sequence[PackedLayout],
    engine: str = "auto",
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Attention over packed rows, forward and backward.

    Args:
        query: ``[batch, num_heads, length, head_dim]``, RoPE already applied.
        key: ``[batch, num_kv_heads, length, head_dim]``; num_heads is a multiple of num_kv_heads.
        value: ``[batch, num_kv_heads, length, value_dim]``, same dtype and device.
        layout: one layout for all rows of the batch, or a sequence with one layout for each row.
        engine: ``reference`` (softmax with a dense mask), ``sdpa`` (PyTorch's SDPA), ``flex`` (FlexAttention),
            ``varlen`` (FlashAttention), or ``auto``: ``sdpa`` on a CPU, and for ``full`` on Hopper; on other
            GPUs and for documents the first of ``varlen``, ``flex`` and ``sdpa`` that supports the inputs
            (:func:`ropewalk.attention.resolve_engine`). A named engine never falls back to another.
        options: scale, soft cap, window or chunks, and sinks of the layer; the default is attention as in Llama.

    Returns:
        ``[batch, num_heads, length, value_dim]`` in the dtype of the inputs.

    Raises:
        RopewalkError: if shapes, dtypes or layouts contradict each other.
        EngineError: if the engine cannot run these inputs; the message names an engine that can.

    Example:
        >>> import torch
        >>> from ropewalk import PackedLayout, attend
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> attend(q, k, v, PackedLayout.from_lengths([3, 2])).shape
        torch.Size([1, 2, 6, 8])
    """
    layouts = _layouts_of(layout, len(query))
    _check_tensors(query, key, value, layouts)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    options.check_sinks(query)
    spec = AttentionSpec(
        query.device,
        query.dtype,
        query.shape[3],
        value.shape[3],
        options.softcap,
        options.sinks is not None,
        needs_grad or (options.sinks is not None and options.sinks.requires_grad and torch.is_grad_enabled()),
        one_run=of_one_run(layouts, options.locality),
    )
    chosen = check_engine(engine, spec)
    if engine == "auto":
        _log_choice_once(chosen, query.device)
    # Found again by every layer of the pass: a plan depends on the layouts and not on the tensors.
    plan = _plan(layouts, chosen, query.device, options.locality)
    if chosen in KERNELS:
        return packed.run(kernel_of(chosen), query, key, value, plan, options)
    output: Tensor = _module(chosen).run(query, key, value, plan, options)
    return output


def of_one_run(layouts: Sequence[PackedLayout], locality: Locality) -> bool:
    """Whether a query of these rows sees all earlier tokens of its row."""
    return all(
        each.pattern == "full" and locality.within(each.total_length) == EVERYTHING for each in layouts
    )


def kernel_of(engine: EngineName) -> Kernel:
    """The kernel of an engine that attends within runs, one of ``KERNELS``."""
    kernel: Kernel = _module(engine)
    return kernel


def prepare(
    layouts: Sequence[PackedLayout],
    engine: EngineName,
    device: torch.device,
    localities: Iterable[Locality] = (EVERYTHING,),
) -> None:
    """Build what :func:`attend` needs for these rows ahead of time, so that no training step waits for it.

    Args:
        layouts: layouts of the rows that will form one batch, in batch order.
        engine: engine that will run, as returned by :func:`ropewalk.attention.check_engine`.
        device: device of the queries.
        localities: the different windows and chunks of the model's layers.
    """
    for locality in localities:
        plan = _plan(tuple(layouts), engine, device, locality)
        if engine == "varlen":
            _module(engine).calls_of(plan.runs, device)


def _layouts_of(layout: PackedLayout | Sequence[PackedLayout], batch: int) -> tuple[PackedLayout, ...]:
    layouts = (layout,) * batch if isinstance(layout, PackedLayout) else tuple(layout)
    if len(layouts) != batch:
        raise RopewalkError(
            f"got {len(layouts)} layouts for a batch of {batch} rows; give one layout for all rows, or one for each row"
        )
    return layouts


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, layouts: tuple[PackedLayout, ...]) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise RopewalkError(
                f"{name} must be [batch, heads, length, head_dim], got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise RopewalkError(
                f"{name} is {tensor.dtype} on {tensor.device}, but query is {query.dtype} on {query.device}; "
                "use the same dtype and device for query, key and value"
            )
    if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3]:
        raise RopewalkError(
            "key must have the batch, heads and length of value, and the head_dim of query; got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    if key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
        raise RopewalkError(
            f"in packed attention, query and key must have the same batch and length, got query {tuple(query.shape)} "
            f"and key {tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise RopewalkError(f"num_heads {query.shape[1]} is not a multiple of num_kv_heads {key.shape[1]}")
    for layout in layouts:
        if layout.total_length != query.shape[2]:
            raise RopewalkError(
                f"the layout describes {layout.total_length} tokens, but the tensors have {query.shape[2]}"
            )


@cache
def _log_choice_once(engine: str, device: torch.device) -> None:
    log.info("attention engine %s on %s (auto)", engine, device)


@cached_per_layout
def _plan(layouts: tuple[PackedLayout, ...], engine: str, device: torch.device, locality: Locality) -> Any:
    """Index tensors and block masks, computed once for each batch: all layers of a locality share them."""
    return (packed if engine in KERNELS else _module(engine)).plan(layouts, device, locality)


def _module(engine: str) -> Any:
    # Imported on demand: flex loads torch's compiler, which a CPU user never needs.
    from importlib import import_module

    return import_module(f"ropewalk.attention.engines.{engine}")
