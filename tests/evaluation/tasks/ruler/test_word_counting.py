"""Keys, word lists and sentences that prompts are made of."""

import random
from itertools import product
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks import words
from ropewalk.evaluation.tasks.haystack_sources import Prose, sentence_ends, split_sentences
from ropewalk.evaluation.tasks.ruler.niah import uuid4
from ropewalk.evaluation.tasks.words import KeyNames
from tests.evaluation.ruler_cases import prose

WORDS = st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


def all_names(adjectives, nouns):
    return sorted({f"{adjective}-{noun}" for adjective, noun in product(adjectives, nouns)})


@given(WORDS, WORDS)
def test_keys_are_the_distinct_ones_in_order_though_hyphens_run_together(adjectives, nouns):
    assert list(KeyNames(adjectives, nouns)) == all_names(adjectives, nouns)


def test_installed_adjectives_give_the_keys_that_upstream_sorts():
    adjectives, nouns = words.key_words()
    few = nouns[::400]
    names = KeyNames(adjectives, few)
    expected = all_names(adjectives, few)
    assert list(names) == expected
    assert (names[-1], names[1:3]) == (expected[-1], expected[1:3])
    assert [random.Random(n).choice(names) for n in range(50)] == [
        random.Random(n).choice(expected) for n in range(50)
    ]
    with pytest.raises(IndexError):
        names[len(names)]


def test_words_of_the_lists_are_distinct_and_sorted():
    lists = words.word_lists()
    listed = words.listed_words()
    assert list(listed) == sorted(set(lists.nouns) | set(lists.adjectives) | set(lists.verbs))
    assert "" not in listed


def test_made_up_words_are_distinct_new_and_the_same_however_many():
    many = words.made_up_words(20_000)
    assert len(set(many)) == 20_000
    assert not set(many) & set(words.listed_words())
    assert words.made_up_words(7) == many[:7]
    assert all(word.isalpha() and word.islower() for word in many)


def test_without_wonderwords_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(words.importlib.util, "find_spec", lambda name: None)
    words.word_lists.cache_clear()
    assert "pip install wonderwords" in words.words_unavailable()
    with pytest.raises(RopewalkError, match="pip install wonderwords"):
        words.word_lists()


@given(st.integers(0, 2**128 - 1))
def test_uuids_are_those_of_the_standard_library(number):
    assert uuid4(number) == str(UUID(int=number, version=4))


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
