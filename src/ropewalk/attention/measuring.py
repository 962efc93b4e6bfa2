"""Which engine computes the attention of given rows fastest: forward and backward are timed on these rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ropewalk.attention.api import attend
from ropewalk.attention.choices import EngineName
from ropewalk.attention.flash import Flash, active_flash, flash_activated
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.operators import dense_backend
from ropewalk.attention.options import AttentionOptions, Locality
from ropewalk.attention.oracle import attention_errors
from ropewalk.attention.spans import Spans
from ropewalk.errors import EngineError, first_line

# Shapes: B rows, H query heads, K key/value heads, T tokens of a row on this rank, D key dim, V value dim.

MOST_FLOPS = 1e14
"""Operations of one call, forward and backward: a few tenths of a second. Longer rows are cut for the measurement."""
SLICE = 512
"""Tokens of the row on which an engine is compared with exact attention."""
REPEATS = 2
"""Timed calls; the fastest counts."""

Attention = Callable[[Tensor, Tensor, Tensor, EngineName, AttentionOptions], Tensor]
"""Attention of ``[B, H, T, D]`` queries to ``[B, K, T, D]`` keys and ``[B, K, T, V]`` values by an engine."""


@dataclass(frozen=True)
class LayersAlike:
    """Layers of a model whose attention has equal shapes.

    Attributes:
        layers: number of layers.
        num_heads, num_kv_heads: heads of queries, and of keys and values.
        key_dim, value_dim: head dimensions.
        locality: window or chunk.
        softcap: soft cap of the scores; None for none.
        sinks: whether heads have learned sinks.
    """

    layers: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    locality: Locality
    softcap: float | None = None
    sinks: bool = False

    def flops(self, layout: PackedLayout) -> float:
        """Operations of forward and backward of one row in one layer: 4 and 10 per visible pair and dimension."""
        pairs = Spans.of(layout, self.locality).pairs
        return 7.0 * pairs * self.num_heads * (self.key_dim + self.value_dim)

    def inputs(self, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Random q, k and v, equal in every call, without changing the state of random generators."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = ((self.num_heads, self.key_dim), (self.num_kv_heads, self.key_dim))
        return [
            # The strides of projections, which hold the heads of a token together.
            torch.randn(
                rows, tokens, heads, width, generator=generator, dtype=dtype, device=device
            ).transpose(1, 2)
            for heads, width in (*shapes, (self.num_kv_heads, self.value_dim))
        ]

    def options(self, device: torch.device) -> AttentionOptions:
        """Parameters of the layers' attention, with sinks of 0."""
        sinks = torch.zeros(self.num_heads, device=device) if self.sinks else None
        return AttentionOptions(None, self.softcap, self.locality.window, self.locality.chunk, sinks)


@dataclass(frozen=True)
class Candidate:
    """An engine, and the implementation of FlashAttention that is active while it runs."""

    engine: EngineName
    flash: Flash = "FA2"


@dataclass(frozen=True)
class Measured:
    """What was measured of a candidate.

    Attributes:
        candidate: the candidate.
        kernels: names of the kernels that it ran.
        seconds: duration of forward and backward in all layers; None if it cannot be taken.
        refusal: why it cannot be taken; None if it can.
    """

    candidate: Candidate
    kernels: tuple[str, ...]
    seconds: float | None
    refusal: str | None = None


def measure(
    candidates: Sequence[Candidate],
    layers: Sequence[LayersAlike],
    layouts: Sequence[PackedLayout],
    tokens: int,
    attention: Attention,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """Time candidates on rows, and compare each with exact attention on a small slice of the first row.

    Args:
        candidates: engines that can run the model.
        layers: the model's layers.
        layouts: rows of one batch, from :func:`shortened`.
        tokens: tokens of a row that ``attention`` takes.
        attention: the function to time, which knows the layouts. If it communicates, every rank must call this function
            with equal candidates and layers.
        dtype: dtype of queries, keys and values.
        device: their device.
        clock: time in seconds.

    Returns:
        One result for each candidate. A candidate whose error exceeds the budget of
        :class:`~ropewalk.attention.oracle.AttentionErrors` is refused.
    """

    def timed(candidate: Candidate) -> Measured:
        seconds = 0.0
        names: dict[str, None] = {}
        for each in layers:
            options = each.options(device)
            q, k, v = inputs = each.inputs(len(layouts), tokens, dtype, device)
            run = partial(_called, attention, candidate.engine, options)
            seconds += each.layers * _seconds(run, inputs, clock)
            names[kernel_name(candidate.engine, q, k, v, options.softcap)] = None
        return Measured(candidate, tuple(names), seconds)

    def judged(found: Measured) -> Measured:
        shares = [
            _share_of_budget(found.candidate.engine, each, layouts[0], dtype, device) for each in layers
        ]
        if max(shares) > 1:
            reason = f"its error is {max(shares):.3g} times what rounding explains"
            return replace(found, seconds=None, refusal=reason)
        return found

    found = [_tried(Measured(each, (), None), lambda found: timed(found.candidate)) for each in candidates]
    # After all are timed: the slice has other shapes, for which torch would compile a second, slower kernel.
    return [each if each.seconds is None else _tried(each, judged) for each in found]


def _tried(found: Measured, step: Callable[[Measured], Measured]) -> Measured:
    """What a step finds; or a refusal, if the kernel does not compile or does not fit in memory."""
    try:
        with flash_activated(found.candidate.flash):
            return step(found)
    # Kernels of other packages also state their limits by assertions.
    except (RuntimeError, EngineError, AssertionError, ImportError, TypeError, ValueError) as error:
        reason = first_line(error)
        return replace(found, seconds=None, refusal=reason)


def _called(
    attention: Attention, engine: EngineName, options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    return attention(q, k, v, engine, options)


def fastest(measured: Sequence[Measured]) -> Measured:
    """The candidate with the least time.

    Raises:
        EngineError: if none can be taken.
    """
    able = [each for each in measured if each.seconds is not None]
    if not able:
        reasons = "; ".join(f"{each.candidate.engine}: {each.refusal}" for each in measured)
        raise EngineError(f"no attention engine computes these rows: {reasons}; set engine to reference")
    return min(able, key=lambda each: each.seconds or math.inf)


def kernel_name(engine: EngineName, q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> str:
    """Name of the kernel that an engine runs for these inputs of ``attend``; for SDPA the one that torch chooses."""
    if engine == "varlen":
        return f"FlashAttention {active_flash()[2:]}"
    if engine != "sdpa":
        return "FlexAttention" if engine == "flex" else "dense mask"
    backend = None if softcap is not None else dense_backend(*(x.transpose(1, 2) for x in (q, k, v)))
    if backend == "flash":
        return f"FlashAttention {active_flash()[2:]}"
    return "plain torch" if backend is None else backend


def shortened(
    layouts: Sequence[PackedLayout], layers: Sequence[LayersAlike], ranks: int = 1
) -> list[PackedLayout]:
    """The first tokens of each row, so many that no call needs more than ``MOST_FLOPS`` operations a rank."""
    tokens = layouts[0].total_length
    while tokens > SLICE and max(
        sum(each.flops(layout.first(tokens)) for layout in layouts) for each in layers
    ) > (MOST_FLOPS * ranks):
        tokens //= 2
    return [layout.first(tokens) for layout in layouts]


def _slice_of(layout: PackedLayout) -> PackedLayout:
    """About ``SLICE`` tokens with several documents, in segments as short as that needs."""
    longest = max(1, (SLICE - layout.anchor_length) // 4)
    lengths: list[int] = []
    documents: list[int] = []
    for length, document in zip(
        layout.cu_seqlens.diff().tolist(), layout.segment_documents.tolist(), strict=True
    ):
        if sum(lengths) + layout.anchor_length >= SLICE:
            break
        lengths.append(min(length, longest))
        documents.append(document)
    return PackedLayout.from_segments(lengths, documents, layout.pattern, layout.anchor_length)


def _share_of_budget(
    engine: EngineName, layers: LayersAlike, layout: PackedLayout, dtype: torch.dtype, device: torch.device
) -> float:
    """The engine's largest error on a slice of a row, as a share of its budget."""
    small = _slice_of(layout)
    # Windows and chunks must end within the slice to be seen at all.
    window, chunk = (
        each if each is None else min(each, SLICE // 4)
        for each in (layers.locality.window, layers.locality.chunk)
    )
    alike = replace(layers, locality=Locality(window, chunk))
    options = alike.options(device)
    q, k, v = alike.inputs(1, small.total_length, dtype, device)
    run = partial(attend, layout=[small], engine=engine, options=options)
    return attention_errors(run, q, k, v, [small], options).worst_share


def _seconds(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: Sequence[Tensor],
    clock: Callable[[], float],
) -> float:
    """The fastest of some calls, forward and backward, after one that compiles."""
    leaves = [x.requires_grad_() for x in inputs]
    rows, heads, tokens, _ = inputs[0].shape
    cotangent = inputs[0].new_ones(rows, tokens, heads, inputs[2].shape[3]).transpose(1, 2)
    taken = []
    for _ in range(1 + REPEATS):
        _wait_for(inputs[0].device)
        started = clock()
        torch.autograd.grad(attention(*leaves), leaves, cotangent)
        _wait_for(inputs[0].device)
        taken.append(clock() - started)
    return min(taken[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
