"""Validation documents are chosen by their text alone, and no copy of one is ever trained on."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.read.documents import text_hash
from ropewalk.data.settings import ValidationSettings
from ropewalk.data.tokens.split import split_documents
from tests.data.cases import refusal

# Few letters and short texts, so that copies are common.
corpora = st.lists(st.text("abc", min_size=1, max_size=3), max_size=40)
choices = st.one_of(
    st.builds(ValidationSettings, documents=st.integers(0, 45)),
    st.builds(ValidationSettings, fraction=st.floats(0, 0.999)),
)


def split(texts: list[str], settings: ValidationSettings) -> tuple[list[str], list[str], int]:
    hashes = np.array([text_hash(text) for text in texts], np.uint64)
    found = split_documents(hashes, settings)
    training, validation = ([texts[n] for n in side] for side in (found.training, found.validation))
    return training, validation, found.withheld_duplicates


@given(corpora, choices)
def test_no_text_lies_on_both_sides_and_none_is_lost(texts: list[str], settings: ValidationSettings) -> None:
    training, validation, withheld = split(texts, settings)
    assert not set(training) & set(validation)
    assert len(set(validation)) == len(validation)
    assert sorted(training) == sorted(text for text in texts if text not in validation)
    assert withheld == sum(texts.count(text) - 1 for text in validation)


@given(corpora, corpora, choices, choices)
def test_withheld_texts_are_on_neither_side(
    texts: list[str], others: list[str], settings: ValidationSettings, own: ValidationSettings
) -> None:
    held_out = split(others, settings)[1]
    hashes = np.array([text_hash(text) for text in texts], np.uint64)
    found = split_documents(hashes, own, [text_hash(text) for text in held_out])
    training, validation = ({texts[n] for n in side} for side in (found.training, found.validation))
    assert not (training | validation) & set(held_out)
    alone = split(texts, own)
    assert training == set(alone[0]) - set(held_out)
    assert validation == set(alone[1]) - set(held_out)
    assert len(found.training) + len(found.validation) + found.withheld_duplicates == len(texts)


@given(corpora, choices, st.randoms())
def test_the_choice_does_not_depend_on_the_order(
    texts: list[str],
    settings: ValidationSettings,
    random: Random,
) -> None:
    shuffled = random.sample(texts, len(texts))
    assert set(split(texts, settings)[1]) == set(split(shuffled, settings)[1])


@given(corpora, st.integers(1, 45))
def test_by_number_the_smallest_hashes_are_held_out(texts: list[str], number: int) -> None:
    expected = sorted(set(texts), key=text_hash)[:number]
    assert split(texts, ValidationSettings(documents=number))[1] == expected


def test_by_fraction_about_that_share_is_held_out() -> None:
    texts = [f"document {n}" for n in range(4000)]
    _, validation, _ = split(texts, ValidationSettings(fraction=0.05))
    # Five standard deviations of a binomial of 4000 draws.
    assert abs(len(validation) - 200) < 70
    more = split([*texts, *(f"other {n}" for n in range(100))], ValidationSettings(fraction=0.05))[1]
    assert set(validation) <= set(more)


def test_nothing_held_out_keeps_the_order() -> None:
    assert split(["b", "a", "b"], ValidationSettings())[0] == ["b", "a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": -1}, "documents must be 0 or more, got -1"),
        ({"fraction": 1.0}, "fraction must be less than 1"),
        ({"fraction": -0.1}, "fraction must be 0 or more, got -0.1"),
        ({"documents": 1, "fraction": 0.5}, "or a fraction, not both (got 1 and 0.5)"),
    ],
)
def test_impossible_settings_are_refused(options: dict, message: str) -> None:
    assert message in refusal(ValidationSettings, **options)
