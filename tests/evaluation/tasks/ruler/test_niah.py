"""Needles are hidden where the benchmark hides them, and impossible tasks are refused."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.ruler import niah
from ropewalk.evaluation.tasks.ruler.niah import DEPTHS, depth_of, hide_in_lines, hide_in_sentences, uuid4
from ropewalk.evaluation.tasks.ruler.tasks import RULER
from ropewalk.evaluation.tasks.words import words_unavailable

pytestmark = pytest.mark.skipif(words_unavailable() is not None, reason="wonderwords is not installed")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("niah_single_1", ("noise", "words", "numbers", 1, 1, 1)),
        ("niah_single_2", ("essay", "words", "numbers", 1, 1, 1)),
        ("niah_single_3", ("essay", "words", "uuids", 1, 1, 1)),
        ("niah_multikey_1", ("essay", "words", "numbers", 4, 1, 1)),
        ("niah_multikey_2", ("needle", "words", "numbers", 1, 1, 1)),
        ("niah_multikey_3", ("needle", "uuids", "uuids", 1, 1, 1)),
        ("niah_multivalue", ("essay", "words", "numbers", 1, 4, 1)),
        ("niah_multiquery", ("essay", "words", "numbers", 4, 1, 4)),
    ],
)
def test_needle_tasks_are_the_papers(name, fields):
    task = RULER[name]
    assert (task.haystack, task.key_kind, task.value_kind, task.keys, task.values, task.queries) == fields


def test_depths_of_essays_are_forty_whole_percents():
    assert len(set(DEPTHS)) == 40
    assert DEPTHS[:5] == (0, 3, 5, 8, 10)
    assert DEPTHS[-3:] == (95, 97, 100)


def naive_lines(lines, hidden, positions):
    found = list(lines)
    for line, position in sorted(zip(hidden, positions, strict=True), key=lambda pair: -pair[1]):
        found.insert(position, line)
    return "\n".join(found)


@pytest.mark.parametrize("positions", [(), (0,), (5,), (0, 1, 5), (2, 4)])
def test_lines_are_hidden_before_those_that_are_named(positions):
    lines, hidden = list("abcdef"), list("XYZ")[: len(positions)]
    assert hide_in_lines(lines, hidden, positions) == naive_lines(lines, hidden, positions)


def test_sentences_are_hidden_at_their_share_of_the_text():
    sentences = [f"S{number}." for number in range(10)]

    def stretch(start, end):
        return " ".join(sentences[start:end])

    assert hide_in_sentences(stretch, 10, ["X", "Y"], [58, 31]) == (
        "S0. S1. S2. X S3. S4. Y S5. S6. S7. S8. S9."
    )
    assert hide_in_sentences(stretch, 10, ["X"], [0]) == " X " + " ".join(sentences)
    assert hide_in_sentences(stretch, 10, ["X"], [100]) == " ".join(sentences) + " X "
    assert depth_of("X", "aaaX") == 0.75


@pytest.mark.parametrize(
    "fields",
    [
        {"haystack": "hay"},
        {"key_kind": "letters"},
        {"value_kind": "letters"},
        {"queries": 2},
        {"values": 0},
        {"keys": 41},
    ],
)
def test_needle_tasks_that_cannot_be_are_refused(fields):
    with pytest.raises(RopewalkError, match=r"'own' cannot ask|unknown .* of the task 'own'; choose from"):
        niah.NeedleTask(**{"name": "own", "haystack": "noise", **fields})


@given(st.integers(0, 2**128 - 1))
def test_uuids_are_those_of_the_standard_library(number):
    assert uuid4(number) == str(UUID(int=number, version=4))
