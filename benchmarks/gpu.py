"""Everything that needs a GPU, in one command: the tests marked ``gpu`` and the benchmarks, into one JSON file.

    python -m benchmarks.gpu [--out FILE] [--lengths 8192,32768,131072]

Meant to take less than ten minutes on one data-centre GPU. The parallel part is that of ``benchmarks.parallel_gpu``: on
one device what a rank computes, on several also what they exchange; the search part that of ``benchmarks.search_gpu``.
Times are medians of CUDA-event times after a warm-up; the bound beside each is the attention's FLOPs (4·T·T/2·H·D
forward, 2.5 times that backward, for the visible pairs only) at the device's measured rate for a large bfloat16 matrix
product.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention_cpu import document_lengths
from benchmarks.common import write
from benchmarks.parallel_gpu import measure as parallel
from benchmarks.search_gpu import measure as search
from ropewalk import EngineError, PackedLayout, attend

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
REPEATS = 5


def milliseconds(work: Callable[[], Any]) -> float:
    """Median time of a piece of GPU work."""
    for _ in range(2):
        work()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 product: the roof that attention is held against."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / (milliseconds(lambda: a @ a) / 1000)


def attention(length: int, rate: float) -> list[dict[str, Any]]:
    """Forward and backward of each engine and pattern on rows of one length."""
    lengths = document_lengths(length - 1, 2048)
    layouts = {
        "full": PackedLayout.from_lengths([length], "full", 0),
        "anchor": PackedLayout.from_lengths(lengths, "anchor", 1),
    }
    pairs = {"full": length**2 / 2, "anchor": sum((n + 1) ** 2 for n in lengths) / 2}
    qkv = [
        torch.randn(1, heads, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cotangent = torch.randn(1, HEADS, length, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    rows = []
    for pattern, layout in layouts.items():
        for engine in ("varlen", "flex", "segments"):

            def step(layout: PackedLayout = layout, engine: str = engine) -> None:
                torch.autograd.grad(attend(*qkv, layout, engine=engine), qkv, cotangent)

            row: dict[str, Any] = {"length": length, "pattern": pattern, "engine": engine}
            try:
                torch.cuda.reset_peak_memory_stats()
                row["ms"] = milliseconds(step)
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                row["bound_ms"] = 3.5 * 4 * pairs[pattern] * HEADS * HEAD_DIM / rate * 1000
            except (EngineError, torch.OutOfMemoryError) as error:
                row["refused"] = str(error).splitlines()[0]
            rows.append(row)
            print(row, flush=True)
    return rows


def audit_passes(length: int = 4096) -> list[dict[str, Any]]:
    """A forward pass of the precision audit in each arithmetic, for random weights in Llama 2 7B's shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ropewalk.audit import AuditedModel, Runner, stock_arithmetic
    from ropewalk.audit.passes import shifted

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    runner = Runner(AuditedModel.of(model), 2 * length)
    ids = torch.randint(0, config.vocab_size, (length,))
    rows = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        torch.cuda.reset_peak_memory_stats()
        arithmetic = stock_arithmetic(dtype)
        ms = milliseconds(lambda arithmetic=arithmetic: runner.run(ids, arithmetic, shifted(length, 16)))
        peak = torch.cuda.max_memory_allocated() / 2**30
        rows.append({"length": length, "dtype": str(dtype), "ms": ms, "peak_gib": peak})
        print(rows[-1], flush=True)
    return rows


def tests() -> dict[str, Any]:
    """The tests that need a GPU: pytest's status, what failed, and its last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests", "-p", "no:cacheprovider"]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = result.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"status": result.returncode, "failed": failed, "summary": lines[-1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--lengths", default="8192,32768,131072")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: no CUDA device: this command runs the tests and benchmarks that need one", file=sys.stderr
        )
        return 2
    tested = tests()
    print(tested, flush=True)
    rate = matmul_rate()
    rows = [row for length in options.lengths.split(",") for row in attention(int(length), rate)]
    found = {
        "tests": tested,
        "matmul_tflops": rate / 1e12,
        "attention": rows,
        "audit": audit_passes(),
        "parallel": parallel(milliseconds),
        "search": search(milliseconds),
    }
    write("gpu", found, options.out)
    return int(tested["status"])


if __name__ == "__main__":
    sys.exit(main())
