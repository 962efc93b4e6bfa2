"""What ropewalk costs on one GPU, in eight minutes: attention, steps, memory, generation and search, in one file.

    python -m benchmarks.gpu [--out FILE] [--minutes 8] [--only attention step ...]
    python -m benchmarks.gpu --picture FILE

Each section has a share of the minutes; what it leaves goes to the next ones. The most telling rows come first, and a
row that there is no time for says so. The file is written after every row, so that a run that is killed keeps the
others. A row that fails leaves its traceback there, the others run, and the exit status is 1. At the end stand the
bounds that the package is held to: met, not met, or not run. ``--picture`` draws a file, as every run does at its end.

The sections ``tests`` (those marked ``gpu``), ``audit``, ``one-rank`` and ``several-devices`` run only by name.
``--device cpu --small`` runs every section in seconds on a machine without a GPU; those figures mean nothing.

Times are those of CUDA events, or of the host around steps. Beside them stand the needed operations, and their share of
the rate that this device reaches in a large bfloat16 matrix product.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import gpu_attention, gpu_generation, gpu_ring, gpu_step, parallel_gpu, search_gpu
from benchmarks.common import parsed, parser_of, write
from benchmarks.gpu_judged import judged
from benchmarks.gpu_sizes import (
    LARGE,
    SMALL,
    Case,
    NotRunError,
    Sizes,
    allocated_gib,
    free,
    matmul_rate,
    milliseconds,
    peak_gib,
)
from ropewalk import RopewalkError

TEST_SECONDS = 600
"""Patience with the tests: one that hangs must not take the other figures with it."""


@dataclass(frozen=True)
class Section:
    """A part of the benchmark.

    Attributes:
        name: its name for ``--only`` and in the file.
        minutes: its share of the time, out of eight minutes for all that run unnamed.
        cases: makes its rows.
        named: whether it runs only by name.
    """

    name: str
    minutes: float
    cases: Callable[[], list[Case]]
    named: bool = False


def sections(sizes: Sizes, device: str) -> list[Section]:
    """All of them, those first whose failure would explain the others'."""

    def alone(work: Callable[[Sizes, str], Mapping[str, Any]]) -> Callable[[], list[Case]]:
        return lambda: [Case({}, partial(work, sizes, device))]

    return [
        Section("check", 0.4, alone(check)),
        Section("attention", 2.8, partial(gpu_attention.cases, sizes, device)),
        Section("step", 2.6, partial(gpu_step.steps, sizes, device)),
        Section("memory", 0.8, partial(gpu_step.memory, sizes, device)),
        Section("ring", 0.3, partial(gpu_ring.cases, sizes, device)),
        Section("generation", 0.7, partial(gpu_generation.cases, sizes, device)),
        Section("search", 0.4, partial(search_gpu.cases, sizes, device)),
        Section("tests", 3, alone(tests), named=True),
        Section("audit", 1, alone(audit), named=True),
        Section("one-rank", 1, alone(parallel_gpu.step_of_one_rank), named=True),
        Section("several-devices", 5, alone(parallel_gpu.steps_of_several), named=True),
    ]


def check(sizes: Sizes, device: str) -> dict[str, Any]:
    """Device, driver and versions, a matrix product and a training step: shows at once that an install is broken."""
    found: dict[str, Any] = {"transformers": transformers.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        found["devices"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        found["capability"] = torch.cuda.get_device_capability()
        found["cudnn"] = torch.backends.cudnn.version()
        # Containers may lack the program.
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split()
    found["matmul_tflops"] = matmul_rate(sizes.product, device, sizes.repeats) / 1e12
    tiny = gpu_step.Trained("tiny", SMALL.models["tiny"], SMALL.steps[0], SMALL.mean_document)
    found["training_step_s"] = gpu_step.own_step(tiny, sizes, device)["seconds"]
    return found


def audit(sizes: Sizes, device: str) -> dict[str, Any]:
    """A forward pass of the precision audit in each arithmetic, for random weights in Llama 2 7B's shape."""
    from ropewalk.audit import AuditedModel, Runner, stock_arithmetic
    from ropewalk.audit.passes import shifted

    config = transformers.LlamaConfig(**sizes.audit_model, max_position_embeddings=sizes.audit)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    runner = Runner(AuditedModel.of(model), 2 * sizes.audit)
    ids = torch.randint(0, config.vocab_size, (sizes.audit,))
    passes = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        allocated_gib(device)
        run = partial(runner.run, ids, stock_arithmetic(dtype), shifted(sizes.audit, 16))
        ms = milliseconds(run, device, sizes.repeats)
        passes.append({"length": sizes.audit, "dtype": str(dtype), "ms": ms, **peak_gib(device)})
    return {"passes": passes}


def tests(sizes: Sizes, device: str) -> dict[str, Any]:
    """The tests that need a GPU: pytest's status, what failed, and its last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", sizes.tests, "-p", "no:cacheprovider"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS)
    lines = result.stdout.strip().splitlines()
    found: dict[str, Any] = {"status": result.returncode, "summary": lines[-1:]}
    if result.returncode:
        named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        found["failed"] = named or result.stderr.strip()[-2000:]
    return found


def measured(case: Case) -> dict[str, Any]:
    """A row of figures, or why there is none."""
    began = time.monotonic()
    row = dict(case.row)
    try:
        row |= case.work()
    except NotRunError as error:
        row["not_run"] = str(error)
    except (RopewalkError, torch.OutOfMemoryError) as error:
        row["refused"] = str(error).splitlines()[0]
    # A machine is lent for minutes: whatever stops one row must not take the others with it.
    except Exception as error:
        row |= {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(row["traceback"], file=sys.stderr, flush=True)
    free()
    return {**row, "seconds_in_all": round(time.monotonic() - began, 2)}


def run(
    chosen: Sequence[Section], minutes: float | None, result: dict[str, Any], keep: Callable[[], Any]
) -> None:
    """Measure sections one after the other, each until its share of the time is over; ``keep`` follows every row."""
    began = time.monotonic()
    shares = sum(section.minutes for section in chosen)
    given = 0.0
    for section in chosen:
        given += section.minutes / shares
        rows: list[dict[str, Any]] = []
        result["sections"][section.name] = {"rows": rows}
        for case in section.cases():
            late = minutes is not None and time.monotonic() - began > 60 * minutes * given
            row = {**case.row, "not_run": "no time left"} if late else measured(case)
            rows.append(row)
            result["failed"] += (
                [section.name] if "failed" in row and section.name not in result["failed"] else []
            )
            print(section.name, {k: v for k, v in row.items() if k != "traceback"}, flush=True)
            keep()
    result["minutes"] = (time.monotonic() - began) / 60


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8, help="time for all; begun rows are finished")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections to run, by name")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the figures of a file, and run nothing"
    )
    options = parsed(parser, {"minutes": None}, arguments)
    if options.picture is not None:
        draw(options.picture, json.loads(options.picture.read_text()))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device, which these tests and benchmarks need; "
            "--device cpu --small shows that they run",
            file=sys.stderr,
        )
        return 2
    chosen = chosen_sections(
        parser, sections(SMALL if options.small else LARGE, options.device), options.only
    )
    result: dict[str, Any] = {"sections": {}, "failed": [], "judged": []}

    def keep(told: bool = False) -> Path:
        result["judged"] = judged(result["sections"])
        return write("gpu", result, options, told)

    # What is imported by now stays; else every collection between two rows would look at it again.
    if options.device == "cuda":
        gc.freeze()
    run(chosen, options.minutes, result, keep)
    draw(keep(told=True), result)
    for each in result["judged"]:
        found = "" if each["found"] is None else f" ({each['found']:.3g} of {each['bound']:g})"
        print(f"{each['verdict']:8} {each['what']}{found}")
    if result["failed"]:
        print(f"failed: {', '.join(result['failed'])}", file=sys.stderr)
    return 1 if result["failed"] else 0


def chosen_sections(
    parser: argparse.ArgumentParser, known: Sequence[Section], only: Sequence[str] | None
) -> list[Section]:
    unknown = sorted(set(only or ()) - {each.name for each in known})
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; choose from {', '.join(each.name for each in known)}")
    return [each for each in known if (each.name in only if only else not each.named)]


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the picture beside the file, if it has anything to show."""
    from benchmarks.gpu_picture import figure
    from ropewalk.reporting.figures.drawing import draw as drawn

    shown = figure(result)
    if shown is not None:
        drawn(shown, path.with_suffix(".png"))
        print(f"drawn {path.with_suffix('.png')}")


if __name__ == "__main__":
    sys.exit(main())
