"""Everything that needs a GPU, in one command: the tests marked ``gpu`` and the benchmarks, into one JSON file.

    python -m benchmarks.gpu [--out FILE] [--minutes 25] [--only check attention-8192 ...]

It begins with a check of ten seconds, and writes the file after every section. A section that fails leaves its
traceback there, the others run, and the exit status is 1. With --minutes, sections that no longer fit are left out and
named. ``--device cpu --small`` runs every section in seconds on a machine without a GPU; those figures mean nothing.

Meant to take about ten minutes on one data-centre GPU. The parallel part is that of ``benchmarks.parallel_gpu``: on
one device what a rank computes, on several also what they exchange; the search part that of ``benchmarks.search_gpu``.
Times are medians of CUDA-event times after a warm-up; the bound beside each is the attention's FLOPs (4·T·T/2·H·D
forward, 2.5 times that backward, for the visible pairs only) at the device's measured rate for a large bfloat16 matrix
product. Beside full attention stands torch's SDPA, which chooses its kernel by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from benchmarks.attention_cpu import document_lengths
from benchmarks.common import parsed, parser_of, write
from benchmarks.gpu_sizes import LARGE, SMALL, TINY, Sizes, allocated_gib, free, milliseconds, peak_gib, tried
from benchmarks.parallel_gpu import (
    own_step,
    packed_rows,
    ring_of_ranks,
    step_of_one_rank,
    steps_of_several,
    training,
)
from benchmarks.search_gpu import measure as search
from ropewalk import PackedLayout, attend

CHECKED_LENGTH = 64
TEST_SECONDS = 600
"""Patience with the tests: one that hangs must not take the other figures with it."""


def matmul_rate(size: int, device: str, repeats: int) -> float:
    """FLOP/s of a square bfloat16 product: the roof that attention is held against."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / (milliseconds(lambda: a @ a, device, repeats) / 1000)


def check(sizes: Sizes, device: str) -> dict[str, Any]:
    """Device, driver and versions, a matrix product and a training step: shows at once that an install is broken."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        found["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        # Containers may lack the program.
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split()
        found["capability"] = torch.cuda.get_device_capability()
    found["matmul_tflops"] = matmul_rate(min(sizes.product, 4096), device, sizes.repeats) / 1e12
    config = transformers.LlamaConfig(**TINY, max_position_embeddings=CHECKED_LENGTH)
    rows = packed_rows(1, CHECKED_LENGTH, config.vocab_size, CHECKED_LENGTH // 4)
    found["training_step_s"] = own_step(config, rows, True, False, device)["seconds"]
    return found


def attention(length: int, sizes: Sizes, device: str) -> dict[str, Any]:
    """Forward and backward of each engine and pattern on rows of one length."""
    lengths = document_lengths(length - 1, sizes.mean_document)
    layouts = {
        "full": PackedLayout.from_lengths([length], "full", 0),
        "anchor": PackedLayout.from_lengths(lengths, "anchor", 1),
    }
    pairs = {"full": length**2 / 2, "anchor": sum((n + 1) ** 2 for n in lengths) / 2}
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    shapes = [(1, each, length, sizes.head_dim) for each in heads]
    q, k, v, cotangent = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    rate = matmul_rate(sizes.product, device, sizes.repeats)
    rows = []
    for pattern, layout in layouts.items():
        for engine in ("varlen", "flex", "segments", *(("sdpa",) if pattern == "full" else ())):

            def step(layout: PackedLayout = layout, engine: str = engine) -> None:
                if engine == "sdpa":
                    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                else:
                    output = attend(q, k, v, layout, engine)
                torch.autograd.grad(output, qkv, cotangent)

            row: dict[str, Any] = {"length": length, "pattern": pattern, "engine": engine}

            def measured(
                row: dict[str, Any] = row, step: Callable[[], None] = step, pattern: str = pattern
            ) -> None:
                allocated_gib(device)
                row["ms"] = milliseconds(step, device, sizes.repeats)
                row.update(peak_gib(device))
                row["bound_ms"] = 3.5 * 4 * pairs[pattern] * sizes.heads * sizes.head_dim / rate * 1000

            rows.append(tried(row, measured))
    return {"matmul_tflops": rate / 1e12, "rows": rows}


def audit_passes(sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """A forward pass of the precision audit in each arithmetic, for random weights in Llama 2 7B's shape."""
    from ropewalk.audit import AuditedModel, Runner, stock_arithmetic
    from ropewalk.audit.passes import shifted

    config = transformers.LlamaConfig(**sizes.audit_model, max_position_embeddings=sizes.audit)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    runner = Runner(AuditedModel.of(model), 2 * sizes.audit)
    ids = torch.randint(0, config.vocab_size, (sizes.audit,))
    rows = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        allocated_gib(device)
        run = partial(runner.run, ids, stock_arithmetic(dtype), shifted(sizes.audit, 16))
        ms = milliseconds(run, device, sizes.repeats)
        rows.append({"length": sizes.audit, "dtype": str(dtype), "ms": ms, **peak_gib(device)})
        print(rows[-1], flush=True)
    return rows


def tests(sizes: Sizes) -> dict[str, Any]:
    """The tests that need a GPU: pytest's status, what failed, and its last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", sizes.tests, "-p", "no:cacheprovider"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS)
    lines = result.stdout.strip().splitlines()
    found: dict[str, Any] = {"status": result.returncode, "summary": lines[-1:]}
    if result.returncode:
        named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        found["failed"] = named or result.stderr.strip()[-2000:]
    return found


@dataclass(frozen=True)
class Section:
    """A part of the benchmark.

    Attributes:
        name: its name for ``--only`` and in the file.
        minutes: what it takes on one H200, rounded up.
        work: makes its figures.
    """

    name: str
    minutes: float
    work: Callable[[], Any]


def sections(sizes: Sizes, device: str) -> list[Section]:
    """All of them, those first whose failure would explain the others'."""
    return [
        Section("check", 0.3, partial(check, sizes, device)),
        Section("tests", 2, partial(tests, sizes)),
        *(
            Section(f"attention-{n}", 1 if n < 100_000 else 2, partial(attention, n, sizes, device))
            for n in sizes.attention
        ),
        Section("training", 2, partial(training, sizes, device)),
        *(Section(f"ring-{n}", 1, partial(ring_of_ranks, n, sizes, device)) for n in sizes.ring),
        Section("one-rank", 1, partial(step_of_one_rank, sizes, device)),
        Section("several-devices", 5, partial(steps_of_several, sizes, device)),
        Section("audit", 1, partial(audit_passes, sizes, device)),
        Section("search", 2, partial(search, sizes, device)),
    ]


def outcome(section: Section) -> dict[str, Any]:
    """Figures and seconds of a section, and why it failed if it did."""
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        found["figures"] = section.work()
    # A machine is lent for minutes: whatever stops one section must not take the others with it.
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc()
        print(found["traceback"], file=sys.stderr, flush=True)
    else:
        figures = found["figures"] if isinstance(found["figures"], list) else [found["figures"]]
        failed = [each["failed"] for each in figures if isinstance(each, dict) and "failed" in each]
        found |= {"failed": failed} if failed else {}
    free()
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--minutes", type=float, help="begin no section that would end later; no limit if absent"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="sections to run, by name; all if absent"
    )
    options = parsed(parser, {}, arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device, which these tests and benchmarks need; "
            "--device cpu --small shows that they run",
            file=sys.stderr,
        )
        return 2
    sizes = SMALL if options.small else LARGE
    known = sections(sizes, options.device)
    unknown = sorted(set(options.only or ()) - {each.name for each in known})
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; choose from {', '.join(each.name for each in known)}")
    began = time.monotonic()
    result: dict[str, Any] = {"sections": {}, "failed": [], "left_out": []}
    for section in known:
        if options.only and section.name not in options.only:
            continue
        left = None if options.minutes is None else options.minutes - (time.monotonic() - began) / 60
        if left is not None and section.minutes > left:
            result["left_out"].append(section.name)
            print(
                f"left out: {section.name}, which takes {section.minutes:g} of {left:.1f} minutes", flush=True
            )
            write("gpu", result, options)
            continue
        print(f"{section.name} ...", flush=True)
        found = result["sections"][section.name] = outcome(section)
        result["failed"] += [section.name] * ("failed" in found)
        write("gpu", result, options)
    if result["failed"]:
        print(f"failed: {', '.join(result['failed'])}", file=sys.stderr)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
