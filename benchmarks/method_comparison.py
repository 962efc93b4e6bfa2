"""Which way to extend RoPE is better: nine methods at 2, 4 and 8 times the trained length, over three seeds.

    python -m benchmarks.method_comparison embedded --runs runs
    python -m benchmarks.method_comparison smollm2 --data FOLDER --runs runs    # of examples/smollm2.py

For each length and seed, `ropewalk compare` trains a grid of recipes that differ in their stage; run again, the command
goes on where it was. DroPE trains at the original length, so one training serves all lengths. Each exported model is
then evaluated by `ropewalk eval`, and so is the model without an extension. The scores of a length and seed are written
to one file in ``--scores``, and what has a file there is not run again: several machines can share the work.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console

from benchmarks.common import RESULTS, machine, parsed, parser_of, write
from ropewalk import evaluate
from ropewalk.cli.progress import ConsoleReporter
from ropewalk.data.read.embedded import embedded_documents
from ropewalk.data.read.retrieval import ExamWriter
from ropewalk.evaluation.results import TaskResult
from ropewalk.experiments.finished_runs import cost_of
from ropewalk.experiments.grid import Run, make_grid
from ropewalk.experiments.run import compare, conclusion
from ropewalk.experiments.settings import CompareSettings
from ropewalk.experiments.statistics import differences, means_over_seeds
from ropewalk.parallel.context import RunContext
from ropewalk.rope.theory import recommended_theta

MULTIPLES = (2, 4, 8)
"""Lengths, as multiples of the trained length."""
REFERENCE = "theta"
NONE, DROPE, COPE = "none", "drope", "cope"
ROPES: Mapping[str, Any] = {
    # The base that `ropewalk inspect --target` recommends, which a stage has by default.
    REFERENCE: "theta",
    "yarn": "yarn",
    "ntk": "ntk",
    "longrope": {"method": "longrope", "search": {}},
    "longrope2": {"method": "longrope", "search": {"space": "critical-dimension", "objective": "needle"}},
    "longrope2-mixed": {
        "method": "longrope",
        "search": {"space": "critical-dimension", "objective": "needle"},
    },
    COPE: "cope",
    DROPE: "none",
}
"""RoPE of the stage of each method that trains."""
MIXED = {"longrope2-mixed": {"short_rows": 0.5}}
"""Further keys of a stage."""


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained and evaluated.

    Attributes:
        model: checkpoint.
        trained: its trained length, tokens.
        rope_theta, rotary_dim: its base and rotated dimensions of a head.
        data: of the recipe.
        steps, tokens_per_step, tokens_per_batch, learning_rate: of every training.
        evaluation: options of `ropewalk eval`, except lengths and seed.
    """

    model: str
    trained: int
    rope_theta: float
    rotary_dim: int
    data: Mapping[str, Any]
    steps: int
    tokens_per_step: int
    tokens_per_batch: int
    learning_rate: float
    evaluation: Mapping[str, Any]

    def stage(self, method: str, length: int) -> dict[str, Any]:
        """The stage of a recipe that extends the model to a length by a method."""
        context, rope = length, ROPES[method]
        if method == DROPE:
            # Its softmax scale is measured at all lengths that it serves.
            scales = {"lengths": [times * self.trained for times in MULTIPLES]}
            context, rope = self.trained, {"method": rope, "softmax_scale": scales}
        if method == COPE:
            # Its authors raise the base as well; here it has the reference's.
            base = recommended_theta(self.rope_theta, self.trained, length, self.rotary_dim).rope_theta
            rope = {"method": rope, "rope_theta": base}
        return {
            "context": context,
            "rope": rope,
            "pattern": "full",
            "steps": self.steps,
            "rows_per_step": max(1, self.tokens_per_step // context),
            "rows_per_batch": max(1, self.tokens_per_batch // context),
            "learning_rate": self.learning_rate,
            "warmup_steps": self.steps // 20,
            "schedule": "cosine",
            **MIXED.get(method, {}),
        }

    def recipe(self) -> dict[str, Any]:
        """What all runs share."""
        return {
            "model": self.model,
            "output": "run",
            "data": self.data,
            "stages": [self.stage(REFERENCE, 2 * self.trained)],
            "checkpoints": {"every": self.steps, "keep": 1},
            # Exported models are evaluated, at lengths that depend on the method.
            "evaluation": {"suites": []},
        }


WORD = re.compile(r"(?<![\w])[a-z]{4,9}(?![\w])")
NEEDLES = ("niah_single_1", "niah_multikey_2")
"""Tasks of RULER: one needle in noise, and one among needles alone."""


DOCUMENTS = 6000
"""Documents with questions in the corpus of the embedded model."""
PIECE = 400
"""Most characters of a piece of a document of the embedded corpus, which is well below 256 tokens."""


def write_corpus(folder: Path, documents: int | None = None) -> None:
    """Write documents of at most 256 tokens and longer ones, which mixed rows need both: with questions, and of Python.

    Documents with questions are those of ``embedded:retrieval-documents``, drawn anew and from 64 tokens on. Of the
    Python documents, every second one is cut into pieces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = tuple(sorted({word for each in embedded_documents("train") for word in WORD.findall(each.text)}))
    with (folder / "retrieval.jsonl").open("w") as file:
        for number in range(documents or DOCUMENTS):
            writer = ExamWriter(random.Random(f"comparison of methods {number}"), (words, words))
            text = writer.document(int(64 * 32 ** writer.rng.random()))
            file.write(json.dumps({"text": text}) + "\n")
    with (folder / "python.jsonl").open("w") as file:
        for number, document in enumerate(embedded_documents("train")):
            pieces, piece = [document.text], ""
            if number % 2:
                pieces = []
                for line in document.text.splitlines(keepends=True):
                    if piece and len(piece) + len(line) > PIECE:
                        pieces.append(piece)
                        piece = ""
                    piece += line
            file.writelines(json.dumps({"text": each}) + "\n" for each in pieces if each.strip())


def setup_of(name: str, data: Path | None, runs: Path) -> Setup:
    """The setup by name.

    Args:
        name: ``embedded`` or ``smollm2``.
        data: for smollm2, folder with ``smollm2`` and ``books``.
        runs: folder of the runs, which gets the corpus of the embedded model.
    """
    suites = {"suites": ("perplexity", "passkey", "ruler"), "tasks": NEEDLES}
    if name == "embedded":
        corpus = runs.resolve() / "corpus"
        if not corpus.is_dir():
            write_corpus(corpus)
        shares = {"retrieval": 0.6, "python": 0.4}
        return Setup(
            "embedded:retrieval",
            256,
            1e4,
            32,
            {
                "sources": [{"path": str(corpus / f"{each}.jsonl"), "name": each} for each in shares],
                "mixture": {"shares": shares, "tokens": 520_000, "shuffle": True},
                "validation_sources": ["embedded:validation"],
            },
            61,
            8192,
            4096,
            1e-3,
            {**suites, "samples": 24, "rows": 8, "text": "embedded:validation"},
        )
    if data is None:
        raise SystemExit("smollm2 needs --data, the folder that examples/smollm2.py wrote into")
    books = data / "books"
    return Setup(
        str(data / "smollm2"),
        8192,
        1e5,
        64,
        {"sources": [str(books / "train")], "validation_sources": [str(books / "validation")]},
        # 500K tokens, as of the embedded model.
        8,
        65_536,
        65_536,
        1e-4,
        {**suites, "samples": 24, "rows": 8, "text": str(books / "validation")},
    )


def trained(
    setup: Setup, methods: Sequence[str], length: int, seed: int, jobs: int, out: Path
) -> dict[str, Run]:
    """Train what is missing of the grid of a length and seed; the runs by method."""
    # Beside the comparison's folder, which must be its own.
    recipe = out.with_suffix(".yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(setup.recipe() | {"seed": seed}, sort_keys=False))
    vary = (f"stages={json.dumps([[setup.stage(method, length)] for method in methods])[1:-1]}",)
    runs = make_grid(str(recipe), vary, 1, (), out).runs
    settings = CompareSettings(what=(str(recipe),), vary=vary, seeds=1, jobs=jobs)
    result = compare(settings, RunContext(output=out, reporter=ConsoleReporter(Console(stderr=True))))
    if result.failures:
        raise SystemExit("\n".join(f"{each.log}: {each.reason}" for each in result.failures))
    return dict(zip(methods, runs, strict=True))


def evaluated(setup: Setup, model: str, lengths: Sequence[int], seed: int, out: Path) -> list[TaskResult]:
    """Scores of a model at these lengths, from the folder of a finished evaluation where there is one."""
    result = evaluate(
        model,
        RunContext(output=out, reporter=ConsoleReporter(Console(stderr=True))),
        **setup.evaluation,
        lengths=lengths,
        seed=seed,
        trained_length=setup.trained,
        beyond_config=True,
    )
    return [each for each in result.results if each.length in lengths]


def cost(run: Run) -> dict[str, float]:
    """What a run took: tokens, minutes of its training steps, and minutes of all else, which are mostly its search."""
    found = cost_of(run.folder)
    whole = json.loads((run.folder / "summary.json").read_text())["seconds"] / 60
    return {
        "tokens": found.tokens,
        "training_minutes": round(60 * found.hours, 2),
        "other_minutes": round(whole - 60 * found.hours, 2),
    }


def measured(
    setup: Setup, methods: Sequence[str], lengths: Sequence[int], seed: int, options: argparse.Namespace
) -> None:
    """Train and evaluate what has no file of scores yet, for one seed."""
    longest = max(lengths)
    served: dict[str, list[TaskResult]] = {}
    costs: dict[str, dict[str, float]] = {}
    # The longest first: its grid has the trainings that serve all lengths.
    for length in sorted(lengths, reverse=True):
        file = options.scores / f"{length}-seed{seed}.json"
        if file.is_file():
            continue
        grid = [each for each in methods if each != DROPE or length == longest]
        runs = trained(setup, grid, length, seed, options.jobs, options.runs / f"{length}-seed{seed}")
        costs |= {method: cost(run) for method, run in runs.items()}
        models = {method: str(run.folder / "model") for method, run in runs.items()} | {NONE: setup.model}
        results = {}
        for method in (*methods, NONE):
            at = [setup.trained, *(sorted(lengths) if method in (NONE, DROPE) else [length])]
            if method in models and method not in served:
                out = options.runs / "evaluations" / f"{method}-{length}-seed{seed}"
                found = evaluated(setup, models[method], at, seed, out)
                if method in (NONE, DROPE):
                    served[method] = found
            elif method not in served:
                raise SystemExit(
                    f"{method} is measured with the longest length, {longest}; delete {file.parent}"
                )
            found = served.get(method, found)
            results[method] = [each.to_json() for each in found if each.length in (setup.trained, length)]
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"machine": machine(), "seed": seed, "length": length, "cost": costs, "results": results}
        file.write_text(json.dumps(kept) + "\n")


def by_position(results: Sequence[TaskResult]) -> dict[str, float]:
    """Perplexity by position of the longest rows, by ``start to end``."""
    longest = max((each for each in results if each.positions), key=lambda each: each.length or 0)
    return {f"{each.start} to {each.end}": round(each.perplexity, 3) for each in longest.positions}


def at_length(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the methods at one length, whose scores are in a file for each seed."""
    scores = {
        method: {
            each["seed"]: [TaskResult.from_json(value) for value in each["results"][method]] for each in files
        }
        for method in files[0]["results"]
    }
    found = differences(scores)
    means = {name: means_over_seeds(cell) for name, cell in scores.items()}
    costs = {
        method: {key: round(fmean(each["cost"][method][key] for each in files), 2) for key in kept}
        for method, kept in files[0]["cost"].items()
    }
    return {
        "length": files[0]["length"],
        "seeds": [each["seed"] for each in files],
        "conclusion": conclusion(REFERENCE, found, {len(files)}),
        "scores": {
            name: {
                f"{each.task} {each.length}": [round(value, 2) for value in (each.score, *each.ci95)]
                for each in results
            }
            for name, results in means.items()
        },
        "differences": {
            name: {
                f"{each.task} {each.length}": {
                    "difference": each.difference,
                    "ci95": each.ci95,
                    "p_adjusted": each.p_adjusted,
                    "real": each.real,
                }
                for each in some
            }
            for name, some in found.items()
        },
        "perplexity_by_position": {name: by_position(results) for name, results in means.items()},
        "cost": costs,
    }


SHOWN = ("perplexity", "passkey", *NEEDLES)


def page(result: Mapping[str, Any]) -> str:
    """The tables of docs/comparisons.md: for each length what the comparison concludes, the scores, and their cost."""
    parts = []
    for table in result["lengths"].values():
        length, seeds = table["length"], len(table["seeds"])
        trained = min(int(name.split()[1]) for name in table["scores"][REFERENCE])
        columns = [f"perplexity {trained}", *(f"{task} {length}" for task in SHOWN)]
        lines = [
            f"**{length:,} tokens, {seeds} seed{'s' if seeds > 1 else ''}.** {table['conclusion']}",
            "",
            f"| method | {' | '.join(columns)} | minutes of training + rest |",
            f"| --- |{' --- |' * (len(columns) + 1)}",
        ]
        for method, scores in table["scores"].items():
            differences = table["differences"].get(method, {})
            cells = []
            for column in columns:
                star = " ★" if differences.get(column, {}).get("real") else ""
                cells.append(f"{scores[column][0]:.1f}{star}" if column in scores else "")
            spent = table["cost"].get(method)
            time = f"{spent['training_minutes']:.1f} + {spent['other_minutes']:.1f}" if spent else ""
            lines.append(f"| `{method}` | {' | '.join(cells)} | {time} |")
        parts.append("\n".join(lines))
    longest = max(result["lengths"].values(), key=lambda table: table["length"])
    doublings = {name: by_doubling(found) for name, found in longest["perplexity_by_position"].items()}
    bins = list(doublings[REFERENCE])
    lines = [
        f"**Perplexity by position in rows of {longest['length']:,} tokens.**",
        "",
        f"| method | {' | '.join(bins)} |",
        f"| --- |{' --- |' * len(bins)}",
        *(
            f"| `{method}` | {' | '.join(f'{found[name]:.1f}' for name in bins)} |"
            for method, found in doublings.items()
        ),
    ]
    return "\n\n".join([*parts, "\n".join(lines)])


def by_doubling(perplexities: Mapping[str, float]) -> dict[str, float]:
    """Perplexity of the first bin, the trained length, and of each doubling of it, given that of smaller bins.

    Losses are averaged, weighted by the tokens of a bin.
    """
    ends = {name: [int(each) for each in name.split(" to ")] for name in perplexities}
    trained = next(iter(ends.values()))[1]
    groups: dict[int, list[tuple[int, float]]] = {}
    for name, (start, end) in ends.items():
        doubling = trained if end <= trained else trained * 2 ** math.ceil(math.log2(end / trained))
        groups.setdefault(doubling, []).append((end - start, math.log(perplexities[name])))
    return {
        f"{0 if end == trained else end // 2:,} to {end:,}": math.exp(
            sum(width * loss for width, loss in own) / sum(width for width, _ in own)
        )
        for end, own in groups.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", choices=["embedded", "smollm2"])
    parser.add_argument("--runs", type=Path, required=True, help="folder of the grids and evaluations")
    parser.add_argument(
        "--scores", type=Path, help="folder of the scores; default: one in benchmarks/results"
    )
    parser.add_argument("--data", type=Path, help="smollm2: folder with the model and its books")
    parser.add_argument("--methods", nargs="+", choices=list(ROPES), default=list(ROPES))
    parser.add_argument(
        "--times", nargs="+", type=int, default=list(MULTIPLES), help="multiples of the trained length"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    small = {"methods": [REFERENCE, "cope"], "times": [2], "seeds": [0], "jobs": 1}
    options = parsed(parser, small, arguments)
    if options.methods[0] != REFERENCE:
        parser.error(f"the first of --methods is the reference, {REFERENCE}")
    setup = setup_of(options.model, options.data, options.runs)
    if options.small:
        setup = smaller(setup)
    if options.scores is None:
        options.scores = options.runs / "scores" if options.small else RESULTS / f"methods_{options.model}"
    lengths = [each * setup.trained for each in options.times]
    for seed in options.seeds:
        measured(setup, options.methods, lengths, seed, options)
    tables = {
        str(length): at_length(
            [json.loads((options.scores / f"{length}-seed{seed}.json").read_text()) for seed in options.seeds]
        )
        for length in lengths
    }
    stages = {method: setup.stage(method, max(lengths)) for method in options.methods}
    result = {"model": setup.model, "stages": stages, "lengths": tables}
    write(f"methods_{options.model}", result, options)
    print(page(result))


def smaller(setup: Setup) -> Setup:
    """A setup that takes seconds."""
    evaluation = {"suites": ("perplexity", "passkey"), "samples": 2, "rows": 2}
    return Setup(
        setup.model,
        setup.trained,
        setup.rope_theta,
        setup.rotary_dim,
        {key: value for key, value in setup.data.items() if key != "mixture"},
        2,
        2 * setup.trained,
        2 * setup.trained,
        setup.learning_rate,
        {**evaluation, "text": setup.evaluation["text"]},
    )


if __name__ == "__main__":
    main()
