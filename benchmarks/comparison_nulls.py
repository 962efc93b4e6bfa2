"""How often a grid of runs without any effect announces one, and how often a real effect is found.

    python -m benchmarks.comparison_nulls [--grids 300] [--out FILE]

Each simulated grid has cells, seeds, tasks and samples as a comparison has them. Answers are right with a probability
that a cell, a seed, and the cell's own luck with that seed decide; losses are normal. The share of grids in which any
adjusted p-value is below 0.05 must be at most 5 % (two standard errors more in a simulation) without an effect; with
one it is the power.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.common import parsed, parser_of, write
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.experiments.statistics import differences

LEVEL = 0.05


@dataclass(frozen=True)
class Design:
    """A kind of grid.

    Attributes:
        cells, seeds, tasks, samples: numbers of each; samples are per task and seed.
        kind: ``answers`` (new samples with each seed) or ``losses`` (the same rows with each seed).
        right: probability of a right answer in the middle of a task's range.
        luck: standard deviation of what training with another seed changes, in logits or in nats.
        uneven: factor of ``luck`` in one cell; 1 for equal luck in all.
        uneven_cell: number of that cell; 0 is the reference.
        effect: what the second cell gains, in logits or nats.
    """

    cells: int
    seeds: int
    tasks: int
    samples: int
    kind: str = "answers"
    right: float = 0.5
    luck: float = 0.0
    uneven: float = 1.0
    uneven_cell: int = 1
    effect: float = 0.0


def grid(design: Design, rng: np.random.Generator) -> dict[str, dict[int, list[TaskResult]]]:
    """One simulated grid."""
    found: dict[str, dict[int, list[TaskResult]]] = {f"cell {c}": {} for c in range(design.cells)}
    level = np.log(design.right / (1 - design.right)) + rng.normal(0, 0.5, design.tasks)
    rows = rng.normal(0, 0.3, (design.tasks, design.samples))
    for seed in range(design.seeds):
        hard = rng.normal(0, 1, (design.tasks, design.samples))
        for number, name in enumerate(found):
            luck = (
                design.luck
                * (design.uneven if number == design.uneven_cell else 1)
                * rng.normal(0, 1, design.tasks)
            )
            gain = luck + (design.effect if number == 1 else 0)
            found[name][seed] = [
                _answers(level[t] + gain[t] + hard[t], t, seed, rng)
                if design.kind == "answers"
                else _losses(2 + rows[t] - gain[t] + rng.normal(0, 0.02, design.samples), t)
                for t in range(design.tasks)
            ]
    return found


def _answers(logits: np.ndarray, task: int, seed: int, rng: np.random.Generator) -> TaskResult:
    right = rng.random(len(logits)) < 1 / (1 + np.exp(-logits))
    samples = tuple({"index": i, "score": 100.0 * each} for i, each in enumerate(right.tolist()))
    score = 100 * float(right.mean())
    details = {SAMPLES: f"{task} {seed}"}
    return TaskResult(
        "suite", f"task {task}", 1024, len(right), score, (0, 100), details=details, samples=samples
    )


def _losses(nats: np.ndarray, task: int) -> TaskResult:
    samples = tuple({"index": i, "nats": 1000 * float(each), "tokens": 1000} for i, each in enumerate(nats))
    score = float(np.exp(nats.mean()))
    return TaskResult(
        "text",
        f"task {task}",
        1024,
        len(nats),
        score,
        (0, 100),
        details={SAMPLES: "rows"},
        unit="perplexity",
        samples=samples,
    )


def announced(design: Design, grids: int, seed: int = 0) -> float:
    """Share of grids in which a difference is called more than chance."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(grids):
        found = differences(grid(design, rng))
        hits += any(each.real for cell in found.values() for each in cell)
    return hits / grids


NULLS = [
    *(
        Design(cells, seeds, tasks, samples, luck=luck)
        for (cells, seeds), (tasks, samples), luck in itertools.product(
            ((2, 3), (3, 3), (5, 3), (3, 5), (3, 1), (5, 1)), ((1, 20), (4, 50)), (0.0, 0.7)
        )
        if not (seeds == 1 and luck)
    ),
    Design(3, 3, 4, 50, right=0.98, luck=0.5),
    Design(3, 3, 4, 50, right=0.02, luck=0.5),
    Design(5, 3, 4, 50, luck=0.3, uneven=4.0),
    Design(3, 3, 2, 24, "losses", luck=0.0),
    Design(3, 3, 2, 24, "losses", luck=0.03),
    Design(5, 5, 2, 24, "losses", luck=0.03),
    Design(3, 1, 2, 24, "losses"),
    Design(5, 3, 4, 50, luck=0.3, uneven=4.0, uneven_cell=0),
    Design(5, 3, 2, 24, "losses", luck=0.03, uneven=4.0),
]
EFFECTS = [
    Design(3, seeds, 4, samples, luck=0.3, effect=effect)
    for seeds, samples, effect in itertools.product((1, 3, 5), (50, 200), (1.0, 2.0))
] + [Design(3, seeds, 2, 24, "losses", luck=0.01, effect=0.05) for seeds in (1, 3, 5)]


def run(grids: int) -> dict[str, Any]:
    """Both tables."""
    allowed = LEVEL + 2 * (LEVEL * (1 - LEVEL) / grids) ** 0.5
    nulls = [{**asdict(each), "announced": announced(each, grids, n)} for n, each in enumerate(NULLS)]
    power = [{**asdict(each), "announced": announced(each, grids, n)} for n, each in enumerate(EFFECTS)]
    return {"grids": grids, "allowed": allowed, "nulls": nulls, "power": power}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--grids", type=int, default=400)
    options = parsed(parser, {"grids": 1}, arguments)
    found = run(options.grids)
    for table in ("nulls", "power"):
        for line in found[table]:
            print(table, f"{100 * line['announced']:5.1f} %", line)
    print(f"allowed without an effect: {100 * found['allowed']:.1f} %")
    write("comparison_nulls", found, options)


if __name__ == "__main__":
    main()
