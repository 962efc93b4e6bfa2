"""Attention of one layer with a sliding window against the same engine without one, forward and backward on a CPU.

    python -m benchmarks.attention_windows [--lengths 4096 16384] [--windows 128 512 1024 4096] [--repeats 5]
                                           [--layer | --decoder]

A window asks for fewer pairs of query and key; what it saves at most is their ratio. For each length and layout the
layer without a window and those with one are timed in turn in one process, several times over, so that a noisy
machine is noisy for all; times are CPU time, the least of each. ``over_bound`` is the share of time over the share of
pairs: 1 where a window saves all that its pairs promise.

``--layer`` times the attention layer as a model runs it, with its four projections and the rotation, and divides by
the share of floating-point operations: ``(P + A_w) / (P + A)`` for ``P`` operations of the projections and
``A = 4 · heads · head_dim`` for each pair. The backward pass takes twice those of the forward pass in both parts.
``--decoder`` times the whole decoder layer: both norms, the attention layer, a gated MLP of four times the width, and
both residual sums; ``P`` then counts the matrices of the MLP too.

Windows that no document of a layout exceeds are left out: the engine takes them for none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_cpu import lognormal_lengths
from benchmarks.common import parsed, parser_of, settings_of, write
from ropewalk import PackedLayout, attend
from ropewalk.attention.options import EVERYTHING, AttentionOptions, Locality
from ropewalk.attention.spans import Spans


def layouts_of(total: int, mean: int) -> dict[str, PackedLayout]:
    """One document; documents of half a row and less; heavy-tailed ones behind an anchor."""
    halves = [total // 2, total // 4, total // 4]
    return {
        "one document": PackedLayout.from_lengths([total], "intra_document", 0),
        "three documents": PackedLayout.from_lengths(halves, "intra_document", 0),
        "lognormal, anchor": PackedLayout.from_lengths(lognormal_lengths(total - 1, mean), "anchor", 1),
    }


def pairs(layout: PackedLayout, window: int | None) -> int:
    """Visible pairs of query and key of a row."""
    spans = Spans.of(layout, EVERYTHING if window is None else Locality(window))
    return int(spans.pairs_before(np.array([layout.total_length]))[0])


class Layer(torch.nn.Module):
    """The attention of a decoder layer: projections, rotation, attention, and the projection back."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        hidden = heads * head_dim
        self.head_dim = head_dim
        self.q, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(hidden, kv_heads * head_dim, bias=False) for _ in range(2))

    def forward(self, row: Tensor, layout: PackedLayout, options: AttentionOptions) -> Tensor:
        """Args: row ``[1, tokens, hidden]``; the result has the same shape."""
        angles = torch.arange(row.shape[1])[:, None] * 1e4 ** -torch.linspace(0, 1, self.head_dim // 2)
        cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
        q, k, v = (
            made(row).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for made in (self.q, self.k, self.v)
        )
        q, k = (each * cos + half_turned(each) * sin for each in (q, k))
        output = attend(q, k, v, layout, engine="sdpa", options=options).transpose(1, 2).flatten(2)
        back: Tensor = self.o(output)
        return back


class DecoderLayer(Layer):
    """The attention layer between its norm and a gated MLP with another, as in Llama."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__(heads, kv_heads, head_dim)
        hidden = heads * head_dim
        self.before, self.between = (torch.nn.RMSNorm(hidden) for _ in range(2))
        self.gate, self.up = (torch.nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, row: Tensor, layout: PackedLayout, options: AttentionOptions) -> Tensor:
        row = row + super().forward(self.before(row), layout, options)
        between = self.between(row)
        output: Tensor = row + self.down(torch.nn.functional.silu(self.gate(between)) * self.up(between))
        return output


def half_turned(x: Tensor) -> Tensor:
    """Each pair ``(a, b)`` of the two halves as ``(-b, a)``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def timed(
    layout: PackedLayout,
    windows: list[int | None],
    tensors: list[Tensor],
    repeats: int,
    layer: Layer | None = None,
) -> dict[int | None, float]:
    """The least seconds of a forward and a backward for each window, of attention alone or of its whole layer."""
    cotangent = tensors[-1]
    wanted = tensors[:-1] if layer is None else [tensors[0], *layer.parameters()]

    def once(window: int | None) -> float:
        options = AttentionOptions(window=window)
        began = time.process_time()
        if layer is None:
            q, k, v, _ = tensors
            made = attend(q, k, v, layout, engine="sdpa", options=options)
        else:
            made = layer(tensors[0], layout, options)
        torch.autograd.grad(made, wanted, cotangent)
        return time.process_time() - began

    least = {window: once(window) for window in windows}
    for _ in range(repeats):
        for window in windows:
            least[window] = min(least[window], once(window))
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--mean-document", type=int, default=1024, help="tokens of lognormal documents")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layer", action="store_true", help="time the whole attention layer")
    parser.add_argument("--decoder", action="store_true", help="time the whole decoder layer")
    options = parsed(
        parser, {"lengths": [256], "windows": [16], "mean_document": 64, "repeats": 1}, arguments
    )
    torch.manual_seed(0)
    cases: list[dict[str, Any]] = []
    for length in options.lengths:
        heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
        tensors = [torch.randn(1, each, length, options.head_dim, requires_grad=True) for each in heads]
        layer, projections = None, 0
        if options.layer or options.decoder:
            kind = DecoderLayer if options.decoder else Layer
            layer = kind(options.heads, options.kv_heads, options.head_dim)
            tensors = [
                torch.randn(1, length, options.heads * options.head_dim, requires_grad=True) for _ in "xy"
            ]
            projections = 2 * length * sum(each.numel() for each in layer.parameters() if each.ndim > 1)
        tensors[-1].requires_grad_(False)
        for name, layout in layouts_of(length, options.mean_document).items():
            longest = int(layout.document_lengths.max()) + layout.anchor_length
            windows = [None, *(window for window in options.windows if window < longest)]
            times = timed(layout, windows, tensors, options.repeats, layer)
            for window in windows[1:]:
                of_pairs = 4 * options.heads * options.head_dim
                bound = (projections + of_pairs * pairs(layout, window)) / (
                    projections + of_pairs * pairs(layout, None)
                )
                share = times[window] / times[None]
                cases.append(
                    {
                        "length": length,
                        "layout": name,
                        "window": window,
                        "without_window_s": times[None],
                        "window_s": times[window],
                        "share_of_time": share,
                        "share_of_pairs" if layer is None else "share_of_operations": bound,
                        "over_bound": share / bound,
                    }
                )
                print(
                    f"{length:6} {name:18} window {window:5} {times[window]:7.3f} of {times[None]:7.3f} s   "
                    f"{share:.3f} of the time, {bound:.3f} of the work: {share / bound:.2f}",
                    flush=True,
                )
    worst = max((case["over_bound"] for case in cases), default=None)
    name = "decoder_windows" if options.decoder else "layer_windows" if options.layer else "attention_windows"
    write(name, {"settings": settings_of(options), "worst_over_bound": worst, "cases": cases}, options)


if __name__ == "__main__":
    main()
