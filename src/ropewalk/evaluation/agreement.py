"""What a result says of its judge: the model and its prompt, unclear verdicts, and how often others agree with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ropewalk.evaluation.predictions import Prediction
from ropewalk.evaluation.samples import any_reference
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import (
    JUDGED_BY,
    VERDICTS,
    GeneratedSuite,
    Judge,
)

CONTAINED = "the right answer in the answer"
"""Name of the rule that the judge is compared with, as if it were a judge."""


def judge_of(suite: str) -> Judge | None:
    """What a judge of a suite's answers reads; None if no judge is needed."""
    found = BY_NAME.get(suite)
    return found.judge if isinstance(found, GeneratedSuite) else None


def judge_facts(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The judge of the answers of a task, as details of the result; empty if they are not all judged by one."""
    judge, names = judge_of(predictions[0].suite), {each.details.get(JUDGED_BY) for each in predictions}
    if judge is None or len(names) > 1 or None in names:
        return {}
    (name,) = names
    return {
        "judge": {
            "model": name,
            "prompt": judge.template,
            "unclear": sum(each.details[VERDICTS][name] is None for each in predictions),
            "agreement": dict(agreements(predictions, str(name))),
        }
    }


def agreements(judged: Sequence[Prediction], name: str) -> Iterator[tuple[str, dict[str, float]]]:
    """How often a judge agrees with each other judge, and with whether the answer contains the right one.

    Args:
        judged: answers with the verdicts of all judges.
        name: the judge.

    Yields:
        The other, and ``n``, ``equal`` (percent) and ``kappa``, Cohen's kappa: 1 for complete agreement, 0 for as much
        as by chance (Cohen 1960, doi:10.1177/001316446002000104).
    """
    own = [each.details[VERDICTS][name] for each in judged]
    for other in [each for each in judged[0].details[VERDICTS] if each != name]:
        pairs = [
            (verdict, each.details[VERDICTS][other])
            for verdict, each in zip(own, judged, strict=True)
            if other in each.details[VERDICTS]
        ]
        yield other, agreement(pairs)
    contained = [any_reference(each.answer, each.references) for each in judged]
    yield CONTAINED, agreement(list(zip(own, contained, strict=True)))


def agreement(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, float]:
    """Percent of equal grades of two judges, and Cohen's kappa; 1 if both always say the same one thing."""
    n = len(pairs)
    equal = sum(one == other for one, other in pairs) / n
    firsts, seconds = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    chance = sum(firsts[grade] * seconds[grade] for grade in firsts) / n**2
    return {"n": n, "equal": 100 * equal, "kappa": 1.0 if chance == 1 else (equal - chance) / (1 - chance)}
