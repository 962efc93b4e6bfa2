"""The log of a search: every loss comes back as it was, and what is damaged is not taken for a search."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.lock import locked
from ropewalk.search import Candidate, Job
from ropewalk.search.loop import search_log
from tests.disk_cases import files_no_larger_than
from tests.search.search_log_cases import read_log
from tests.search.test_space import placed
from tests.search.test_space_critical import critical_spaces

HEADER = {"seed": 3, "start_tokens": (0, 4)}
JOB = Job(Candidate((1.0, 1.5)), 0)
LOSSES = st.floats(allow_nan=False, allow_infinity=False) | st.just(math.inf)


@given(st.lists(st.tuples(placed(), st.integers(0, 9), LOSSES), max_size=5))
def test_losses_come_back_from_the_log_to_the_last_bit(tmp_path_factory, measured):
    path = tmp_path_factory.mktemp("log") / "search.jsonl"
    jobs = {Job(space.nearest(factors), document): loss for (space, factors), document, loss in measured}
    with search_log(path, HEADER, False) as ledger:
        for job, loss in jobs.items():
            ledger.add(job, loss)
    assert read_log(path, HEADER) == ledger.losses == jobs
    assert ledger.forwards == len(jobs)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("[1, 2]\n", 1),
        ('{"seed": NaN}\n', 1),
        ('{"seed": 1e}\n', 1),
        ('{"seed": 3}\n{"rescale_factors": [1.0], "start_tokens": 0, "loss": 1.0}\n', 2),
        ('{"seed": 3}\n{"rescale_factors": [1.0], "start_tokens": 0, "document": 0, "loss": "low"}\n', 2),
        ('{"seed": 3}\nnull\n', 2),
    ],
)
def test_a_damaged_log_is_refused(tmp_path, text, number):
    path = tmp_path / "search.jsonl"
    path.write_text(text)
    with pytest.raises(
        RopewalkError, match=rf"^line {number} of .* is damaged: .*, or remove it to start again"
    ):
        read_log(path, {"seed": 3})
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"document": Infinity', "Infinity is not a JSON value"),
        ('"document": NaN', "NaN is not a JSON value"),
        ('"document": 1e999', "1e999 is beyond the largest float64"),
        ('"document": 1.0', r"document 1\.0 is not a whole number"),
        ('"document": true', "document True is not a whole number"),
        ('"document": -1', "document -1 is not a whole number"),
        ('"document": 2', "document 2 does not exist; the search has documents 0 to 1"),
        ('"loss": NaN', "NaN is not a JSON value"),
        ('"loss": -Infinity', "-Infinity is not a JSON value"),
        ('"loss": -1e999', "-1e999 is beyond the largest float64"),
        ('"loss": "1.5"', "loss '1.5' is not a finite number"),
        ('"loss": ' + "1" * 400, "too large"),
        ('"rescale_factors": "12"', "rescale_factors '12' is not a list of numbers"),
        ('"rescale_factors": [1.0, null]', "rescale_factors None is not a finite number"),
        ('"start_tokens": 0.5', r"start_tokens 0\.5 is not a whole number"),
        ('"start_tokens": -4', "start_tokens -4 is not a whole number"),
        ('"critical_pair": -1', "critical_pair -1 is not a whole number"),
    ],
)
def test_values_that_no_search_writes_are_damage(tmp_path, change, message):
    path = tmp_path / "search.jsonl"
    line = '{"rescale_factors": [1.0, 1.5], "start_tokens": 0, "document": 1, "loss": 1.5}\n'
    # Of two equal keys JSON takes the last one.
    path.write_text(f'{{"seed": 3}}\n{line}{line[:-2]}, {change}}}\n')
    with pytest.raises(
        RopewalkError, match=rf"^line 3 of .* is damaged: .*{message}.*, or remove it to start again$"
    ):
        read_log(path, {"seed": 3}, 2)
    with (
        pytest.raises(RopewalkError, match=r"^line 3 of .* is damaged"),
        search_log(path, {"seed": 3}, True, 2),
    ):
        pass
    # A log that is refused is free again.
    with locked(tmp_path, file=path.name):
        pass


def test_a_job_has_one_loss(tmp_path):
    path = tmp_path / "search.jsonl"
    for losses in ([1.5, 1.5], [math.inf, math.inf], [1.5, 1.25], [1.5, math.inf]):
        path.unlink(missing_ok=True)
        said = rf"a loss of {losses[1]}, but an earlier line has 1\.5"
        with search_log(path, HEADER, False) as ledger:
            ledger.add(JOB, losses[0])
            if losses[0] == losses[1]:
                ledger.add(JOB, losses[1])
            else:
                with pytest.raises(RopewalkError, match=said):
                    ledger.add(JOB, losses[1])
        assert read_log(path, HEADER) == {JOB: losses[0]}
        if losses[0] != losses[1]:
            # A line of another search, say.
            with path.open("a") as file:
                file.write(
                    path.read_text().splitlines()[1].replace("1.5}", f"{losses[1]}}}".replace("inf", "null"))
                )
                file.write("\n")
            with pytest.raises(RopewalkError, match=f"line 3 .* {said}"):
                read_log(path, HEADER)


def test_a_log_goes_on_where_it_was_cut(tmp_path):
    path = tmp_path / "search.jsonl"
    other = Job(JOB.candidate, 1)
    with search_log(path, HEADER, False) as ledger:
        ledger.add(JOB, 1.5)
    whole = path.read_text()
    path.write_text(whole + '{"rescale_fac')
    with search_log(path, HEADER, True, 2) as ledger:
        assert ledger.known == {JOB: 1.5}
        ledger.add(other, 2.5)
    assert path.read_text().startswith(whole)
    assert len(path.read_text().splitlines()) == 3
    assert read_log(path, HEADER, 2) == {JOB: 1.5, other: 2.5}


@pytest.mark.parametrize("cut", [0, 5])
def test_a_search_that_was_killed_before_its_first_line_was_whole_begins(tmp_path, cut):
    path = tmp_path / "search.jsonl"
    with search_log(path, HEADER, False):
        whole = path.read_text()
    path.write_text(whole[:cut])
    with search_log(path, HEADER, True) as ledger:
        ledger.add(JOB, 1.5)
    assert path.read_text().startswith(whole)
    assert read_log(path, HEADER) == {JOB: 1.5}


def test_a_log_has_one_writer(tmp_path):
    path = tmp_path / "search.jsonl"
    with search_log(path, HEADER, False) as ledger:
        ledger.add(JOB, 1.5)
        before = path.read_text()
        for resume in (True, False):
            with (
                pytest.raises(
                    RopewalkError, match=r"^process \d+ on .* is writing to .*search\.jsonl; wait until"
                ),
                search_log(path, HEADER, resume),
            ):
                pass
        assert path.read_text() == before
    with search_log(path, HEADER, True) as ledger:
        assert ledger.known == {JOB: 1.5}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_sentence_and_the_search_can_go_on(tmp_path):
    path = tmp_path / "search.jsonl"
    said = r"^cannot write .*search\.jsonl: File too large; earlier lines are kept"
    long = {**HEADER, "text": "x" * 500}
    # The lock's own file is small.
    with files_no_larger_than(300), pytest.raises(RunFailure, match=said), search_log(path, long, False):
        pass
    with search_log(path, HEADER, False) as ledger:
        ledger.add(JOB, 1.5)
        with files_no_larger_than(path.stat().st_size + 5), pytest.raises(RunFailure, match=said):
            ledger.add(Job(JOB.candidate, 1), 1.5)
    assert read_log(path, HEADER) == {JOB: 1.5}


def test_without_a_log_there_is_nothing_to_resume(tmp_path):
    path = tmp_path / "folder" / "none.jsonl"
    with (
        pytest.raises(RopewalkError, match="nothing to resume: the log"),
        search_log(path, HEADER, True),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@given(critical_spaces(), st.integers(0, 9), LOSSES)
def test_candidates_with_a_critical_pair_come_back_from_the_log(tmp_path_factory, space, document, loss):
    path = tmp_path_factory.mktemp("log") / "search.jsonl"
    jobs = {Job(each, document): loss for each in space.start(np.random.default_rng(0))}
    with search_log(path, HEADER, False) as ledger:
        for job in jobs:
            ledger.add(job, loss)
    assert read_log(path, HEADER) == jobs
    assert all('"critical_pair"' in line for line in path.read_text().splitlines()[1:])


def test_a_log_of_the_other_space_has_no_critical_pair(tmp_path):
    path = tmp_path / "search.jsonl"
    with search_log(path, HEADER, False) as ledger:
        ledger.add(JOB, 1.0)
    assert "critical_pair" not in path.read_text()
