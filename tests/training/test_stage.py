"""A stage makes its rows one step ahead, in their order, and ends where they cannot be made."""

import pytest

from ropewalk import RopewalkError
from ropewalk.training.stage import made_ahead


def test_rows_are_made_one_step_ahead_in_their_order():
    made, used = [], []
    for step, value in zip(
        range(3, 8), made_ahead(lambda step: made.append(step) or step * 10, range(3, 8)), strict=True
    ):
        used.append(value)
        assert value == step * 10
        # The next step's may be under way, none further.
        assert len(made) <= len(used) + 1
    assert made == [3, 4, 5, 6, 7]
    assert list(made_ahead(made.append, range(4, 4))) == []


def test_rows_that_cannot_be_made_end_the_run_in_their_step():
    def make(step):
        if step == 2:
            raise RopewalkError("row 2 is damaged")
        return step

    steps = made_ahead(make, range(4))
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(RopewalkError, match="row 2 is damaged"):
        next(steps)
