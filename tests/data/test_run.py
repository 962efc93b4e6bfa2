"""The doors of the room: their examples hold, and results are plain data that says what the commands print."""

import doctest
import json
from pathlib import Path

import pytest

from ropewalk.data import PackConfig, PreviewConfig, StatsConfig, pack, preview, run, stats
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext

SOURCE = {"path": "embedded:validation", "max_documents": 12}


def config(**work: object) -> PackConfig:
    return PackConfig(
        sources=[SOURCE], tokenizer="embedded", rows={"context": 512}, work={"workers": 1, **work}
    )


def test_examples_hold() -> None:
    results = doctest.testmod(run)
    assert results.attempted > 6
    assert results.failed == 0


def test_a_machine_with_a_share_makes_all_rows(tmp_path: Path) -> None:
    whole = pack(config(), RunContext(output=tmp_path / "whole"))
    assert pack(config(), RunContext(output=tmp_path / "whole")).reused
    shared = RunContext(output=tmp_path / "shared")
    first, second = (pack(config(shard=f"{number}/2"), shared) for number in range(2))
    assert (first.reused, second.reused) == (False, True)
    assert {**first.to_json(), "folder": ""} == {**whole.to_json(), "folder": ""}
    assert json.loads(json.dumps(whole.to_json(), allow_nan=False)) == whole.to_json()


def test_rows_are_counted_and_shown(tmp_path: Path) -> None:
    packed = pack(config(), RunContext(output=tmp_path / "rows"))
    counted = stats(StatsConfig(sources=[str(tmp_path / "rows")]), RunContext()).to_json()
    assert (counted["packed"], counted["rows"]) == (True, packed.rows)
    shown = preview(tmp_path / "rows", PreviewConfig(rows=2, tokens=5))
    assert [len(row["chunks"]) > 0 for row in shown.to_json()["rows"]] == [True] * min(2, packed.rows)
    assert shown.to_json()["rows_there"] == packed.rows
    with pytest.raises(RopewalkError, match=r"their own length; omit length"):
        stats(StatsConfig(sources=[str(tmp_path / "rows")], length=64), RunContext())


def test_an_output_is_needed() -> None:
    with pytest.raises(RopewalkError, match=r"needs an output folder"):
        pack(config(), RunContext())
