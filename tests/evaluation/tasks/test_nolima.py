"""NoLiMa: no word leads from a question to its answer, and a reader with knowledge of the world finds every answer."""

import re
import unicodedata
from pathlib import Path

import pytest
from nltk.stem import PorterStemmer

from benchmarks.task_checkers import check
from benchmarks.task_checkers import nolima_name as solved
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.nolima import (
    DEPTHS,
    FACTS,
    OTHERS,
    PEOPLE,
    STOP_WORDS,
    dealt,
    haystack,
    name_alone,
    name_contained,
    stems,
)
from tests.evaluation.tasks.task_cases import samples_of, scores_of

LENGTH = 4096
STEM = PorterStemmer().stem


def word_stems(text: str) -> set[str]:
    """Porter's stems, of words with and without their accents."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    words = set(re.findall(r"[^\W\d_]{2,}", f"{text} {plain}".lower()))
    return {STEM(word) for word in words - STOP_WORDS}


QUESTIONS = [(needle, question) for needle, *questions in FACTS for question in questions]


def test_no_question_shares_a_word_with_any_fact() -> None:
    assert len(FACTS) == len({needle for needle, *_ in FACTS}) == 34
    assert len({question for _, question in QUESTIONS}) == 68
    told = set().union(*(word_stems(needle) | stems(needle) for needle, *_ in FACTS))
    for _, question in QUESTIONS:
        assert len(word_stems(question)) >= 1
        assert not told & (word_stems(question) | stems(question)), question


def test_no_question_shares_a_word_with_the_haystack() -> None:
    read = word_stems(" ".join(haystack("embedded", None).words(150_000)))
    assert len(read) > 3000
    for _, question in QUESTIONS:
        assert not read & word_stems(question), question
    assert not read & {STEM(name.lower()) for name in PEOPLE}


def test_no_name_is_part_of_a_name_a_fact_or_a_question() -> None:
    assert len(set(PEOPLE)) == len(PEOPLE) > OTHERS
    for name in PEOPLE:
        assert sum(name in other for other in PEOPLE) == 1
        assert not any(name in text for pair in QUESTIONS for text in pair)


def test_a_reader_with_knowledge_finds_the_answer() -> None:
    samples = samples_of("nolima", "nolima", LENGTH, 60)
    for sample in samples:
        check(sample)
        hops = sample.details["difficulty"]
        assert sum(f"Question: {fact[hops]}\n" in sample.text for fact in FACTS) == 1
        (span,) = sample.details["spans"]
        assert sum(f"{name} " in sample.text for name in PEOPLE) == 1 + OTHERS
        # The body alone: other facts shift a needle by less than 400 characters.
        assert abs(span[0] / len(sample.text) - sample.details["depth"]) < 0.15
    assert {sample.details["difficulty"] for sample in samples} == {1, 2}
    assert len({sample.details["depth"] for sample in samples}) == len(DEPTHS)


def test_the_shortest_prompts_have_all_people() -> None:
    for sample in samples_of("nolima", "nolima", 1024, 10):
        assert solved(sample.text) == sample.references[0]
        assert sum(f"{name} " in sample.text for name in PEOPLE) == 1 + OTHERS


def test_cards_are_dealt_evenly() -> None:
    hands = [dealt("abc", "0", 8, index) for index in range(30)]
    assert {hands.count(card) for card in "abc"} == {10}
    assert all(set(hands[start : start + 3]) == set("abc") for start in range(0, 30, 3))
    assert hands != [dealt("abc", "1", 8, index) for index in range(30)]


def test_models_score_what_they_know() -> None:
    def half(prompt: str) -> str:
        name = solved(prompt)
        return name if PEOPLE.index(name) % 2 else "I do not know."

    def everyone(prompt: str) -> str:
        return ", ".join(name for name in PEOPLE if f"{name} " in prompt)

    def score(say) -> tuple[float, float]:  # type: ignore[no-untyped-def]
        found = scores_of("nolima", "nolima", 2048, 12, say)
        return found["nolima"], found["nolima.alone"]

    odd = [PEOPLE.index(s.references[0]) % 2 for s in samples_of("nolima", "nolima", 2048, 12)]
    assert score(solved) == (100, 100)
    assert score(half) == (pytest.approx(100 * sum(odd) / 12),) * 2
    assert score(lambda prompt: "") == (0, 0)
    # Naming everyone is enough for the published score.
    assert score(everyone) == (100, 0)


@pytest.mark.parametrize(
    ("said", "contained", "alone"),
    [
        ("Alma", 1, 1),
        ("The answer is Alma.", 1, 1),
        ("alma", 0, 0),
        ("ALMA", 0, 0),
        ("Hugo", 0, 0),
        ("Alma, not Hugo", 1, 0),
        ("Alma, not Petra", 1, 1),
        ("", 0, 0),
    ],
)
def test_scores(said: str, contained: float, alone: float) -> None:
    details = {"others": ["Hugo", "Irene"]}
    assert name_contained(said, ("Alma",), details) == contained
    assert name_alone(said, ("Alma",), details) == alone


def test_essays_without_a_sentence_to_keep_are_refused(tmp_path: Path) -> None:
    essays = tmp_path / "essays.txt"
    essays.write_text("All roads lead to Rome.")
    with pytest.raises(RopewalkError, match="each sentence of the essays has a word of NoLiMa's questions"):
        haystack("essay", essays)
