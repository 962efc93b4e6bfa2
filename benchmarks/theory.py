"""Time of the theory: context bounds and feasible bases.

    python -m benchmarks.theory [--longest 1M]

The bound stated beside each: a context bound of L tokens is at least L x pairs cosines evaluated one by one; the
dense scan that feasible bases replace is 1500 bases x L x pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.common import parsed, parser_of, write
from ropewalk.io.lengths import parse_length
from ropewalk.rope import unscaled_inv_freq
from ropewalk.rope.theory import CEILING, context_bound, feasible_bases, safe_base

DIM = 128
SCANNED_BASES = 1500


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--longest", type=parse_length, default=2**20)
    parser.add_argument("--bases", type=float, nargs="+", default=[1e4, 5e5, 1e9, 1e12, 1e14, 1e15])
    options = parsed(parser, {"longest": 8192, "bases": [1e4]}, arguments)
    results = []
    for base in options.bases:
        seconds, bound = timed(partial(context_bound, unscaled_inv_freq(DIM, base)))
        results.append({"what": "context bound", "base": base, "context_bound": bound, "seconds": seconds})
        print(f"bound of {base:g}: {bound} tokens, {seconds:.2f} s", flush=True)
    length = 8192
    while length <= options.longest:
        seconds, found = timed(partial(feasible_bases, length, DIM))
        results.append(
            {
                "what": "feasible bases",
                "length": length,
                "ceiling": CEILING,
                "intervals": len(found.feasible),
                "seconds": seconds,
                "cosines_of_a_dense_scan": SCANNED_BASES * length * DIM // 2,
            }
        )
        print(f"bases for {length}: {len(found.feasible)} intervals, {seconds:.2f} s", flush=True)
        seconds, safe = timed(partial(safe_base, length, DIM))
        results.append({"what": "safe base", "length": length, "safe_base": safe, "seconds": seconds})
        print(f"safe base for {length}: {safe:.6g}, {seconds:.2f} s", flush=True)
        length *= 4 if length < 2**17 else 8
    write("theory", {"rotary_dim": DIM, "results": results}, options)


if __name__ == "__main__":
    main()
