"""Attention of one layer, forward and backward, on packed documents: each pattern against full attention.

    python -m benchmarks.attention_cpu [--length 16384] [--mean-document 342] [--repeats 5]
    python -m benchmarks.attention_cpu --documents lognormal --length 4096

Documents of nearly one length are the best case: with a heavy tail the longest ones have most of the pairs.
``--documents lognormal`` draws such lengths and writes a result of its own.

All patterns are timed in turn in one process, several times over, so that a noisy machine is noisy for all;
the ratio of medians is the figure. The bound beside it is the ratio of FLOPs: T² for a full row against the
sum of the squared lengths of its documents.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import parsed, parser_of, settings_of, write
from ropewalk import PackedLayout, attend


def document_lengths(total: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths spread evenly around the mean, as the stories' are (about a quarter to one and a half of it)."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(rng.randint(mean // 2, mean + mean // 2))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length > 0]


def lognormal_lengths(total: int, mean: int, sigma: float = 1.0, seed: int = 0) -> list[int]:
    """Heavy-tailed lengths, as of documents on the web: at ``sigma`` 1 half of them are below 0.61 of the mean, and one
    in 60 is above five times it; none exceeds the row."""
    rng = random.Random(seed)
    mu = math.log(mean) - sigma**2 / 2
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(max(1, round(rng.lognormvariate(mu, sigma))), total))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length > 0]


def seconds(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: list[Tensor], cotangent: Tensor
) -> float:
    began = time.perf_counter()
    torch.autograd.grad(attention(*qkv), qkv, cotangent)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--mean-document", type=int, default=342)
    parser.add_argument("--documents", choices=["uniform", "lognormal"], default="uniform")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of lognormal lengths")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parsed(parser, {"length": 256, "mean_document": 32, "repeats": 1}, arguments)
    total = options.length
    if options.documents == "lognormal":
        lengths = lognormal_lengths(total - 1, options.mean_document, options.sigma)
    else:
        lengths = document_lengths(total - 1, options.mean_document)
    layouts = {
        "full": PackedLayout.from_lengths([total], "full", 0),
        "intra_document": PackedLayout.from_lengths([*lengths[:-1], lengths[-1] + 1], "intra_document", 0),
        "anchor": PackedLayout.from_lengths(lengths, "anchor", 1),
    }
    torch.manual_seed(0)
    qkv = [
        torch.randn(1, heads, total, options.head_dim, requires_grad=True)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]
    cotangent = torch.randn(1, options.heads, total, options.head_dim)
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        name: partial(attend, layout=layout, engine="sdpa") for name, layout in layouts.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for attention in ways.values():
        seconds(attention, qkv, cotangent)
    for _ in range(options.repeats):
        for name, attention in ways.items():
            times[name].append(seconds(attention, qkv, cotangent))
    full = statistics.median(times["full"])
    flop_ratio = total**2 / sum((length + 1) ** 2 for length in lengths)
    rows = {}
    for name, values in times.items():
        median = statistics.median(values)
        rows[name] = {
            "median_s": median,
            "min_s": min(values),
            "max_s": max(values),
            "speed_up": full / median,
        }
        print(f"{name:24} {median:7.3f} s   {full / median:5.1f} times full")
    share = rows["anchor"]["speed_up"] / flop_ratio
    print(f"bound by FLOPs {flop_ratio:.1f} times; pattern anchor reaches {100 * share:.0f} % of it")
    result = {
        "settings": settings_of(options),
        "documents": len(lengths),
        "longest_document": max(lengths),
        "flop_ratio": flop_ratio,
        "share_of_flop_ratio": share,
        "patterns": rows,
    }
    name = "attention_cpu" if options.documents == "uniform" else "attention_cpu_lognormal"
    write(name, result, options)


if __name__ == "__main__":
    main()
