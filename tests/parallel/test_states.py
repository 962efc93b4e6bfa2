"""Convolutions and recurrences over fragments of four ranks against those of whole runs, in float64."""

import pytest

from tests.parallel.states_cases import differences, with_empty_ranks

ROUNDING = 1e-12
"""Of the largest value: sums of up to 64 products of a handful of factors below 3, in another order."""


@pytest.mark.parametrize(
    ("shape", "by_matrix"),
    [({"ring": 4}, True), ({"ring": 2, "sequence": 2}, False), ({"sequence": 4}, True)],
)
def test_ranks_together_equal_whole_runs(four_ranks, shape, by_matrix):
    for found in four_ranks.run(differences, shape, range(6), by_matrix):
        assert max(found) <= ROUNDING, found


def test_ranks_without_tokens_take_part(four_ranks):
    assert max(four_ranks.run(with_empty_ranks)) <= ROUNDING
