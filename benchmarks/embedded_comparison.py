"""Which pattern, precision or base is better, on the embedded models: a grid of runs over three seeds.

    python -m benchmarks.embedded_comparison patterns --out runs
    python -m benchmarks.embedded_comparison precision --out runs
    python -m benchmarks.embedded_comparison bases --out runs

Each cell of a grid is a run of the recipe ``retrieval`` with other values, measured once, at its end. A cell that is
done is a file in the output folder and is not run again. The result has each cell's scores by seed and, against the
grid's first cell, the paired difference with Student's 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.common import write
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.run import run as evaluate
from ropewalk.evaluation.settings import EvaluationSettings, Loading
from ropewalk.parallel.context import RunContext
from ropewalk.rope.theory import theta_by_rule
from ropewalk.training import extend, load_recipe

RECIPE = "retrieval"
ROTARY_DIM, ROPE_THETA, TRAINED_LENGTH = 32, 10_000.0, 256
"""Of both embedded models."""
BASE_RULES = ("critical-dimension", "ntk", "length-floor", "lower-bound", "recommended")
PUBLISHED_THETA = 5.0e6
"""The base that arXiv:2411.13476 sets for 64K tokens and shorter ones."""
SLOPPY = {"precision": "bfloat16", "exact_rope": "false"}
"""Parameters and rotation in bfloat16, as transformers computes them."""

Overrides = dict[str, Any]


def patterns() -> dict[str, Overrides]:
    """What tokens see, and where positions begin."""
    return {
        "full": {"stages.0.pattern": "full"},
        "intra_document": {"stages.0.pattern": "intra_document"},
        "intra_document, reset": {"stages.0.pattern": "intra_document", "stages.0.positions": "reset"},
        "anchor": {"stages.0.pattern": "anchor"},
    }


def precision() -> dict[str, Overrides]:
    """Patterns in float32 and with a rotation in bfloat16, which is what AnchorAttention was made for."""
    some = {name: given for name, given in patterns().items() if name in ("full", "intra_document", "anchor")}
    return some | {f"{name}, bfloat16": given | SLOPPY for name, given in some.items()}


def bases() -> dict[str, Overrides]:
    """Bases by rule, for four and eight times the trained length of both models."""
    found: dict[str, Overrides] = {}
    for model in ("embedded:retrieval", "embedded"):
        for factor in (4, 8):
            target = factor * TRAINED_LENGTH
            values = {
                rule: theta_by_rule(rule, ROTARY_DIM, ROPE_THETA, TRAINED_LENGTH, target)
                for rule in BASE_RULES
            }
            by_theta: dict[float, str] = {}
            for rule, theta in {"unchanged": ROPE_THETA, **values, "published": PUBLISHED_THETA}.items():
                by_theta.setdefault(theta, rule)
            for theta, rule in by_theta.items():
                found[f"{model}, {target}, {rule}"] = {
                    "model": model,
                    "stages.0.context": target,
                    "stages.0.rows_per_step": 32 // factor,
                    "stages.0.rows_per_batch": 1,
                    "stages.0.rope.rope_theta": f"{theta:.6g}",
                    "evaluation.lengths": f"[{TRAINED_LENGTH}, {target // 2}, {target}]",
                }
    return found


QUESTIONS = {"patterns": patterns, "precision": precision, "bases": bases}


def file_of(cell: str, seed: int, out: Path) -> Path:
    """The file with what a cell gave."""
    name = f"{cell}, seed {seed}".replace(", ", "-").replace(":", "-").replace(" ", "")
    return out / f"{name}.json"


def measured(cell: str, overrides: Overrides, seed: int, out: Path) -> dict[str, Any]:
    """Train and measure one cell, or read what it gave."""
    done = file_of(cell, seed, out)
    name = done.stem
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    said = [f"{key}={value}" for key, value in overrides.items()]
    recipe = load_recipe(
        RECIPE, [*said, f"seed={seed}", f"output={out / name}", f"data.cache={out / 'packed'}"]
    )
    # Measured once, after training; the result of the measurement before is the same in all cells.
    nothing = type(recipe.evaluation)(suites=[])
    shutil.rmtree(out / name, ignore_errors=True)
    started = time.process_time()
    result = extend(recipe.model_copy(update={"evaluation": nothing}))
    trained = time.process_time() - started
    what = recipe.evaluation.settings(lengths=recipe.evaluation.lengths or ())
    loading = Loading(
        dtype="bfloat16" if recipe.precision == "bfloat16" else "auto", exact_rope=recipe.exact_rope
    )
    evaluation = evaluate(
        EvaluationSettings(model=str(result.model), what=what, loading=loading), RunContext()
    )
    found = {
        "cell": cell,
        "seed": seed,
        "overrides": overrides,
        "cpu_seconds": {"training": round(trained, 1), "all": round(time.process_time() - started, 1)},
        "scores": dict(scores(evaluation.results)),
    }
    partial = done.with_suffix(".partial")
    partial.write_text(json.dumps(found) + "\n")
    partial.rename(done)
    shutil.rmtree(out / name)
    return found


def scores(results: Sequence[TaskResult]) -> Iterator[tuple[str, float]]:
    """Each task's score by its name, with the length; perplexity also by position."""
    for result in results:
        if result.status == "ok" and result.length is not None:
            yield f"{result.task} {result.length}", round(result.score, 3)
            for part in result.positions if result.task == "perplexity" else ():
                yield f"perplexity {result.length} from {part.start}", round(part.perplexity, 3)


def compared(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each cell and score: values by seed, mean, and the paired difference from the first cell with its interval.

    The interval is Student's over seeds, so that it knows of chance in training; it is None below two seeds.
    """
    names = list(dict.fromkeys(cell["cell"] for cell in cells))
    by_cell = {
        name: {cell["seed"]: cell["scores"] for cell in cells if cell["cell"] == name} for name in names
    }
    first = by_cell[names[0]]
    table = []
    for name, by_seed in by_cell.items():
        for score in next(iter(by_seed.values())):
            values = [found[score] for found in by_seed.values()]
            row = {"cell": name, "score": score, "values": values, "mean": round(float(np.mean(values)), 3)}
            paired = [
                found[score] - first[seed][score]
                for seed, found in by_seed.items()
                if seed in first and score in first[seed]
            ]
            if name != names[0] and paired:
                row["difference"] = round(float(np.mean(paired)), 3)
                row["difference_ci95"] = _interval(paired)
            table.append(row)
    return table


def _interval(differences: Sequence[float]) -> list[float] | None:
    if len(differences) < 2:
        return None
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    middle = float(np.mean(differences))
    return [round(middle - half, 3), round(middle + half, 3)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", choices=list(QUESTIONS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells' results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="run the cells whose name contains this")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe in all cells"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no cell after this many minutes; the result has those that are done",
    )
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    everywhere = dict(each.split("=", 1) for each in args.set)
    grid = {
        name: given | everywhere for name, given in QUESTIONS[args.question]().items() if args.only in name
    }
    if not grid:
        parser.error(f"--only {args.only} is part of no cell's name")
    started, cells, left = time.monotonic(), [], []
    # Seeds outermost, so that a grid that is cut off has whole seeds.
    for seed in range(args.seeds):
        for cell, overrides in grid.items():
            late = args.minutes is not None and time.monotonic() - started > 60 * args.minutes
            if late and not file_of(cell, seed, args.out).exists():
                left.append(f"{cell}, seed {seed}")
                continue
            cells.append(measured(cell, overrides, seed, args.out))
            print(cell, seed, cells[-1]["cpu_seconds"], cells[-1]["scores"], flush=True)
    write(
        f"embedded_{args.question}",
        {"recipe": RECIPE, "cells": grid, "not_run": left, "table": compared(cells), "runs": cells},
    )


if __name__ == "__main__":
    main()
