"""Attention of one layer with a sliding window against the same engine without one, forward and backward on a CPU.

    python -m benchmarks.attention_windows [--lengths 4096 16384] [--windows 128 512 1024 4096] [--repeats 5]

A window asks for fewer pairs of query and key; what it saves at most is their ratio. For each length and layout the
layer without a window and those with one are timed in turn in one process, several times over, so that a noisy
machine is noisy for all; times are CPU time, the least of each. ``over_bound`` is the share of time over the share of
pairs: 1 where a window saves all that its pairs promise.

Windows that no document of a layout exceeds are left out: the engine takes them for none.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_cpu import lognormal_lengths
from benchmarks.common import write
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


def timed(
    layout: PackedLayout, windows: list[int | None], tensors: list[Tensor], repeats: int
) -> dict[int | None, float]:
    """The least seconds of a forward and a backward for each window."""
    *qkv, cotangent = tensors

    def once(window: int | None) -> float:
        options = AttentionOptions(window=window)
        began = time.process_time()
        torch.autograd.grad(attend(*qkv, layout, engine="segments", options=options), qkv, cotangent)
        return time.process_time() - began

    least = {window: once(window) for window in windows}
    for _ in range(repeats):
        for window in windows:
            least[window] = min(least[window], once(window))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--mean-document", type=int, default=1024, help="tokens of lognormal documents")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.manual_seed(0)
    cases: list[dict[str, Any]] = []
    for length in options.lengths:
        heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
        tensors = [torch.randn(1, each, length, options.head_dim, requires_grad=True) for each in heads]
        tensors[-1].requires_grad_(False)
        for name, layout in layouts_of(length, options.mean_document).items():
            longest = int(layout.document_lengths.max()) + layout.anchor_length
            windows = [None, *(window for window in options.windows if window < longest)]
            times = timed(layout, windows, tensors, options.repeats)
            for window in windows[1:]:
                bound = pairs(layout, window) / pairs(layout, None)
                share = times[window] / times[None]
                cases.append(
                    {
                        "length": length,
                        "layout": name,
                        "window": window,
                        "without_window_s": times[None],
                        "window_s": times[window],
                        "share_of_time": share,
                        "share_of_pairs": bound,
                        "over_bound": share / bound,
                    }
                )
                print(
                    f"{length:6} {name:18} window {window:5} {times[window]:7.3f} of {times[None]:7.3f} s   "
                    f"{share:.3f} of the time, {bound:.3f} of the pairs: {share / bound:.2f}",
                    flush=True,
                )
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    worst = max((case["over_bound"] for case in cases), default=None)
    write("attention_windows", {"settings": settings, "worst_over_bound": worst, "cases": cases}, options.out)


if __name__ == "__main__":
    main()
