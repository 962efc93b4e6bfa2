"""HELMET's scores: what counts of an answer, and the discount of a ranking."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from ropewalk.evaluation.tasks.published.helmet_scores import ndcg_at_10, substring_match


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("It's the Red-House!", 1),
        (" red house\nblue", 1),
        ("blue\nred house", 0),
        ("Answer: Red House", 1),
        ("red", 0),
    ],
)
def test_the_first_line_has_a_right_answer(answer: str, score: float) -> None:
    assert substring_match(answer, ["a RedHouse", "Red House"]) == score


def test_the_second_place_counts_less_than_the_first() -> None:
    relevance = {"relevance": {"5": 1}}
    assert ndcg_at_10("5 > 4", (), relevance) == 1
    assert ndcg_at_10("ID4 > ID5", (), relevance) == round(1 / math.log2(3), 5)
    assert ndcg_at_10(" > ".join(map(str, range(10, 20))) + " > 5", (), relevance) == 0


@given(st.permutations(range(14)), st.lists(st.integers(0, 3), min_size=14, max_size=14).filter(any))
def test_ndcg_is_that_of_another_library(order: list[int], labels: list[int]) -> None:
    scores = [[-order.index(number) for number in range(14)]]
    relevance = {str(number): each for number, each in enumerate(labels) if each}
    found = ndcg_at_10(" > ".join(map(str, order)), (), {"relevance": relevance})
    assert found == pytest.approx(ndcg_score([labels], scores, k=10), abs=1e-5)
