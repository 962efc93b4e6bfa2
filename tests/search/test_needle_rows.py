"""Needle rows: exact lengths, answers alone scored, and every number further back than the model was trained for."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.attention.layout import IGNORED
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path, embedded_documents
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks import words as word_lists
from ropewalk.search.data import rows_digest
from ropewalk.search.needle_rows import Needles, _Text, needle_rows

DOCUMENTS = [document.text for _, document in zip(range(12), embedded_documents("validation"), strict=False)]
PROSE = ["Anna saw a cat. It was red. " * 40, "Ben had a dog. The dog ran. He ran too. " * 30]
NUMBER = re.compile(r"special magic numbers for (\S+) is: (\d+)\.")
ANSWER = re.compile(r"special magic number for (\S+) mentioned in the provided text is (\d+)")


@pytest.fixture(scope="module")
def demo():
    return load_tokenizer(str(demo_model_path()))


def answers_of(tokenizer, row):
    """Scored tokens as text, a run of neighbours each, with the index of its first token in the row."""
    at = (row.labels != IGNORED).nonzero().flatten().tolist()
    runs = []
    for index in at:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [(tokenizer.decode(row.labels[run]).strip(), run[0] + 1) for run in runs]


def first_token_behind(tokenizer, ids, text):
    """Tokens that it takes until a text has been read, found by decoding and nothing else."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if text in tokenizer.decode(ids[:middle]) else (middle + 1, high)
    return low


def check(tokenizer, rows, length, beyond, needles):
    """Everything that is promised of rows; gives the index of the token behind each number, ascending in a row."""
    bos = tokenizer.bos_token_id
    places = []
    for row in rows:
        ids = row.input_ids.tolist()
        assert len(ids) == len(row.labels) == row.layout.total_length == length
        assert ids.count(bos) == 1
        assert ids[0] == bos
        assert row.layout.pattern == "full"
        scored = row.labels != IGNORED
        assert torch.equal(row.labels[scored], row.input_ids[1:][scored[:-1]])
        text = tokenizer.decode(row.input_ids, skip_special_tokens=True)
        hidden = NUMBER.findall(text)
        asked = ANSWER.findall(text)
        assert len(hidden) == len(asked) == needles == len(dict(hidden))
        assert dict(hidden) == dict(asked)
        found = answers_of(tokenizer, row)
        assert [answer for answer, _ in found] == [value for _, value in asked]
        assert text.endswith(asked[-1][1])
        start_of = dict(found)
        of_row = []
        for key, value in hidden:
            behind = first_token_behind(tokenizer, row.input_ids, f"{key} is: {value}")
            # The position that says the answer's first token is the one before it.
            assert start_of[value] - 1 - (behind - 1) >= beyond
            of_row.append(behind)
        places.append(of_row)
    return places


@pytest.mark.parametrize("documents", [DOCUMENTS, PROSE], ids=["source", "prose"])
@pytest.mark.parametrize(("length", "beyond", "needles"), [(1024, 256, 4), (513, 256, 1), (777, 300, 2)])
def test_rows_of_the_demo_model(demo, documents, length, beyond, needles):
    rows = needle_rows(demo, documents, length, 3, 0, Needles(beyond, needles))
    places = check(demo, rows, length, beyond, needles)
    assert all(row == sorted(row) for row in places)
    # Each digit is a token of this tokenizer, and so is the space before them, which tells nothing.
    assert all(int((row.labels != IGNORED).sum()) == 7 * needles for row in rows)


def test_rows_of_a_sentencepiece_tokenizer(stories260k):
    tokenizer = load_tokenizer(str(stories260k))
    rows = needle_rows(tokenizer, PROSE, 2048, 4, 1, Needles(512))
    check(tokenizer, rows, 2048, 512, 4)


@settings(max_examples=25)
@given(st.integers(420, 900), st.integers(0, 200), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_any_length_that_is_not_refused_keeps_all_promises(length, beyond, count, needles, seed):
    tokenizer = load_tokenizer(str(demo_model_path()))
    try:
        rows = needle_rows(tokenizer, PROSE, length, count, seed, Needles(beyond, needles))
    except RopewalkError as error:
        shortest = int(re.search(r"shortest length with this tokenizer is (\d+)", str(error))[1])
        assert shortest > length
        rows = needle_rows(tokenizer, PROSE, shortest, count, seed, Needles(beyond, needles))
        with pytest.raises(RopewalkError, match="do not fit"):
            needle_rows(tokenizer, PROSE, shortest - 1, count, seed, Needles(beyond, needles))
        length = shortest
    check(tokenizer, rows, length, beyond, needles)


@pytest.mark.parametrize("needles", [1, 2])
def test_depths_are_spread_evenly_from_the_beginning_to_as_near_as_is_allowed(demo, needles):
    length, beyond, count = 2048, 512, 6
    rows = needle_rows(demo, PROSE, length, count, 0, Needles(beyond, needles))
    places = sorted(place for row in check(demo, rows, length, beyond, needles) for place in row)
    steps = [b - a for a, b in pairwise(places)]
    even = (places[-1] - places[0]) / (len(places) - 1)
    # A needle has some 30 tokens, which those behind it in a row stand later; a sentence has less than ten.
    assert all(abs(step - even) < 45 for step in steps)
    # The first stands behind some 30 tokens of instruction and its own 30; the last one reaches 512 tokens before its
    # answer, but for a sentence and for the order of the answers, each of which has some 30 tokens.
    assert places[0] < 80
    assert places[-1] > length - beyond - 60 - 45 * needles - 45


def test_needles_stand_behind_sentences_where_there_are_any(demo):
    rows = needle_rows(demo, PROSE, 1500, 4, 0, Needles(256, 2))
    for row in rows:
        text = demo.decode(row.input_ids, skip_special_tokens=True)
        for found in re.finditer(r"One of the special", text):
            assert text[: found.start()].rstrip()[-1] in ".", text[found.start() - 40 : found.start()]


def test_the_same_arguments_give_the_same_rows_and_others_others(demo):
    digests = [
        rows_digest(needle_rows(demo, *arguments))
        for arguments in (
            (DOCUMENTS, 800, 2, 0, Needles(256)),
            (DOCUMENTS, 800, 2, 0, Needles(256)),
            (DOCUMENTS, 800, 2, 1, Needles(256)),
            (PROSE, 800, 2, 0, Needles(256)),
            (DOCUMENTS, 801, 2, 0, Needles(256)),
            (DOCUMENTS, 800, 2, 0, Needles(256, 2)),
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_the_digest_is_of_tokens_and_labels(demo):
    rows = needle_rows(demo, PROSE, 800, 2, 0, Needles(256))
    whole = rows_digest(rows)
    assert rows_digest(rows[:1]) != whole
    rows[0].labels[5] = 7
    assert rows_digest(rows) != whole


def test_numbers_do_not_depend_on_the_length_and_rows_begin_elsewhere(demo):
    short, long = (needle_rows(demo, DOCUMENTS, length, 2, 0, Needles(256)) for length in (800, 1600))
    for one, two in zip(short, long, strict=True):
        assert torch.equal(one.labels[one.labels != IGNORED], two.labels[two.labels != IGNORED])
    first, second = (demo.decode(row.input_ids) for row in short)
    assert set(NUMBER.findall(first)).isdisjoint(NUMBER.findall(second))
    # The text behind the last needle has nothing in common.
    texts = [re.split(r" is: \d+\. ", text)[-1].partition("\nWhat are all")[0] for text in (first, second)]
    assert len(texts[0]) > 200
    assert texts[0][:100] not in second


def test_a_needle_that_came_too_near_steps_back(demo, monkeypatch):
    right = _Text._place
    # As a tokenizer would have it that joins words on one side of a needle, and not on the other.
    monkeypatch.setattr(
        _Text, "_place", lambda self, tokens, step: right(self, tokens, step) + 25 * (tokens > 0)
    )
    rows = needle_rows(demo, PROSE, 900, 1, 0, Needles(256, 3))
    ((*_, last),) = check(demo, rows, 900, 256, 3)
    assert last > 900 - 256 - 60 - 45 * 3 - 45


def test_a_short_text_is_read_again(demo):
    rows = needle_rows(demo, ["One two three. Four five."], 800, 1, 0, Needles(256))
    check(demo, rows, 800, 256, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"documents": []}, "the 0 documents contain no word"),
        ({"documents": ["", "  \n"]}, "the 2 documents contain no word"),
        ({"count": 0}, "the number of rows with needles must be 1 or more, got 0"),
        ({"needles": Needles(256, 0)}, "the number of needles in a row must be 1 or more, got 0"),
        (
            {"needles": Needles(-1)},
            "the number of tokens between a needle and its answer must be 0 or more, got -1",
        ),
        (
            {"length": 300},
            "a row of 300 tokens is too short for 4 needles, each at least 256 tokens before its answer; use ",
        ),
        (
            {"needles": Needles(799)},
            "a row of 800 tokens is too short for 4 needles, each at least 799 tokens before its answer",
        ),
    ],
)
def test_what_makes_no_rows_is_refused(demo, options, said):
    arguments = {"documents": PROSE, "length": 800, "count": 2, "seed": 0, "needles": Needles(256), **options}
    with pytest.raises(RopewalkError, match=said):
        needle_rows(demo, **arguments)


def test_without_word_lists_it_says_what_to_install(demo, monkeypatch):
    monkeypatch.setattr(word_lists, "_assets", lambda: None)
    for cached in (word_lists.word_lists, word_lists.key_names):
        cached.cache_clear()
    with pytest.raises(RopewalkError, match="pip install wonderwords"):
        needle_rows(demo, PROSE, 800, 1, 0)


def test_half_the_length_is_beyond_where_nothing_is_said(demo):
    assert rows_digest(needle_rows(demo, PROSE, 800, 2, 0)) == rows_digest(
        needle_rows(demo, PROSE, 800, 2, 0, Needles(400))
    )
