"""The attention part of ``python -m benchmarks.gpu``: each engine beside the bare kernels, forward and backward.

A row of figures is of one row length, pattern, mean length of documents and way to compute. The lengths of documents
are log-normal and drawn anew for every row of tokens, as in a corpus; all ways see the same ones. ``ms`` is the time of
a call on a row whose kernels are known, as all layers but the first have it, and ``first_ms`` that of the first call on
a new row; plans and masks are made before, as training does. Both are means over rows. ``of_matmul_rate`` holds the
needed operations (visible pairs only: 4 · heads · dimensions forward, 2.5 times that backward) against the rate of a
large matrix product. ``kernel`` is the one that took most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention_cpu import lognormal_lengths
from benchmarks.gpu_sizes import Case, NotRunError, Sizes, allocated_gib, beyond, matmul_rate, timed_ms
from ropewalk import PackedLayout, attend
from ropewalk.attention import AttentionSpec, check_engine, prepare
from ropewalk.attention.choices import ENGINES, PATTERNS, EngineName, Pattern
from ropewalk.attention.engines.capabilities import why_not
from ropewalk.attention.flash import Flash, flash_activated, installed_flash
from ropewalk.attention.measuring import Candidate, LayersAlike, Measured, fastest, measure, shortened
from ropewalk.attention.options import EVERYTHING, AttentionOptions
from ropewalk.attention.spans import Spans

PACED_SECONDS = 1.0
"""Time that the repetitions of one case may take, at the rate that PACE expects."""
PACE = 0.3

Attention = Callable[[Tensor, Tensor, Tensor, PackedLayout], Callable[[], Tensor]]
"""Make everything that a layout decides, and return the call that is timed."""


@dataclass(frozen=True)
class Shape:
    """Rows to attend over; ``mean`` is the mean length of their documents, None where a row is one run."""

    length: int
    pattern: Pattern
    mean: int | None
    heads: int
    kv_heads: int
    head_dim: int

    def layout(self, seed: int) -> PackedLayout:
        """A row of new documents."""
        if self.mean is None:
            return PackedLayout.from_lengths([self.length], self.pattern, 0)
        lengths = lognormal_lengths(self.length - 1, self.mean, seed=seed)
        if self.pattern == "anchor":
            return PackedLayout.from_lengths(lengths, self.pattern, 1)
        return PackedLayout.from_lengths([*lengths[:-1], lengths[-1] + 1], self.pattern, 0)

    def flops(self, layout: PackedLayout) -> float:
        """Needed operations, forward and backward."""
        return 3.5 * 4 * Spans.of(layout).pairs * self.heads * self.head_dim

    def tensors(self, device: str) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            torch.randn(1, each, self.length, self.head_dim, device=device, dtype=torch.bfloat16)
            for each in heads
        ]

    def with_fewer_heads(self, most_flops: float) -> Shape:
        """With so many that one key/value head remains at least, and a call needs no more operations than this."""
        if self.kv_heads % 2 or self.flops(self.layout(0)) <= most_flops:
            return self
        fewer = replace(self, heads=self.heads // 2, kv_heads=self.kv_heads // 2)
        return fewer.with_fewer_heads(most_flops)


@dataclass(frozen=True)
class Way:
    """A way to compute attention.

    Attributes:
        name: its name in the figures.
        patterns: what it can compute.
        attention: prepares it for a layout.
        flat: takes ``[length, heads, head_dim]`` instead of ``[1, heads, length, head_dim]``.
        flash: FlashAttention that is active meanwhile.
    """

    name: str
    patterns: Sequence[Pattern]
    attention: Attention
    flat: bool = False
    flash: Flash = "FA2"


def own(engine: str, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Callable[[], Tensor]:
    """An engine of the package."""
    spec = AttentionSpec(q.device, q.dtype, q.shape[-1])
    prepare([layout], check_engine(engine, spec), q.device)
    return partial(attend, q, k, v, layout, engine)


def bare_sdpa(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Callable[[], Tensor]:
    return partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)


def bare_varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    if q.device.type == "cpu":
        raise NotRunError("varlen_attn needs CUDA")
    offsets = layout.cu_seqlens.to(q.device)
    longest = int(layout.cu_seqlens.diff().max())
    given = (q, k, v, offsets, offsets, longest, longest)
    return lambda: cast(Tensor, varlen_attn(*given, window_size=(-1, 0), enable_gqa=True))


def bare_flex(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask

    if q.device.type == "cpu" and q.requires_grad:
        raise NotRunError("flex_attention has no backward on a CPU")
    documents = layout.document_ids.to(q.device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents[query] == documents[key])

    length = q.shape[2]
    mask = create_block_mask(visible, None, None, length, length, q.device, _compile=q.device.type == "cuda")
    return partial(compiled_flex(), q, k, v, block_mask=mask, enable_gqa=True)


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """One function for all shapes: torch compiles a new one for every new function."""
    from torch.nn.attention.flex_attention import flex_attention

    function: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    return function


DOCUMENTS: tuple[Pattern, ...] = ("full", "intra_document")
WAYS = (
    *(Way(f"ropewalk {name}", PATTERNS, partial(own, name)) for name in ENGINES if name != "reference"),
    Way("bare SDPA", ("full",), bare_sdpa),
    Way("bare varlen_attn", DOCUMENTS, bare_varlen, flat=True),
    Way("bare flex", DOCUMENTS, bare_flex),
)


def ways_on(device: str) -> list[Way]:
    """All ways, those of FlashAttention also with each newer one that is installed."""
    newer = [name for name in flashes_on(device) if name != "FA2"]
    return [
        *WAYS,
        *(
            replace(way, name=f"{way.name}, {name}", flash=name)
            for name in newer
            for way in WAYS
            if "varlen" in way.name
        ),
    ]


def flashes_on(device: str) -> list[Flash]:
    return installed_flash(torch.cuda.get_device_capability()[0]) if device == "cuda" else ["FA2"]


def cases(sizes: Sizes, device: str) -> list[Case]:
    """By length and mean; of some shapes also what ``auto`` takes."""
    ways = ways_on(device)
    found = []
    for shape in shapes(sizes):
        named = {
            "length": shape.length,
            "mean_document": shape.mean,
            "pattern": shape.pattern,
            "heads": shape.heads,
        }
        if shape.length in sizes.attention[:2] and shape.mean in (None, *sizes.means[:2]):
            found.append(Case({**named, "way": "ropewalk auto"}, partial(taken, shape, device)))
        found += [
            Case({**named, "way": way.name}, partial(measured, shape, way, sizes, device))
            for way in ways
            if shape.pattern in way.patterns
        ]
    return found


def shapes(sizes: Sizes) -> Iterator[Shape]:
    heads = (sizes.heads, sizes.kv_heads, sizes.head_dim)
    for length in sizes.attention:
        yield Shape(length, "full", None, *heads).with_fewer_heads(sizes.most_flops)
        for average in sizes.means:
            if average < length:
                yield Shape(length, "anchor", average, *heads)
                yield Shape(length, "intra_document", average, *heads)


def taken(shape: Shape, device: str) -> dict[str, Any]:
    """The way that ``auto`` takes, and the times that it found."""
    found = fastest_engine(shape, device)
    flash = "" if found.candidate.flash == "FA2" else f", {found.candidate.flash}"
    return {"taken": f"ropewalk {found.candidate.engine}{flash}", "kernel": " and ".join(found.kernels)}


@cache
def fastest_engine(shape: Shape, device: str) -> Measured:
    """What ``engine: auto`` measures before a stage, on a row of this shape."""
    here, dtype = torch.device(device), torch.bfloat16
    layers = [LayersAlike(1, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, EVERYTHING)]
    layouts = shortened([shape.layout(0)], layers)
    spec = AttentionSpec(here, dtype, shape.head_dim)
    able = [engine for engine in ENGINES if engine != "reference" and why_not(engine, spec) is None]
    newer = [Candidate("varlen", name) for name in flashes_on(device) if name != "FA2" and "varlen" in able]
    candidates = [*map(Candidate, able), *newer]

    def attention(q: Tensor, k: Tensor, v: Tensor, engine: EngineName, options: AttentionOptions) -> Tensor:
        return attend(q, k, v, layouts, engine, options)

    tokens = layouts[0].total_length
    return fastest(measure(candidates, layers, layouts, tokens, attention, dtype, here))


def measured(shape: Shape, way: Way, sizes: Sizes, device: str) -> dict[str, Any]:
    """Time, memory and share of the measured rate of one way on rows of one shape."""
    rate = matmul_rate(sizes.product, device, sizes.repeats)
    expected = shape.flops(shape.layout(0)) / (PACE * rate)
    count = int(max(1, min(sizes.repeats, PACED_SECONDS / expected)))
    with flash_activated(way.flash):
        *inputs, cotangent = shape.tensors(device)
        if way.flat:
            inputs = [each[0].transpose(0, 1).contiguous() for each in inputs]
            cotangent = cotangent[0].transpose(0, 1).contiguous()
        q, k, v = inputs = [each.requires_grad_() for each in inputs]

        def step(layout: PackedLayout) -> Callable[[], Any]:
            forward = way.attention(q, k, v, layout)
            return lambda: torch.autograd.grad(forward(), inputs, cotangent)

        # Kernels are compiled and chosen here, and again where a row has lengths that none before it had.
        step(shape.layout(0))()
        before = allocated_gib(device)
        first, again, flops = [], [], []
        for seed in range(1, count + 1):
            layout = shape.layout(seed)
            call = step(layout)
            first.append(timed_ms(call, device))
            again.append(timed_ms(call, device) if expected < PACED_SECONDS else first[-1])
            flops.append(shape.flops(layout))
        memory = beyond(device, before)
        # The profiler takes longer than most calls, so once for each length and way is enough.
        profiled = expected < PACED_SECONDS and shape.mean in (None, sizes.means[0])
        kernel = longest_kernel(call, device) if profiled else None
    return {
        "documents": len(layout.segment_documents),
        "rows": count,
        "ms": mean(again),
        "first_ms": mean(first),
        "needed_flops": mean(flops),
        "of_matmul_rate": mean(flops) / (mean(again) / 1000) / rate,
        "kernel": kernel,
        **memory,
    }


def longest_kernel(call: Callable[[], Any], device: str) -> str:
    """Name of the kernel, or of the operator on a CPU, that takes most of a call's time."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        call()
    events = record.key_averages()
    longest = max(
        events, key=lambda each: each.self_device_time_total if on_gpu else each.self_cpu_time_total
    )
    return str(longest.key)[:120]
