"""Answers are judged as the benchmarks' own scripts judge them."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.evaluation.samples import (
    any_reference,
    clean_prediction,
    first_integer,
    last_integer,
    share_of_references,
)
from ropewalk.evaluation.tasks.registry import METRICS
from tests.evaluation.core_cases import WILD_TEXTS

# What RULER's clean-up, string_match_all and string_match_part (NVIDIA/RULER at c3f5e3b) gave for these answers.
PUBLISHED = [
    ("The words are Alpha, BETA.", ("alpha", "beta", "gamma"), 66.67, 100),
    ("1234567 and 765432", ("1234567", "7654321"), 50, 100),
    ("", ("x",), 0, 0),
    (" \x00\x1f ", ("x",), 0, 0),
    ("one\x07two", ("one two", "one\ntwo"), 50, 100),
    ("\x1bab\x1b", ("ab",), 100, 100),
    ("12345", ("1234", "2345", "12345", "345"), 100, 100),
    ("ΣΑΣ", ("σας",), 100, 100),
    ("Straße", ("STRASSE", "strasse"), 0, 0),
    ("İstanbul", ("i̇stanbul",), 100, 100),
    ("a\x85b\x7f", ("a\x85b\x7f", "a\nb"), 50, 100),
]


@pytest.mark.parametrize(("answer", "references", "every", "any_"), PUBLISHED)
def test_ruler_scores_are_those_of_its_own_scripts(
    answer: str, references: tuple[str, ...], every: float, any_: float
) -> None:
    # Their scripts round to two digits.
    assert round(100 * share_of_references(answer, references), 2) == every
    assert 100 * any_reference(answer, references) == any_


texts = st.text(st.sampled_from("aAbB1 \x00\x1f\n\x7f\x85ß"), max_size=20)


@given(texts)
def test_clean_answer_has_no_control_characters_at_its_ends_and_stays_clean(text: str) -> None:
    clean = clean_prediction(text)
    assert not any(ord(c) < 32 and c != "\n" for c in clean)
    assert clean == clean.strip() == clean_prediction(clean)
    # Letter by letter: nothing is lost but white space and control characters.
    kept = [c for c in text if ord(c) >= 32 and not c.isspace()]
    assert kept == [c for c in clean if not c.isspace()]


@given(texts, st.lists(st.text(st.sampled_from("aAbB1ß"), min_size=1, max_size=3), min_size=1, max_size=5))
def test_scores_are_counts_of_what_is_found_letter_by_letter(answer: str, references: list[str]) -> None:
    said = clean_prediction(answer).lower()

    def found(reference: str) -> bool:
        letters = reference.lower()
        return any(said[at : at + len(letters)] == letters for at in range(len(said) + 1))

    held = [found(reference) for reference in references]
    assert share_of_references(answer, references) == held.count(True) / len(held)
    assert any_reference(answer, references) == (1 if True in held else 0)


def test_order_of_references_and_noise_around_the_answer_do_not_matter() -> None:
    references = ("1234567", "abc-def")
    for answer in ("1234567, abc-def", "ABC-DEF\x00 and 1234567.", "\n\n<b>1234567</b>abc-def\x1b[0m"):
        assert share_of_references(answer, references) == share_of_references(answer, references[::-1]) == 1
        assert any_reference(answer, references[:1]) == 1


@pytest.mark.parametrize(
    ("answer", "first", "last"),
    [
        (" 123. 45", "123", "45"),
        ("The key is 00123, not 45", "123", "45"),
        ("x7y", "7", "7"),
        ("3.25", "3", "25"),
        ("-5", "5", "5"),
        ("1,234", "1", "234"),
        ("0 and 000", "0", "0"),
    ],
)
def test_integers_are_the_first_and_the_last_of_the_answer(answer: str, first: str, last: str) -> None:
    assert first_integer(answer, (first,)) == 1
    assert last_integer(answer, (last,)) == 1
    assert first_integer(answer, ("999",)) == last_integer(answer, ("999",)) == 0


@pytest.mark.parametrize("answer", ["", "none", "\x00", "one two", "٣", "²"])
def test_no_integer_is_no_right_answer(answer: str) -> None:
    for reference in ("0", "3", "2", "1"):
        assert first_integer(answer, (reference,)) == last_integer(answer, (reference,)) == 0


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 3), st.integers(0, 10**9))
def test_integers_are_compared_as_numbers(first: int, last: int, zeros: int, meant: int) -> None:
    answer = f"a {'0' * zeros}{first} b {'0' * zeros}{last} c"
    assert first_integer(answer, (str(meant),)) == (first == meant)
    assert last_integer(answer, (str(meant),)) == (last == meant)
    assert first_integer(answer, (str(first),)) == last_integer(answer, (str(last),)) == 1


def test_a_prefix_or_a_longer_number_is_another_number() -> None:
    assert first_integer("1234567890", ("123456789",)) == 0
    assert last_integer("123456789", ("1234567890",)) == 0


def test_thousands_of_digits_are_an_answer_like_any_other() -> None:
    """Python refuses to make a number of more than 4300 digits."""
    long = "7" * 5000
    assert first_integer(long, ("7",)) == last_integer(long, ("7",)) == 0
    assert first_integer(f"00{long}", (long,)) == 1


COUNTDOWN = {"nums": [3, 4, 5], "target": 17}
DESCRIBED = {
    "language": "python",
    "functions": [["31", "def f():\n    return 31"], ["7", "def g():\n    pass"]],
}
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "repoqa": DESCRIBED,
    "repoqa_most_like": DESCRIBED,
    "longproc_search": COUNTDOWN,
    "longproc_solved": COUNTDOWN,
    "helmet_ndcg": {"relevance": {"7": 1}},
    "longbench_pro": {"kind": "ndcg"},
    "longbench_pro_order": {"kind": "order"},
}
"""Details without which a metric has no meaning."""


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("answer", [*WILD_TEXTS, "0" * 1_000_000, "no\x00 " * 100_000])
def test_every_metric_takes_any_answer(name: str, answer: str) -> None:
    # A list of values is one reference.
    references = ("[31, 7]",) if name == "infinitebench_values" else ("31", "7")
    assert 0 <= METRICS[name](answer, references, NEEDED.get(name, {})) <= 1
