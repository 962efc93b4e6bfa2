"""Logs grow by whole lines, and say what a repeated key means."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.lock import locked
from ropewalk.runs import Lines, Log, opened_log
from tests.disk_cases import files_no_larger_than
from tests.runs.job_cases import NUMBERS, left_by_kills

LATER = replace(NUMBERS, repeated=lambda old, new: None)
REFUSED = replace(NUMBERS, repeated=lambda old, new: "a second one")
HEADER = {"seed": 3, "pair": (0, 4)}


def test_entries_come_back(tmp_path):
    log = Log(tmp_path / "log.jsonl", NUMBERS)
    for number in range(3):
        log.add((number, number))
    assert Log(log.path, NUMBERS).known == log.known == {n: (n, n) for n in range(3)}
    assert Log(None, NUMBERS).known == {}


@pytest.mark.parametrize(
    ("lines", "second", "kept"),
    [(NUMBERS, 1, 1), (NUMBERS, 2, None), (LATER, 2, 2), (REFUSED, 1, None)],
)
def test_a_repeated_key_is_harmless_refused_or_later(tmp_path, lines, second, kept):
    path = tmp_path / "log.jsonl"
    log = Log(path, lines)
    log.add((7, 1))
    if kept is None:
        with pytest.raises(RopewalkError, match=r"two losses of 7|a second one"):
            log.add((7, second))
        # Written by hand, it is damage that the reader names.
        with path.open("a") as file:
            file.write(f'{{"n": 7, "loss": {second}}}\n')
        with pytest.raises(
            RopewalkError, match=r"line 2 of .* is damaged: (two losses of 7|a second one); restore"
        ):
            Log(path, lines)
    else:
        log.add((7, second))
        assert Log(path, lines).known == log.known == {7: (7, kept)}


def test_a_torn_tail_is_dropped_and_other_damage_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"n": 1, "loss": 1}\n{"n": 2, "lo')
    log = Log(path, NUMBERS)
    assert log.known == {1: (1, 1)}
    log.add((2, 2))
    assert path.read_text() == '{"n": 1, "loss": 1}\n{"n": 2, "loss": 2}\n'
    path.write_text('{"n": 1, "lo\n{"n": 2, "loss": 2}\n')
    with pytest.raises(RopewalkError, match=r"line 1 of .* is damaged"):
        Log(path, NUMBERS)


@pytest.mark.parametrize("header", [None, HEADER])
def test_rewound_entries_are_gone_at_every_kill_or_still_there(tmp_path, header):
    path = tmp_path / "folder" / "log.jsonl"
    path.parent.mkdir()
    log = Log(path, NUMBERS, header)
    for n in range(4):
        log.add((n, n))
    kills = left_by_kills(path.parent, tmp_path / "kills", lambda: log.rewind(lambda entry: entry[0] < 2))
    left = [list(Log(folder / path.name, NUMBERS, header).known) for folder in kills]
    # Another file takes the place of the log, at once.
    assert left
    assert all(each in ([0, 1, 2, 3], [0, 1]) for each in left)
    assert list(Log(path, NUMBERS, header).known) == [0, 1]
    log = Log(path, NUMBERS, header)
    assert log.rewind(lambda entry: entry[0] < 1) == [(1, 1)]
    log.add((5, 5))
    assert list(Log(path, NUMBERS, header).known) == [0, 5]


def test_a_log_that_stands_alone_has_one_writer_and_one_subject(tmp_path):
    path = tmp_path / "folder" / "log.jsonl"
    with (
        pytest.raises(
            RopewalkError,
            match=r"nothing to resume: the log .* does not exist; omit --resume to start a search",
        ),
        opened_log(path, NUMBERS, HEADER, True, "search"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with opened_log(path, NUMBERS, HEADER, False, "search") as log:
        log.add((1, 1))
        with (
            pytest.raises(RopewalkError, match=r"^process \d+ on .* is writing to .*log\.jsonl; wait until"),
            opened_log(path, NUMBERS, HEADER, True, "search"),
        ):
            pass
    with (
        pytest.raises(RopewalkError, match="already holds a search; either resume"),
        opened_log(path, NUMBERS, HEADER, False, "search"),
    ):
        pass
    with (
        pytest.raises(
            RopewalkError, match="the log of another search, with seed 3 instead of 4; either repeat"
        ),
        opened_log(path, NUMBERS, {**HEADER, "seed": 4}, True, "search"),
    ):
        pass
    # A log that is refused is free again.
    with locked(path.parent, file=path.name), pytest.raises(RopewalkError):
        Log(path, NUMBERS, {})
    with opened_log(path, NUMBERS, HEADER, True, "search") as log:
        assert log.known == {1: (1, 1)}


@pytest.mark.parametrize("cut", [0, 5])
def test_a_log_that_was_killed_before_its_first_line_was_whole_begins(tmp_path, cut):
    path = tmp_path / "log.jsonl"
    with opened_log(path, NUMBERS, HEADER, False, "search"):
        whole = path.read_text()
    path.write_text(whole[:cut])
    with opened_log(path, NUMBERS, HEADER, True, "search") as log:
        log.add((1, 1))
    assert path.read_text() == whole + '{"n": 1, "loss": 1}\n'


def test_a_full_disk_keeps_earlier_lines(tmp_path):
    log = Log(tmp_path / "log.jsonl", NUMBERS)
    log.add((1, 1))
    with files_no_larger_than(25), pytest.raises(RunFailure, match="earlier lines are kept"):
        log.add((2, 2))
    assert log.known == Log(log.path, NUMBERS).known == {1: (1, 1)}
    log.add((2, 2))


def test_entries_that_come_fast_wait_for_the_disk_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [0.0], []
    monkeypatch.setattr("ropewalk.runs.log.time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(now[0]))
    for seconds, expected in ((1.0, [0.0, 1.0, 2.5]), (0.0, [0.0, 0.5, 0.75, 1.0, 1.5, 2.5])):
        synced.clear()
        path = tmp_path / f"{seconds}.jsonl"
        lines = Lines[int, int](
            key=lambda each: each,
            write=lambda each: {"value": each},
            read=lambda values: int(values["value"]),
            repeated=lambda old, new: None,
            sync_seconds=seconds,
        )
        log = Log(path, lines)
        for number, moment in enumerate((0.0, 0.5, 0.75, 1.0, 1.5, 2.5)):
            now[0] = moment
            log.add(number)
            # Every line is in the file at once, where the end of the process cannot lose it.
            assert len(path.read_text().splitlines()) == number + 1
        assert synced == expected
