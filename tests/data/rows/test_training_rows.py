"""Each epoch takes every row once, and a resumed run takes the same rows as one that was never stopped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import row_order, rows_for_step
from ropewalk.errors import RopewalkError

seeds = st.integers(0, 2**32)


@given(st.integers(1, 200), seeds, st.integers(0, 1000))
def test_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    assert sorted(row_order(num_rows, seed, epoch)) == list(range(num_rows))


@given(st.integers(1, 30), st.integers(1, 70), seeds)
def test_steps_run_through_the_epochs_without_a_gap(num_rows: int, rows_per_step: int, seed: int) -> None:
    steps = [rows_for_step(step, rows_per_step, num_rows, seed) for step in range(7)]
    taken = [row for step in steps for row in step]
    epochs = [row_order(num_rows, seed, epoch) for epoch in range(len(taken) // num_rows + 1)]
    assert taken == np.concatenate(epochs)[: len(taken)].tolist()
    assert rows_for_step(5, rows_per_step, num_rows, seed) == steps[5]


def test_seed_and_epoch_change_the_order_and_a_release_of_numpy_does_not() -> None:
    assert row_order(8, 7, 0).tolist() == [4, 3, 6, 2, 1, 0, 5, 7]
    assert row_order(100, 7, 0).tolist() != row_order(100, 7, 1).tolist() != row_order(100, 8, 1).tolist()


def test_a_cached_order_cannot_be_spoilt() -> None:
    with pytest.raises(ValueError, match="read-only"):
        row_order(5, 0, 0)[0] = 1


@pytest.mark.parametrize("arguments", [(-1, 1, 1, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, -1)])
def test_arguments_out_of_range_are_refused(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(RopewalkError, match="or more"):
        rows_for_step(*arguments)
