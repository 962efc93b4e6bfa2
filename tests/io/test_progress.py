"""Progress: a counted loop tells a reporter's bar what is done, and a silent reporter takes everything."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ropewalk.io.progress import Silent, Sparing, counted


class Kept:
    """A reporter that keeps what it is told."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)

    @contextmanager
    def bar(self, label, total):
        self.said.append((label, total))
        yield lambda done, text: self.said.append((done, text))
        self.said.append("closed")


def test_a_loop_that_counts_moves_one_bar_in_its_own_unit():
    reporter = Kept()
    with counted(reporter, "packing", 3, "rows") as told:
        for done in (1, 2, 3):
            told(done, 3)
    assert reporter.said == [("packing", 3), (1, "rows"), (2, "rows"), (3, "rows"), "closed"]


def test_a_silent_reporter_takes_notes_and_bars_of_any_length_and_says_nothing(capsys):
    reporter = Silent()
    reporter.note("one line")
    for total in (None, 0, 5):
        with reporter.bar("bar", total) as advance, counted(reporter, "bar", total, "rows") as told:
            advance(1, "text")
            told(1, 5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("at_once", [True, False])
def test_of_many_sentences_one_is_reported_in_so_many_seconds(monkeypatch, at_once):
    now = [100.0]
    monkeypatch.setattr("ropewalk.io.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    said = []
    report = Sparing(said.append, 10.0, at_once)
    for seconds in (100.0, 101.0, 109.9, 110.0, 119.0, 125.0, 126.0):
        now[0] = seconds
        report(f"{seconds:g}")
    assert said == ["100"] * at_once + ["110", "125"]
