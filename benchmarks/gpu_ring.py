"""The ring of ``python -m benchmarks.gpu``: attention of one rank without its exchange, beside the whole row.

The other ranks do not exist, and a rank receives whatever is in memory: what is timed is the rank's own computation
and copies. It is to take little more than its share of the time of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_attention import Shape
from benchmarks.gpu_sizes import Case, Sizes, allocated_gib, beyond, matmul_rate, milliseconds
from ropewalk import attend
from ropewalk.attention.choices import Pattern
from ropewalk.parallel import MeshShape, ShardedLayouts
from ropewalk.parallel.ring import ring_attend
from ropewalk.training.simulation.simulated import simulated_rank

RING = 4
"""Ranks."""


def cases(sizes: Sizes, device: str) -> list[Case]:
    """Each pattern by one rank and as a whole."""
    patterns: tuple[Pattern, ...] = ("anchor", "full")
    return [
        Case(
            {"length": length, "pattern": pattern, "ranks": ranks},
            partial(work, length, pattern, sizes, device),
        )
        for length in sizes.ring
        for pattern in patterns
        for ranks, work in ((RING, one_rank), (1, whole_row))
    ]


def one_rank(length: int, pattern: Pattern, sizes: Sizes, device: str) -> dict[str, Any]:
    """Attention of the first rank."""
    shape = shape_of(length, pattern, sizes)
    layout = shape.layout(0)
    with simulated_rank(MeshShape(ring=RING), 0, device) as mesh:
        assert mesh is not None
        sharded = ShardedLayouts.of([layout], mesh.groups)
        own = Shape(sharded.shard_length, pattern, None, shape.heads, shape.kv_heads, shape.head_dim)
        needed = shape.flops(layout) / RING
        return timed(own, lambda q, k, v: ring_attend(q, k, v, sharded), needed, sizes, device)


def whole_row(length: int, pattern: Pattern, sizes: Sizes, device: str) -> dict[str, Any]:
    """Attention of the whole row."""
    shape = shape_of(length, pattern, sizes)
    layout = shape.layout(0)
    return timed(shape, lambda q, k, v: attend(q, k, v, layout), shape.flops(layout), sizes, device)


def shape_of(length: int, pattern: Pattern, sizes: Sizes) -> Shape:
    average = None if pattern == "full" else sizes.mean_document
    return Shape(length, pattern, average, sizes.heads, sizes.kv_heads, sizes.head_dim)


def timed(
    shape: Shape, attention: Callable[..., Tensor], needed: float, sizes: Sizes, device: str
) -> dict[str, Any]:
    """Time, memory and share of the measured rate, forward and backward."""
    *inputs, cotangent = shape.tensors(device)
    inputs = [each.requires_grad_() for each in inputs]

    def step() -> None:
        torch.autograd.grad(attention(*inputs), inputs, cotangent)

    before = allocated_gib(device)
    ms = milliseconds(step, device, sizes.repeats)
    return {
        "tokens": shape.length,
        "ms": ms,
        "needed_flops": needed,
        "of_matmul_rate": needed / (ms / 1000) / matmul_rate(sizes.product, device, sizes.repeats),
        **beyond(device, before),
    }
