"""The door of the room: a search as one call, with what the command prints as its JSON."""

import doctest
import json

import pytest

import ropewalk.search.run as run
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.reporting.search import describe_search, factors_figure
from ropewalk.search import SearchConfig, read_factors, search, write_factors
from ropewalk.search.fitted_table import fitted_table

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


CRITICAL = {
    "space": "critical-dimension",
    "objective": "needle",
    "budget": 9,
    "documents": 1,
    "held_out": 0,
    "device": "cpu",
}


def test_a_search_for_the_critical_dimension_goes_on_and_its_table_extends_a_model(tmp_path):
    reporter = Notes()
    values = {
        "model": "embedded",
        "target_length": 1024,
        "settings": CRITICAL,
        "out": tmp_path / "factors.json",
    }
    first = search(SearchConfig(**values), RunContext(reporter=reporter))
    table = read_factors(first.file)
    # 256 tokens, base 1e4 and 16 pairs: ⌈16·log_1e4(256/20π)⌉ = 3 and ⌈16·log_1e4(256/2π)⌉ = 7.
    pairs = table.critical_pair
    assert (pairs.smallest, pairs.theoretical, table.search.space) == (3, 7, "critical-dimension")
    assert 3 <= pairs.found <= 7
    factors, at = table.long_factor, pairs.found
    assert factors[:at] == tuple(factors[at] ** (pair / at) for pair in range(at))
    assert all(4 <= factor <= 8 for factor in factors[at:])
    said = "\n".join(str(part) for part in describe_search(first, SearchConfig(**values)))
    assert (
        f"critical pair {at}, counted from 0, of 3 to 7 (in theory 7); critical dimension {2 * at} (in"
        in said
    )
    assert "left of the blue line follow from that of the critical pair" in factors_figure(table).caption
    # Interrupted after seven losses, it goes on and proposes the same candidates.
    log = first.file.with_suffix(".jsonl")
    whole = log.read_text().splitlines(keepends=True)
    first.file.unlink()
    log.write_text("".join(whole[:8]))
    again = search(SearchConfig(**values, resume=True), RunContext(reporter=reporter))
    assert "resuming after 7 forward passes" in reporter.said
    assert log.read_text().splitlines(keepends=True) == whole
    assert again.table.long_factor == factors
    assert again.table.critical_pair == pairs
    # The finished search is found again, and a search in the other space is another search.
    assert search(SearchConfig(**values, resume=True)).table.long_factor == factors
    other = {**values, "settings": {**CRITICAL, "space": "all-pairs", "algorithm": "evolution"}}
    with pytest.raises(RopewalkError, match="a search with space critical-dimension instead of all-pairs"):
        search(SearchConfig(**other, resume=True))
    first.file.unlink()
    with pytest.raises(
        RopewalkError, match=r"is the log of another search, with largest 8\.0 instead of 5\.0"
    ):
        search(SearchConfig(**other, resume=True))
    # As extend, export and eval take it.
    write_factors(first.file, table)
    method = fitted_table(first.file, "embedded").method
    assert method.long_factor == factors
    assert method.as_written() == method


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"budget": 4}, "too small for the 5 initial candidates on 1 documents"),
        ({"largest": 3.5}, "between 4 .* and the largest factor 3.5, but there are none; raise largest"),
    ],
)
def test_a_search_for_the_critical_dimension_that_cannot_begin_is_refused_before_the_model_is_loaded(
    monkeypatch, changed, said
):
    monkeypatch.setattr(run, "load_model", None)
    with pytest.raises(RopewalkError, match=said):
        search(SearchConfig(model="embedded", target_length=1024, settings={**CRITICAL, **changed}))
