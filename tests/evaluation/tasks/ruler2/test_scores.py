"""RULERv2's scores: what is near, the last paragraph, the best reference, and a letter in a box."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk import edit_distance

from ropewalk.evaluation.tasks.ruler2.scores import (
    best_reference,
    boxed_letter,
    found_or_near,
    last_paragraph,
    word_error_rate,
)


@pytest.mark.parametrize(
    ("said", "right", "score"),
    [
        (" 12 and 34.", ("12", "34"), 1),
        ("12", ("12", "34"), 0.5),
        ("", ("12",), 0),
        ("34 is it? </think> Answer: 12", ("34",), 0),
        ("I say 12.</think>34", ("12", "34"), 0.5),
        ("12 Answer: 34 Answer: 56", ("12", "34", "56", "78"), 0.25),
        ("Answer: 12\nThen </think> 34", ("12", "34"), 0.5),
        ("the Red house", ("red house",), 1),
        ("red horse", ("Red House",), 0.5),
        ("red old barn", ("red house by sea",), 0.25),
        ("one two three four five", ("red house",), 0),
    ],
)
def test_scores(said: str, right: tuple[str, ...], score: float) -> None:
    assert found_or_near(said, right) == pytest.approx(score)


WORDS = st.lists(st.sampled_from("abc"), max_size=7)


@given(WORDS, WORDS.filter(bool))
def test_the_word_error_rate_is_the_edit_distance_of_another_library(
    said: list[str], right: list[str]
) -> None:
    expected = edit_distance(said, right) / len(right)
    assert word_error_rate(" ".join(said), " ".join(right)) == pytest.approx(expected)


def test_only_the_last_paragraph_counts_of_an_answer_in_two_steps() -> None:
    said = "Question 1: a house\n\nQuestion 1: a tower\n\nThe second one is: a tower"
    assert last_paragraph(said, ["a tower"]) == 1
    assert last_paragraph(said, ["a house"]) < 1
    assert found_or_near(said, ["a house"]) == 1


def test_documents_that_an_answer_copies_are_no_answer() -> None:
    copied = "Document 1234567:\nParis\nParis is a city.\n\nIt is in France."
    assert best_reference(copied, ["Paris"]) == 0
    assert best_reference(copied, ["Paris", "France"]) == 1
    assert best_reference("It is Paris", ["Paris"]) == 1


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (r"So \boxed{B}", 1),
        (r"\boxed{A} or \boxed{B}", 1),
        (r"\boxed{B} or \boxed{A}", 0),
        (r"\boxed{\text{B. a house}}", 1),
        (r"\boxed{B", 0),
        (r"\boxed {B}", 0),
        (r"\boxed{}", 0),
        (r"\boxed{b}", 0),
        ("**Answer:** B", 1),
        ("answer: b", 0),
        (r"Answer: B \boxed{A}", 0),
        ("B", 0),
        ("", 0),
    ],
)
def test_the_letter_is_that_of_the_last_box(said: str, score: float) -> None:
    assert boxed_letter(said, ["B"]) == score
