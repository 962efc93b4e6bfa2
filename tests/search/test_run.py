"""The door of the room: a search as one call, with what the command prints as its JSON."""

import doctest
import json

import ropewalk.search.run as run
from ropewalk.parallel.context import RunContext
from ropewalk.search import SearchConfig, read_factors, search

SETTINGS = {"budget": 3, "documents": 1, "held_out": 1, "device": "cpu"}


class Notes:
    """A reporter that keeps its notes and draws nothing."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)

    def bar(self, label, total):
        from ropewalk.io.progress import Silent

        return Silent().bar(label, total)


def test_the_example_of_the_door_runs():
    found = doctest.DocTestFinder().find(run.search, globs=vars(run))
    result = doctest.DocTestRunner().run(found[0])
    assert (result.failed, result.attempted) == (0, 4)


def test_a_search_goes_on_from_its_log_and_gives_the_same_table(tmp_path):
    reporter = Notes()
    values = {
        "model": "embedded",
        "target_length": 512,
        "settings": SETTINGS,
        "out": tmp_path / "factors.json",
    }
    first = search(SearchConfig(**values), RunContext(reporter=reporter))
    assert first.file == tmp_path / "factors.json"
    assert read_factors(first.file) == first.table
    said = first.to_json()
    assert json.loads(json.dumps(said, allow_nan=False)) == {
        **json.loads(first.file.read_text()),
        "file": str(first.file),
    }
    first.file.unlink()
    again = search(SearchConfig(**values, resume=True), RunContext(reporter=reporter))
    assert "resuming after 3 forward passes" in reporter.said
    without = {"search": None, "versions": None}
    assert {**again.to_json(), **without} == {**said, **without}


def test_nothing_is_written_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = search(SearchConfig(model="embedded", target_length=512, settings=SETTINGS))
    assert found.file is None
    assert not list(tmp_path.iterdir())
