"""LongBench v2's prompt, score and groups."""

from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.published.longbench_v2 import right_choice
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, task_of, write_rows


def row(number: int, words: int = 20) -> dict[str, Any]:
    return {
        "_id": f"id{number}",
        "domain": "Code",
        "sub_domain": "Repo",
        "difficulty": "easy" if number % 2 else "hard",
        "length": "short",
        "question": " Which one? ",
        **{f"choice_{letter}": f"choice {letter} {{0}}" for letter in "ABCD"},
        "answer": "ABCD"[number % 4],
        "context": "  " + "word " * words,
    }


def test_the_prompt_is_the_published_one(tmp_path: Path) -> None:
    (sample,) = samples_of("longbench_v2", write_rows(tmp_path / "data.jsonl", [row(0, 3)]), 512)
    assert sample.text == (
        "Please read the following text and answer the question below.\n\n<text>\nword word word\n</text>\n\n"
        "What is the correct answer to this question: Which one?\nChoices:\n(A) choice A {0}\n(B) choice B {0}\n"
        '(C) choice C {0}\n(D) choice D {0}\n\nFormat your response as follows: "The correct answer is (insert '
        'answer here)".'
    )
    assert (sample.references, sample.max_new_tokens) == (("A",), 128)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        # As extract_answer of pred.py reads them.
        ("The correct answer is (B)", 1),
        ("**The correct answer is** (B).", 1),
        ("I think: The correct answer is B, because A is wrong", 1),
        ("The correct answer is A. No: The correct answer is (B)", 1),
        ("The correct answer is (A). The correct answer is (B)", 0),
        ("the correct answer is (B)", 0),
        ("B", 0),
        ("", 0),
    ],
)
def test_scores_are_those_of_the_authors(answer: str, score: float) -> None:
    assert right_choice(answer, ["B"]) == score


def test_scores_by_group_and_what_was_cut(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [row(0, 800), row(1), row(2), row(3), row(4)])
    found = results_of("longbench_v2", path, 1000, lambda text: "The correct answer is (A)")["longbench_v2"]
    assert (found.n, found.score) == (5, 40)
    assert found.reason is not None
    assert found.reason.startswith("1 of 5 prompts were too long, and part of their text was left out (")
    groups = {
        name: {each["label"]: (each["n"], each["score"]) for each in found.details["groups"][name]}
        for name in ("difficulty", "length", "domain")
    }
    assert groups["difficulty"] == {"easy": (2, 0), "hard": (3, pytest.approx(200 / 3))}
    assert groups["length"] == {"short": (5, 40)}


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", [{**row(0), "answer": "E"}])
    with pytest.raises(RopewalkError, match="its answer is 'E'"):
        list(task_of("longbench_v2", path).questions())
