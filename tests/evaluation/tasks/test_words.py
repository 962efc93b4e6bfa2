"""Words of lists and made-up ones are distinct, sorted and the same everywhere."""

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks import words
from ropewalk.evaluation.tasks.words import KeyNames

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
    assert names[-1] == expected[-1]
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
