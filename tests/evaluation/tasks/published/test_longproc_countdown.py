"""Countdown's search log and its scores; test_longproc.py compares both with the authors' program."""

import pytest

from ropewalk.evaluation.tasks.published.longproc_countdown import search, search_log, solved
from tests.evaluation.tasks.published.longproc_cases import ROWS


def test_what_the_authors_program_evaluates_is_never_run() -> None:
    row = ROWS["countdown"]
    for line in (
        "8 / 0 = 0",
        "__import__('os') + 8 = 12",
        "9**9**9 + 1 = 1",
        "four + 8 = 12",
        "1 +" + " " * 90 + "3 = 4",
    ):
        assert solved(f"<Solution>\n{line}\n4 + 1 = 5\n5 + 5 = 10\n</Solution>", [""], row) == 0


def test_a_log_is_its_own_right_answer() -> None:
    row = {"nums": [40, 19, 23, 7], "target": 29}
    log = search_log([40, 19, 23, 7], 29)
    assert (solved(log, [log], row), search(log, [log], row)) == (1, 1)
    with pytest.raises(ValueError, match=r"no equations of \[1, 1, 1, 1\] reach 99"):
        search_log([1, 1, 1, 1], 99)
