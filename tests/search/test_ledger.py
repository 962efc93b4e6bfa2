"""The log of a search: every loss comes back as it was, and what is damaged is not taken for a search."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.search import Job, Ledger
from ropewalk.search.ledger import begin_log, read_log
from test_space import placed

HEADER = {"seed": 3, "start_tokens": (0, 4)}
LOSSES = st.floats(allow_nan=False, allow_infinity=False) | st.just(math.inf)


@given(st.lists(st.tuples(placed(), st.integers(0, 9), LOSSES), max_size=5))
def test_losses_come_back_from_the_log_to_the_last_bit(tmp_path_factory, measured):
    path = tmp_path_factory.mktemp("log") / "search.jsonl"
    jobs = {Job(space.nearest(factors), document): loss for (space, factors), document, loss in measured}
    with begin_log(path, HEADER) as file:
        ledger = Ledger(file=file)
        for job, loss in jobs.items():
            ledger.add(job, loss)
    assert read_log(path, HEADER) == ledger.losses == jobs
    assert ledger.forwards == len(jobs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]\n",
        '{"seed": 3',
        '{"seed": 3}\n{"rescale_factors": [1.0], "start_tokens": 0, "loss": 1.0}\n',
        '{"seed": 3}\n{"rescale_factors": [1.0], "start_tokens": 0, "document": 0, "loss": "low"}\n',
        '{"seed": 3}\nnull\n',
    ],
)
def test_a_damaged_log_is_refused(tmp_path, text):
    path = tmp_path / "search.jsonl"
    path.write_text(text)
    with pytest.raises(RopewalkError, match=r"is damaged .*; remove it to start again"):
        read_log(path, {"seed": 3})
    assert path.read_text() == text


def test_without_a_log_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(RopewalkError, match="nothing to resume: cannot read"):
        read_log(tmp_path / "none.jsonl", HEADER)
