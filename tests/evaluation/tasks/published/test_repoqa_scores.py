"""RepoQA's score is the authors' for answers of all kinds (see repoqa_fixture.py)."""

import json
from pathlib import Path

import pytest

from ropewalk.evaluation.tasks.published.repoqa import LANGUAGES, needles_of
from ropewalk.evaluation.tasks.published.repoqa_scores import (
    LEAST_SIMILARITY,
    first_function,
    most_alike,
    most_like,
    repoqa,
)
from tests.evaluation.tasks.published.repoqa_cases import data

RECORDED = json.loads((Path(__file__).parent / "repoqa_upstream.json").read_text())["scores"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_function_that_an_answer_is_most_like_is_the_authors(language: str) -> None:
    needles = list(needles_of(data(), language))
    recorded = [row for row in RECORDED if row[0] == language]
    assert len(recorded) == 40
    for _, number, answer, target, similarity, best in recorded:
        needle = needles[6 * number]
        assert most_alike(answer, needle.details) == (target, pytest.approx(similarity, abs=1e-12)), answer
        right = (needle.name,)
        assert most_like(answer, right, needle.details) == best
        assert repoqa(answer, right, needle.details) == (best and similarity >= LEAST_SIMILARITY)
    scores = [(best, similarity >= LEAST_SIMILARITY) for *_, similarity, best in recorded]
    assert set(scores) == {(True, True), (True, False), (False, True), (False, False)}


def test_the_first_function_of_all_blocks_counts() -> None:
    assert (
        first_function("```\nx = 1\n```\n```python\ny = 2\ndef f():\n    pass\n```", "python")
        == "def f():\n    pass"
    )
    assert first_function("```\nx = 1\n```\n```python\ny = 2\n```", "python") == "x = 1\n"
    # Members and functions that return pointers are none, as published.
    assert first_function("```\nint C::f() {}\nint *g() {}\nint h() {}\n```", "cpp") == "int h() {}"
    assert first_function("```\nclass A { int f() { return 1; } }\n```", "java") == "int f() { return 1; }"


def test_hostile_answers_end_in_a_score() -> None:
    details = next(needles_of(data(), "python")).details
    for answer in ("```\n" + "(" * 100_000 + "\n```", "```\n\ud800\n```", "\ud800", "```" * 10_000, "\0"):
        assert repoqa(answer, ("f",), details) == 0
