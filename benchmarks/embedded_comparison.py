"""Which pattern, rounding or base is better, on the embedded models: grids of `ropewalk compare` over three seeds.

    python -m benchmarks.embedded_comparison patterns --runs runs
    python -m benchmarks.embedded_comparison precision --runs runs
    python -m benchmarks.embedded_comparison bases --runs runs

Each grid is a folder that ``ropewalk compare`` made from the recipe ``retrieval``; run again, it goes on where it was.
The result file has, for each grid, the sentence, the scores with their intervals, and the differences between cells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.common import parsed, parser_of, write
from ropewalk.cli.progress import ConsoleReporter
from ropewalk.experiments.run import ExperimentResult, compare
from ropewalk.experiments.settings import CompareSettings
from ropewalk.parallel.context import RunContext

RECIPE = "retrieval"
SMALL = (
    "data.mixture=null",
    "data.sources=[embedded:validation]",
    "stages.0.steps=1",
    "stages.0.warmup_steps=0",
    "stages.0.rows_per_step=1",
    "stages.0.rows_per_batch=1",
    "evaluation.suites=[passkey]",
    "evaluation.tasks=[passkey]",
    "evaluation.lengths=[256]",
    "evaluation.samples=2",
)
"""What a small run changes in the recipe."""
PATTERNS = "stages.*.pattern=full,intra_document,anchor"
ROTARY_DIM, ROPE_THETA, TRAINED_LENGTH = 32, 10_000.0, 256
"""Of both embedded models."""
BASES: Mapping[int, Mapping[str, float]] = {
    1024: {
        "unchanged": ROPE_THETA,
        "ntk": 43_873,
        "infimum": 58_200,
        "lower-bound": 153_000,
        "critical-dimension": 313_145,
        "published": 5e6,
    },
    2048: {
        "unchanged": ROPE_THETA,
        "ntk": 91_895.9,
        "infimum": 204_400,
        "interval": 410_300,
        "lower-bound": 1_693_000,
        "published": 5e6,
        "critical-dimension": 1_752_340,
    },
}
"""Bases by rule and length in tokens. At 1,024 tokens the interval of 10 % begins at the infimum; at 2,048 the
critical dimension is 3.5 % above the safe base. arXiv:2411.13476 published 5e6, for 64K tokens."""


@dataclass(frozen=True)
class Comparison:
    """One grid.

    Attributes:
        vary, overrides: as for ``ropewalk compare``.
        reference: the folder of the cell that the others are compared with; None for the first.
    """

    vary: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    reference: str | None = None


def bases(model: str, length: int) -> Comparison:
    """Bases by rule for one model and length; the safe base is the reference."""
    by_rule = BASES[length]
    longer = (
        "stages.0.context=2048",
        "stages.0.rows_per_step=4",
        "stages.0.rows_per_batch=1",
        "evaluation.lengths=[256,1024,2048]",
    )
    # The prompts of RULER do not fit into 256 tokens with the tokenizer of `embedded`.
    no_ruler = ("model=embedded", "evaluation.suites=[perplexity,passkey]", "evaluation.tasks=[]")
    return Comparison(
        (f"stages.0.rope.rope_theta={','.join(f'{base:.7g}' for base in by_rule.values())}",),
        (*(longer if length == 2048 else ()), *(no_ruler if model == "embedded" else ())),
        f"rope_theta={by_rule['lower-bound']:.0f}",
    )


QUESTIONS: Mapping[str, Mapping[str, Comparison]] = {
    "patterns": {"patterns": Comparison((PATTERNS,))},
    # exact_rope false is the rotation as transformers computes it in bfloat16, which AnchorAttention was made for.
    "precision": {"precision": Comparison((PATTERNS, "exact_rope=true,false"), ("precision=bfloat16",))},
    "bases": {
        f"{model.partition(':')[2] or model}-{length}": bases(model, length)
        for model in ("embedded:retrieval", "embedded")
        for length in BASES
    },
}


def compared(comparison: Comparison, seeds: int, jobs: int, out: Path) -> ExperimentResult:
    """Run what is missing of a grid, and compare its cells with the reference."""
    settings = CompareSettings(
        what=(RECIPE,), vary=comparison.vary, overrides=comparison.overrides, seeds=seeds, jobs=jobs
    )
    result = compare(settings, RunContext(output=out, reporter=ConsoleReporter(Console(stderr=True))))
    if comparison.reference is None:
        return result
    folders = sorted((out / "cells").glob("*/seed-*/"))
    first = [folder for folder in folders if folder.parent.name == comparison.reference]
    others = [folder for folder in folders if folder not in first]
    return compare(CompareSettings(what=tuple(map(str, [*first, *others]))), RunContext())


def by_depth(folders: Sequence[Path]) -> dict[str, list[float]]:
    """Passkeys that a cell's runs found, in percent, by length and third of the text in which they stand."""
    scores: dict[tuple[int, int], list[float]] = {}
    for folder in folders:
        for line in (folder / "predictions-after.jsonl").read_text().splitlines():
            answer = json.loads(line)
            if answer["suite"] == "passkey":
                third = min(2, int(3 * answer["details"]["depth"]))
                scores.setdefault((answer["length"], third), []).append(100 * answer["score"])
    lengths = sorted({length for length, _ in scores})
    return {
        str(length): [
            round(fmean(scores[length, third]), 1) for third in range(3) if (length, third) in scores
        ]
        for length in lengths
    }


def table(result: ExperimentResult) -> dict[str, Any]:
    """What a result file keeps of a comparison."""
    values = result.to_json()
    return {
        "conclusion": values["conclusion"],
        "reference": values["reference"],
        "cells": [
            {
                "name": cell["name"],
                "seeds": cell["seeds"],
                "hours": cell["hours"],
                "passkeys_by_third_of_the_text": by_depth([Path(folder) for folder in cell["folders"]]),
                "scores": {
                    f"{each['task']} {each['length']}": [
                        round(value, 2) for value in (each["score"], *each["ci95"])
                    ]
                    for each in cell["results"]
                },
            }
            for cell in values["cells"]
        ],
        "differences": {
            name: {
                f"{each['task']} {each['length']}": {
                    "difference": each["difference"],
                    "ci95": each["ci95"],
                    "p_adjusted": each["p_adjusted"],
                    "real": each["real"],
                }
                for each in some
            }
            for name, some in values["differences"].items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("question", choices=list(QUESTIONS))
    parser.add_argument("--runs", type=Path, required=True, help="folder of the grids")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    options = parsed(parser, {"seeds": 1, "jobs": 1}, arguments)
    grids = {}
    for name, comparison in QUESTIONS[options.question].items():
        if options.small:
            comparison = replace(comparison, overrides=(*comparison.overrides, *SMALL))
        out = options.runs / name
        grids[name] = table(compared(comparison, options.seeds, options.jobs, out))
    write(f"embedded_{options.question}", {"recipe": RECIPE, "grids": grids}, options)


if __name__ == "__main__":
    main()
