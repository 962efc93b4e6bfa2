"""Writes infinitebench_upstream.json: scores that the authors' scorer gives for the public outputs of models.

    python -m tests.evaluation.tasks.published.infinitebench_fixture CHECKOUT

CHECKOUT is one of OpenBMB/InfiniteBench. Only the functions of its scorer run; none of it is part of ropewalk. All
outputs are scored by ropewalk too, and must have the same scores; some short ones are kept with theirs.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rouge_score.rouge_scorer import RougeScorer

from ropewalk.evaluation.samples import Metric
from ropewalk.evaluation.tasks.published.infinitebench import FORMS, NAME, references
from ropewalk.evaluation.tasks.registry import METRICS
from tests.evaluation.tasks.scorer_fixture import published

FIXTURE = Path(__file__).parent / "infinitebench_upstream.json"
VERSION = "88b3daa6989da2fbe0077170d7a3c84c25d5ae58"
MODELS = ("gpt4", "kimi", "claude2", "yarn-mistral", "yi-6b-200k", "yi-34b-200k", "chatglm3")
LONGEST = 150  # characters
EACH = 12
"""Outputs that are kept of those that are right, and of those that are not, for each task."""
VALUES = 20
"""Values of Math.Calc that are kept of a right answer."""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The values of a file; some of the published ones have two in a line, or a broken one."""
    decoder = json.JSONDecoder()
    for line in path.read_text().split("\n"):
        rest = line.strip()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except ValueError:
                break
            yield value
            rest = rest[end:].strip()


def outputs(path: Path) -> Iterator[tuple[str, Any]]:
    """The answers in a file of results, with the right ones."""
    for row in rows(path):
        label = row["ground_truth"] if "ground_truth" in row else row["label"]
        answer = row["prediction"] if "prediction" in row else row["pred"]
        yield answer, label


def main() -> None:
    checkout = Path(sys.argv[1])
    scorer = published(checkout / "src/compute_scores.py", "")
    # What evaluate.load("rouge") would fetch from the Hub wraps this scorer.
    rouge = RougeScorer(["rougeLsum"], use_stemmer=False)
    scorer.get_score_one_longbook_sum_eng.__globals__["ROUGE_SCORER"] = SimpleNamespace(
        compute=lambda predictions, references, use_aggregator: {
            "rougeLsum": [
                max(rouge.score(each, predictions[0])["rougeLsum"].fmeasure for each in references[0])
            ]
        }
    )
    means: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for task, form in FORMS.items():
        ours = METRICS[f"{NAME}_{form.metric}"]
        found: dict[bool, dict[str, Any]] = {True: {}, False: {}}

        def scored(answer: str, label: Any, task: str = task, ours: Metric = ours) -> tuple[float, Any]:
            # Named after no model, because GPT-4's first value in Math.Calc belongs to its prompt.
            score = float(getattr(scorer, f"get_score_one_{task}")(answer, label, ""))
            right = references({"answer": label}, task)
            assert abs(ours(answer, right, {}) - score) < 1e-12, (task, answer)
            return score, right

        for model in MODELS:
            file = checkout / "results" / model / f"preds_{task}.jsonl"
            # One file of yarn-mistral is not in the repository.
            if not file.exists() or not file.stat().st_size:
                continue
            scores = []
            for answer, label in outputs(file):
                score, right = scored(answer, label)
                scores.append(score)
                if task == "math_calc":
                    answer, label = answer[:LONGEST], (label[0] if isinstance(label[0], list) else label)
                    score, right = scored(answer, label[:VALUES])
                if len(answer) <= LONGEST:
                    found[score > 0][answer] = [answer, right, score]
            means.setdefault(model, {})[task] = [len(scores), round(100 * sum(scores) / len(scores), 2)]
        some = [list(each.values()) for each in found.values()]
        kept[task] = [case for each in some for case in each[:: max(1, len(each) // EACH)][:EACH]]
    origin = {"source": "OpenBMB/InfiniteBench", "version": VERSION, "license": "MIT"}
    FIXTURE.write_text(
        json.dumps({**origin, "means": means, "outputs": kept}, indent=0, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
