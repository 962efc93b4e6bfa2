"""Our metrics give the scores that the published scorers gave for the same answers (see scorer_fixture.py)."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ropewalk.evaluation.tasks.registry import METRICS

RECORDED = json.loads((Path(__file__).parent / "scorers_upstream.json").read_text())
LIST = "Final Answer: [0a1b2c3d, 4e5f6071, 8293a4b5]"
HALF = "Final Answer: [ffffffff, 4e5f6071, 0a1b2c3d]"
WRONG = "Final Answer: [ffffffff]"

FAULTS: Mapping[str, Mapping[str, tuple[float | None, float]]] = {
    "f1": {
        # White space after the last line, which hides the list.
        f"{LIST} \n ": (0, 1),
        f"{HALF} \n ": (0, 2 / 3),
        # A second list, or one in a list, whose brackets become part of a node. Ours is the first list.
        f"{LIST} or {WRONG}": (2 / 3, 1),
        f"{HALF} or {WRONG}": (1 / 3, 2 / 3),
        LIST + LIST: (6 / 7, 1),
        HALF + HALF: (4 / 7, 2 / 3),
        f"Final Answer: [0a1b2c3d] {LIST}": (2 / 3, 1 / 2),
        "Final Answer: [0a1b2c3d, [4e5f6071, 8293a4b5]]": (1 / 3, 0),
        # Nodes in Markdown's marks of code.
        "Final Answer: [`0a1b2c3d`, `4e5f6071`]": (0, 0.8),
        # No nodes where there are none.
        "Final Answer: []": (0, 1),
        "Final Answer: [ ]": (0, 1),
    },
    # The end of a line ends an answer, and some chat models begin with one.
    "label": {"\n\nlabel: 7": (0, 1)},
    "helmet_substring": {"\n\nthe Eiffel Tower": (0, 1)},
    "helmet_ndcg": {"\n\n3 > 1 > 12 > 2": (0, 1), "\n\n1 > 3 > 2": (0, 0.81749)},
    # An error: the last word of an answer without words.
    "closeness": {" " * 30: (None, 0)},
}
"""Answers for which the published scorer is at fault, with its score and ours."""


def recorded(metric: str) -> Iterator[tuple[str, tuple[str, ...], Mapping[str, Any], float | None]]:
    for group in RECORDED["groups"]:
        if metric in group["metrics"]:
            place = group["metrics"].index(metric)
            for answer, scores in group["scores"].items():
                yield answer, tuple(group["references"]), group["details"], scores[place]


@pytest.mark.parametrize("metric", RECORDED["scorers"])
def test_scores_are_the_published_ones(metric: str) -> None:
    different = {}
    for answer, references, details, published in recorded(metric):
        found = METRICS[metric](answer, references, details)
        if published is None or found != pytest.approx(published):
            different[answer] = (published, found)
    assert different == {answer: pytest.approx(scores) for answer, scores in FAULTS.get(metric, {}).items()}


@pytest.mark.parametrize("metric", RECORDED["scorers"])
def test_answers_are_many_and_their_scores_differ(metric: str) -> None:
    found = list(recorded(metric))
    assert len(found) >= 40
    assert len({score for *_, score in found}) >= 2
    assert all(RECORDED["scorers"][metric].values())
