"""Search algorithms under one budget: what each finds, on what forwards, and what it is worth on other documents.

    python -m benchmarks.search [--problems toy-64,embedded-1024,...] [--seeds 5] [--models FOLDER] [--losses FOLDER]
        [--variants 'evolution:600,cma-es + racing:300']

The unit of cost is one candidate on one document, a forward; baselines and held-out documents are not counted in.
Evolution without racing is the paper's. Measured losses are shared between the runs of a problem, as they do not
depend on who asks; every run still counts its own forwards. With --losses they are kept in files as well, and an
interrupted benchmark goes on from there. Run on one thread: the losses depend on it in the last bits.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import parsed, parser_of, write
from ropewalk.data import SourceSpec, read_documents
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.data.tokens.tokenise import load_tokenizer, tokenise
from ropewalk.models.load import load_model
from ropewalk.rope import Default, method_from_config
from ropewalk.search import (
    START_TOKENS,
    Candidate,
    Evaluator,
    Goal,
    Job,
    Minimum,
    ModelEvaluator,
    Strategy,
    algorithm_named,
    goal_of,
    minimise,
)
from ropewalk.search.data import search_rows

SHARED = Path(__file__).resolve().parents[2] / "shared"
DOCUMENTS, HELD_OUT = 5, 8
DEFAULT = "cma-es"
PAPER = "evolution"


@dataclass(frozen=True)
class Variant:
    """A way to search: algorithm, racing, and the n̂ to choose from."""

    algorithm: str
    racing: bool
    start_tokens: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        tokens = " + start tokens" if len(self.start_tokens) > 1 else ""
        return self.algorithm + (" + racing" if self.racing else "") + tokens


FOUR = tuple(Variant(name, racing) for name in (PAPER, DEFAULT) for racing in (False, True))
TOKENS = Variant(DEFAULT, True, START_TOKENS)


@dataclass(frozen=True)
class Problem:
    """What to search for: a model at a length, or a toy of so many pairs."""

    model: str
    trained: int
    target: int
    budget: int
    variants: tuple[Variant, ...]


PROBLEMS = {
    "toy-64": Problem("toy", 64, 512, 1500, FOUR),
    "embedded-1024": Problem("embedded", 256, 1024, 600, FOUR),
    "stories-2048": Problem("stories260k", 512, 2048, 600, (*FOUR, TOKENS)),
    "stories-4096": Problem("stories260k", 512, 4096, 600, (FOUR[0], FOUR[3], TOKENS)),
}


class Toy:
    """A quadratic of the log factors around hidden ones that ascend, a little others on each document.

    Args:
        pairs: rotary pairs.
        ratio: the last hidden factor, about.
        seed: of all that is hidden.
    """

    n_documents = DOCUMENTS

    def __init__(self, pairs: int, ratio: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = np.linspace(0, 1, pairs) ** random.uniform(0.5, 3)
        rough = np.exp(math.log(ratio) * shape + random.normal(0, 0.03, pairs))
        hidden = np.log(np.clip(np.maximum.accumulate(rough), 1, 1.2 * ratio))
        walks = random.normal(0, 0.15 / math.sqrt(pairs), (DOCUMENTS, pairs)).cumsum(1)
        weights = random.lognormal(0, 1, pairs)
        self.centres, self.weights = hidden + walks, weights / weights.sum()
        self.levels = 1 + random.normal(0, 0.2, DOCUMENTS)

    def losses(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, float]]:
        for job in jobs:
            away = np.log(job.candidate.rescale_factors) - self.centres[job.document]
            yield job, float(self.levels[job.document] + 5 * (self.weights * away**2).sum())

    def objective(self, losses: Sequence[float]) -> float:
        return math.fsum(losses) / len(losses)


class Shared:
    """An evaluator whose answers are kept, for later runs and in a file."""

    def __init__(self, evaluator: Evaluator, path: Path | None = None) -> None:
        self.evaluator, self.path = evaluator, path
        self.known: dict[Job, float] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                factors, tokens, document, loss = json.loads(line)
                self.known[Job(Candidate(tuple(factors), tokens), document)] = (
                    math.inf if loss is None else loss
                )

    @property
    def n_documents(self) -> int:
        return self.evaluator.n_documents

    def losses(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, float]]:
        for job in jobs:
            if job not in self.known:
                ((_, loss),) = self.evaluator.losses([job])
                self.known[job] = loss
                if self.path is not None:
                    line = [
                        job.candidate.rescale_factors,
                        job.candidate.start_tokens,
                        job.document,
                        loss if math.isfinite(loss) else None,
                    ]
                    with self.path.open("a") as file:
                        print(json.dumps(line), file=file)
            yield job, self.known[job]

    def objective(self, losses: Sequence[float]) -> float:
        return self.evaluator.objective(losses)


def evaluators(goal: Goal, folder: str, text: str) -> tuple[ModelEvaluator, ModelEvaluator]:
    """On documents to search on, and on others."""
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    documents = [each.input_ids for each in tokenise(read_documents([SourceSpec(path=text)]), tokenizer)]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    length = goal.target_length
    rows, held_out = search_rows(documents, length, bos, eos if bos is None else None, DOCUMENTS, HELD_OUT)
    assert held_out is not None
    return ModelEvaluator(model, goal, rows.rows), ModelEvaluator(model, goal, held_out.rows)


def run_of(result: Minimum, seed: int, reached: float | None) -> dict[str, Any]:
    """One search as an entry of the result file."""
    return {
        "seed": seed,
        "objective": result.best.objective,
        "rescale_factors": result.best.candidate.rescale_factors,
        "start_tokens": result.best.candidate.start_tokens,
        "forwards": result.forwards,
        "candidates": result.candidates,
        "held_out_perplexity": None if reached is None else math.exp(reached),
        "history": [[each.forwards, each.measured.objective] for each in result.improvements()],
    }


def compared(
    results: dict[str, list[Minimum]], reference: str, fractions: Sequence[float] = (0.25, 0.5, 1.0)
) -> list[dict[str, Any]]:
    """Forwards that each variant took to the reference's best after parts of its budget, seed by seed.

    Args:
        results: by variant, in the order of the seeds.
        reference: the variant whose objectives are to be reached.
        fractions: of the reference's forwards.

    Returns:
        For each variant and fraction the forwards by seed, None where it was not reached, and their median, in
        which those count as infinite; None if that is the median.
    """
    found = []
    for fraction in fractions:
        goals = [
            min(
                each.measured.objective
                for each in whole.traces
                if each.forwards <= max(fraction * whole.forwards, whole.traces[0].forwards)
            )
            for whole in results[reference]
        ]
        for name, runs in results.items():
            forwards = [run.forwards_to(goal) for run, goal in zip(runs, goals, strict=True)]
            middle = statistics.median(math.inf if each is None else each for each in forwards)
            found.append(
                {
                    "variant": name,
                    "reference": reference,
                    "of_its_budget": fraction,
                    "forwards": forwards,
                    "median": middle if math.isfinite(middle) else None,
                }
            )
    return found


def budgets_of(problem: Problem, told: str | None) -> dict[Variant, int]:
    """The variants of a problem to run and their budgets: all of them with its own, or those that are told."""
    if told is None:
        return dict.fromkeys(problem.variants, problem.budget)
    known = {variant.name: variant for variant in problem.variants}
    parts = [part.rsplit(":", 1) for part in told.split(",")]
    return {known[name]: int(budget) for name, budget in parts if name in known}


def solve(name: str, seeds: int, models: Path, losses: Path | None, told: str | None) -> dict[str, Any]:
    """The variants of a problem."""
    problem = PROBLEMS[name]
    budgets = budgets_of(problem, told)
    baselines: dict[str, Any] = {}
    judge: ModelEvaluator | None = None
    goal = goal_of(Default(2 * problem.trained, 1e4), problem.trained, problem.target)
    if problem.model != "toy":
        embedded = problem.model == "embedded"
        folder = str(demo_model_path() if embedded else models / problem.model)
        text = "embedded:validation" if embedded else str(models.parent / "text" / "stories.jsonl")
        config = json.loads((Path(folder) / "config.json").read_text())
        goal = goal_of(method_from_config(config), problem.trained, problem.target)
        measure, judge = evaluators(goal, folder, text)
        for key, method in goal.baselines().items():
            seen, other = measure.baseline(method), judge.baseline(method)
            baselines[key] = {"objective": seen, "held_out_perplexity": math.exp(other)}
            print(f"{name}: {key} {math.exp(seen):.3f}, held out {math.exp(other):.3f}", flush=True)
        if losses is not None:
            losses.mkdir(parents=True, exist_ok=True)
        shared = Shared(measure, losses / f"{name}.jsonl" if losses else None)
    results: dict[str, list[Minimum]] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    for variant, budget in budgets.items():
        space = goal.space(variant.start_tokens)
        results[variant.name], runs[variant.name] = [], []
        for seed in range(seeds):
            began = time.perf_counter()
            evaluator = Toy(space.pairs, goal.scale, seed) if problem.model == "toy" else shared
            strategy = Strategy(algorithm_named(variant.algorithm), budget, seed, variant.racing)
            result = minimise(space, evaluator, strategy, goal.seeds(space))
            reached = judge.baseline(goal.method(result.best.candidate)) if judge else None
            results[variant.name].append(result)
            runs[variant.name].append(run_of(result, seed, reached))
            told = "" if reached is None else f", held out {math.exp(reached):.3f}"
            print(
                f"{name}: {variant.name}, seed {seed}: {math.exp(result.best.objective):.4f}{told} "
                f"({result.forwards} forwards, {time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    # Another space is another question, and has no part in it.
    plain = {variant.name: results[variant.name] for variant in budgets if len(variant.start_tokens) == 1}
    reference = next(iter(plain), "")
    comparison = compared(plain, reference) if plain else []
    for each in comparison:
        print(f"{name}: {each['variant']} to {each['of_its_budget']:.0%} of {reference}: {each['forwards']}")
    return {
        "problem": name,
        "seeds": seeds,
        "trained_length": problem.trained,
        "target_length": problem.target,
        "pairs": goal.current.rotary_dim // 2,
        "budgets": {variant.name: budget for variant, budget in budgets.items()},
        "documents": DOCUMENTS,
        "held_out_documents": HELD_OUT if judge else 0,
        "baselines": baselines,
        "runs": runs,
        "comparison": comparison,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--variants", help="name:budget, those to run; all with the problem's budget if absent"
    )
    parser.add_argument("--models", type=Path, default=SHARED / "models")
    parser.add_argument("--losses", type=Path)
    small = {"problems": "toy-64", "seeds": 1, "variants": "cma-es + racing:15"}
    options = parsed(parser, small, arguments)
    torch.set_num_threads(1)
    results = [
        solve(name, options.seeds, options.models, options.losses, options.variants)
        for name in options.problems.split(",")
    ]
    write("search_cpu", {"problems": results}, options)


if __name__ == "__main__":
    main()
