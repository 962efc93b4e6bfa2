"""The log of a search: every loss comes back as it was, and what is damaged is not taken for a search."""

import json
import math
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.search import Candidate, Job, Ledger
from ropewalk.search.ledger import LogFile, begin_log, continue_log, read_log
from test_space import placed

HEADER = {"seed": 3, "start_tokens": (0, 4)}
JOB = Job(Candidate((1.0, 1.5)), 0)
FULL = Path("/dev/full")
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"document": Infinity', "Infinity is no JSON"),
        ('"document": NaN', "NaN is no JSON"),
        ('"document": 1e999', "document inf is no whole number from 0 on"),
        ('"document": 1.0', r"document 1\.0 is no whole number"),
        ('"document": true', "document True is no whole number"),
        ('"document": -1', "document -1 is no whole number"),
        ('"document": 2', "document 2, where there are 2 from 0 on"),
        ('"loss": NaN', "NaN is no JSON"),
        ('"loss": -Infinity', "-Infinity is no JSON"),
        ('"loss": -1e999', "loss -inf is no finite number"),
        ('"loss": "1.5"', "loss '1.5' is no finite number"),
        ('"loss": ' + "1" * 400, "too large"),
        ('"rescale_factors": "12"', "rescale_factors '12' are no list of numbers"),
        ('"rescale_factors": [1.0, null]', "rescale_factors None is no finite number"),
        ('"start_tokens": 0.5', r"start_tokens 0\.5 is no whole number"),
        ('"start_tokens": -4', "start_tokens -4 is no whole number"),
    ],
)
def test_values_that_no_search_writes_are_damage(tmp_path, change, message):
    path = tmp_path / "search.jsonl"
    line = '{"rescale_factors": [1.0, 1.5], "start_tokens": 0, "document": 1, "loss": 1.5}\n'
    # Of two equal keys JSON takes the last one.
    path.write_text(f'{{"seed": 3}}\n{line}{line[:-2]}, {change}}}\n')
    with pytest.raises(RopewalkError, match=rf"is damaged \(line 3: .*{message}.*\); remove it"):
        read_log(path, {"seed": 3}, 2)
    with pytest.raises(RopewalkError, match=r"is damaged \(line 3"):
        continue_log(path, {"seed": 3}, 2)
    # A log that is refused is free again.
    with LogFile(path, "a"):
        pass


@pytest.mark.parametrize("header", ['{"seed": NaN}', '{"seed": 1e}', "3"])
def test_a_first_line_that_says_nothing_is_damage(tmp_path, header):
    path = tmp_path / "search.jsonl"
    path.write_text(header + "\n")
    with pytest.raises(RopewalkError, match=r"is damaged \(line 1: "):
        read_log(path, {"seed": 3})


def test_a_job_has_one_loss(tmp_path):
    path = tmp_path / "search.jsonl"
    for losses in ([1.5, 1.5], [math.inf, math.inf], [1.5, 1.25], [1.5, math.inf]):
        path.unlink(missing_ok=True)
        with begin_log(path, HEADER) as file:
            for loss in losses:
                Ledger(file=file).add(JOB, loss)
        if losses[0] == losses[1]:
            assert read_log(path, HEADER) == {JOB: losses[0]}
        else:
            with pytest.raises(RopewalkError, match=rf"a loss of {losses[1]} where an earlier line has 1\.5"):
                read_log(path, HEADER)


def test_a_log_goes_on_where_it_was_cut(tmp_path):
    path = tmp_path / "search.jsonl"
    other = Job(JOB.candidate, 1)
    with begin_log(path, HEADER) as file:
        Ledger(file=file).add(JOB, 1.5)
    whole = path.read_text()
    path.write_text(whole + '{"rescale_fac')
    known, file = continue_log(path, HEADER, 2)
    with file:
        assert known == {JOB: 1.5}
        Ledger(known, file).add(other, 2.5)
    assert path.read_text().startswith(whole)
    assert len(path.read_text().splitlines()) == 3
    assert read_log(path, HEADER, 2) == {JOB: 1.5, other: 2.5}


def test_a_log_has_one_writer(tmp_path):
    path = tmp_path / "search.jsonl"
    said = r"another process writes .*search\.jsonl; wait until it is done"
    with begin_log(path, HEADER) as file:
        Ledger(file=file).add(JOB, 1.5)
        before = path.read_text()
        for going_on in (continue_log, read_log):
            with pytest.raises(RopewalkError, match=said):
                going_on(path, HEADER)
        assert path.read_text() == before
    known, file = continue_log(path, HEADER)
    with file, pytest.raises(RopewalkError, match=said):
        continue_log(path, HEADER)
    assert known == read_log(path, HEADER) == {JOB: 1.5}


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_disk_that_is_full_is_one_sentence_also_on_closing():
    files = []

    def write(what):
        with ExitStack() as stack:
            files.append(stack.enter_context(LogFile(FULL, "a")))
            what(files[-1])

    def fail(file):
        file.write("half a line")
        raise KeyError("first")

    said = r"^cannot write /dev/full: No space left on device$"
    # What the failed write has left in the buffer fails again when the file is closed.
    with pytest.raises(RopewalkError, match=said):
        write(lambda file: Ledger(file=file).add(JOB, 1.5))
    with pytest.raises(RopewalkError, match=said):
        write(lambda file: file.write("half a line"))
    with pytest.raises(KeyError, match="first"):
        write(fail)
    assert [file.closed for file in files] == [True] * 3


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_log_that_cannot_be_begun_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "search.jsonl"
    opened = Path.open

    def onto_full(self, mode):
        opened(self, mode).close()
        return opened(FULL, "ab")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", onto_full)
        with pytest.raises(RopewalkError, match=r"cannot write .*search\.jsonl: No space left"):
            begin_log(path, HEADER)
    assert not path.exists()
    begin_log(path, HEADER).close()
    assert json.loads(path.read_text())["seed"] == 3


def test_without_a_log_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(RopewalkError, match="nothing to resume: cannot read"):
        read_log(tmp_path / "none.jsonl", HEADER)
    with pytest.raises(RopewalkError, match="nothing to resume: there is no log"):
        continue_log(tmp_path / "none.jsonl", HEADER)
    assert list(tmp_path.iterdir()) == []
