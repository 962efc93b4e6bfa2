"""Keys, word lists and sentences that prompts are made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.evaluation.tasks.haystack_sources import Prose, sentence_ends, split_sentences
from tests.evaluation.ruler_cases import prose


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One two. Three four.", ["One two.", "Three four."]),
        ("Is it? Yes! So.", ["Is it?", "Yes!", "So."]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Mr. Rom met Dr. Ulo. They spoke.", ["Mr. Rom met Dr. Ulo.", "They spoke."]),
        ("I know J. Rom and I. He too.", ["I know J. Rom and I.", "He too."]),
        ("Fruit, e.g. Apples, is good. 1995 was too.", ["Fruit, e.g. Apples, is good.", "1995 was too."]),
        ("It cost 3.5 dollars. and then", ["It cost 3.5 dollars. and then"]),
        ("Wait... Now. (See below.) End", ["Wait...", "Now.", "(See below.)", "End"]),
        ("no end", ["no end"]),
    ],
)
def test_where_sentences_end(text, sentences):
    assert split_sentences(text) == sentences


@given(st.lists(st.sampled_from(["A.", "b", "C", "e.g.", '"D', 'x."', "?", ""]), max_size=12))
def test_sentences_joined_are_the_text_and_a_beginning_has_the_beginning(parts):
    ends = sentence_ends(parts)
    if parts:
        text = " ".join(parts)
        assert " ".join(split_sentences(text)) == text
        assert ends[-1] == len(parts)
    for count in range(len(parts)):
        expected = [end for end in ends if end < count] + [count] * (count > 0)
        assert sentence_ends(parts[:count]) == expected


def test_prose_is_repeated_from_its_beginning():
    once = prose(300).split(" ")
    text = Prose(once)
    for count in (700, *range(0, 601)):
        expected = (once * 3)[:count]
        assert text.words(count) == expected
        assert text.sentence_ends(count) == sentence_ends(expected)
