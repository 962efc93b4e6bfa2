"""Made-up results of an evaluation, as figures, tables and pages of the tests show them."""

import math
from dataclasses import replace

from ropewalk.evaluation.comparison import ScoreDifference
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.statistics import NO_INTERVAL, wilson_interval

RULER_TASKS = (
    *(f"niah_single_{n}" for n in (1, 2, 3)),
    *(f"niah_multikey_{n}" for n in (1, 2, 3)),
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
NO_QUESTIONS = "SQuAD is not here; give --squad FILE or --squad hub"
NO_ESSAYS = "the essays are not installed; run run ropewalk eval fetch or give --essays FOLDER"


def percent_ends(right: float, n: int) -> tuple[float, float]:
    low, high = wilson_interval(right, n)
    return 100 * low, 100 * high


def scored(suite: str, task: str, length: int | None, right: float, n: int = 100, **details) -> TaskResult:
    return TaskResult(suite, task, length, n, 100 * right / n, percent_ends(right, n), details=details)


def ruler(lengths=LENGTHS, n: int = 100, fall: float = 0.12) -> list[TaskResult]:
    """Scores that fall with the length; qa_1 has no data, and essays are missing at the longest length."""
    results = []
    for place, length in enumerate(lengths):
        at_length = []
        for number, task in enumerate(RULER_TASKS):
            if task.startswith("qa"):
                at_length.append(TaskResult.not_run("ruler", task, length, NO_QUESTIONS))
            elif task == "niah_single_2" and length == max(lengths) and len(lengths) > 1:
                at_length.append(TaskResult.not_run("ruler", task, length, NO_ESSAYS))
            else:
                right = n * max(0.0, 1 - fall * place * (1 + number / 4) / 2)
                at_length.append(scored("ruler", task, length, right, n))
        ran = [each for each in at_length if each.status == "ok"]
        mean = sum(each.score for each in ran) / len(ran)
        missing = {each.task: each.reason for each in at_length if each.status != "ok"}
        overall = scored("ruler", "overall", length, mean / 100 * n * len(ran), n * len(ran))
        details = {"tasks": [each.task for each in ran], "left_out": missing}
        words = f"mean of {len(ran)} tasks without {', '.join(missing)}"
        results += [*at_length, replace(overall, details=details, reason=words)]
    return results


def retrieval(suite: str, task: str, rights: dict[int, int], n: int = 20) -> list[TaskResult]:
    return [scored(suite, task, length, right, n) for length, right in rights.items()]


def needle(lengths=LENGTHS, depths: int = 11, n: int = 5, task: str = "generated") -> list[TaskResult]:
    """Right at both ends, lost in the middle from the third length on."""
    results = []
    for place, length in enumerate(lengths):
        cells = []
        for number in range(depths):
            depth = number / (depths - 1) if depths > 1 else 0.5
            middle = 1 - abs(2 * depth - 1)
            right = round(n * max(0.0, 1 - middle * max(0, place - 1) / 2.5))
            low, high = percent_ends(right, n)
            cells.append({"depth": depth, "n": n, "score": 100 * right / n, "ci95": [low, high]})
        total = sum(cell["score"] * n / 100 for cell in cells)
        results.append(scored("needle", task, length, total, n * depths, depths=cells))
    return results


def documents(task: str, length: int = 4096, score: float = 8.123, published: float = 9.456) -> TaskResult:
    details = {
        "published": published,
        "published_ci95": [0.9 * published, 1.1 * published],
        "n_windows": 1234,
        "n_tokens": 99_000,
        **({"stride": 256} if task == "sliding" else {}),
    }
    ends = (0.95 * score, 1.05 * score)
    return TaskResult("perplexity", task, length, 7, score, ends, details=details, unit="perplexity")


def short(fall: float = 0.0, n: int = 1000) -> list[TaskResult]:
    tasks = (
        ("hellaswag", 0.79, "acc_norm", 10),
        ("mmlu", 0.63, "acc", 5),
        ("arc_challenge", 0.54, "acc_norm", 25),
    )
    return [
        *(
            scored("short", task, None, round(n * (share - fall)), n, metric=metric, num_fewshot=shots)
            for task, share, metric, shots in tasks
        ),
        TaskResult.not_run("short", "truthfulqa_mc2", None, "its data set could not be reached"),
    ]


def difference(
    task: str,
    value: float,
    half: float,
    suite: str = "ruler",
    length: int | None = 4096,
    unit="percent",
    n: int = 100,
    score_a: float = 80.0,
) -> ScoreDifference:
    p = 0.0004 if abs(value) > half else 0.3
    score_b = score_a + value if unit == "percent" else score_a * (1 + value / 100)
    ends = (value - half, value + half)
    return ScoreDifference(
        suite, task, length, unit, n, score_a, score_b, value, ends, p, 2 * p, 2 * p < 0.05
    )


def not_compared(task: str, reason: str, suite: str = "ruler", length: int | None = 4096) -> ScoreDifference:
    nan = math.nan
    return ScoreDifference(
        suite, task, length, "percent", 0, 80.0, nan, nan, NO_INTERVAL, nan, nan, False, reason
    )


DIFFERENCES = [
    difference("niah_single_1", 0.5, 2.0),
    difference("niah_multikey_2", -12.3, 4.0, length=131072),
    difference("cwe", 25.0, 8.0),
    not_compared("qa_1", f"not run in B: {NO_QUESTIONS}"),
    difference("overall", -2.0, 1.0, n=1300),
    difference("passkey", 40.0, 12.0, "passkey", 65536, n=20),
    difference("sliding", -3.4, 1.2, "perplexity", 8192, "perplexity", 7, 8.12),
    difference("hellaswag", -0.4, 1.1, "short", None, n=10042),
]
