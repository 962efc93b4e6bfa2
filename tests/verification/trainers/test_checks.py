"""Findings of the probe, from values alone."""

import re

import pytest

from ropewalk.verification.trainers.checks import Weights, documents_whole, token_mean


def weights(*values):
    return Weights(tuple(values), 1e-3)


@pytest.mark.parametrize(
    ("ranks", "averages", "passed", "words"),
    [
        (
            [[weights(0.2, 0.2), weights(0.2, 0.2, 0.2)]],
            False,
            True,
            "5 targets in 2 micro-batches on 1 rank",
        ),
        ([[weights(0.4, 0.4)], [weights(0.4, 0.4, 0.4)]], True, True, "on 2 ranks"),
        ([[weights(0.25, 0.25), weights(0.5)]], False, False, "a mean of the means of micro-batches"),
        ([[weights(0.5, 0.5)], [weights(1.0)]], True, False, "a mean of the means of ranks"),
        ([[weights(0.2, 0.3), weights(0.25, 0.25)]], False, False, "weigh differently"),
        ([[weights(1.0, 1.0), weights(1.0)]], False, False, "add up to 3 instead of 1"),
        ([[weights(0.5, 0.5)]], False, None, "one micro-batch"),
        ([[weights(0.25, 0.25), weights(0.25, 0.25)]], False, None, "2 micro-batches of 2 targets each"),
    ],
)
def test_what_weights_say_of_the_mean(ranks, averages, passed, words):
    found = token_mean(ranks, averages)
    assert found.passed is passed
    assert words in found.note


DOCUMENTS = ((10, 11, 12), (20, 21))


@pytest.mark.parametrize(
    ("seen", "passed", "words"),
    [
        ([{0: [[0, 1, 2]]}, {1: [[0, 1]]}], True, "2 of 2 documents"),
        ([{0: [[0, 1, 2]]}], True, "1 of 2 documents"),
        ([{0: [[0, 1], [2]], 1: [[0, 1]]}], False, "document 0 of 3 tokens has 2 \\+ 1 in one row each"),
        ([{1: [[0, 1]]}, {1: [[0, 1]]}], False, "document 1 are in several rows"),
    ],
)
def test_documents_are_whole_and_seen_once(seen, passed, words):
    found = documents_whole(seen, DOCUMENTS)
    assert found.passed is passed
    assert re.search(words, found.note)
