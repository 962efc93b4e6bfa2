"""The door: one call measures, writes a folder, and goes on with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import (
    CompareSettings,
    EvaluationResult,
    EvaluationSettings,
    Settings,
    compare_folders,
    evaluate,
    rescore,
)
from ropewalk.evaluation.run import sources_identity
from ropewalk.parallel.context import RunContext

WHAT = Settings(suites=("passkey", "perplexity"), lengths=(128,), samples=2, rows=1)


def measured(folder: Path, what: Settings = WHAT, seen: list[bool] | None = None) -> EvaluationResult:
    config = EvaluationSettings(model="embedded", what=what, samples_dir=folder / "samples")

    def present(result: EvaluationResult) -> None:
        if seen is not None:
            seen.append((folder / "out" / "results.json").exists())

    return evaluate(config, RunContext(output=folder / "out"), present=present)


def test_a_run_writes_what_it_returns_and_goes_on(tmp_path: Path) -> None:
    seen: list[bool] = []
    result = measured(tmp_path, seen=seen)
    # What shows a result is complete before its record is.
    assert seen == [False]
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written == json.loads(json.dumps(result.to_json()))
    assert [(r.suite, r.task, r.status) for r in result.results] == [
        ("passkey", "passkey", "ok"),
        ("perplexity", "perplexity", "ok"),
    ]
    answers = (tmp_path / "out" / "predictions.jsonl").read_bytes()
    again = measured(tmp_path)
    assert (tmp_path / "out" / "predictions.jsonl").read_bytes() == answers
    assert [r.to_json() for r in again.results] == [r.to_json() for r in result.results]
    with pytest.raises(RopewalkError, match=r"which differs in samples \(2 in the folder, 3 given\)"):
        measured(tmp_path, Settings(**{**WHAT.to_json(), "samples": 3}))


def test_what_is_done_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured(tmp_path)
    monkeypatch.setattr("ropewalk.models.load.load_model", None)
    again = measured(tmp_path)
    assert [r.to_json() for r in again.results] == [r.to_json() for r in first.results]
    assert {**again.to_json(), "date": None} == {**first.to_json(), "date": None}
    # Nor does the refusal of other settings.
    with pytest.raises(RopewalkError, match=r"differs in samples \(2 in the folder, 3 given\)"):
        measured(tmp_path, Settings(**{**WHAT.to_json(), "samples": 3}))


def test_an_answer_that_is_removed_or_lost_is_generated_again(tmp_path: Path) -> None:
    first = measured(tmp_path)
    path = tmp_path / "out" / "predictions.jsonl"
    whole = path.read_text()
    for text in (whole.splitlines(keepends=True)[0], "", None):
        path.unlink() if text is None else path.write_text(text)
        again = measured(tmp_path)
        assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())
        assert [r.to_json() for r in again.results] == [r.to_json() for r in first.results]


def test_a_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"format": 1, "seed": 0}')
    with pytest.raises(RopewalkError, match="was written by another version of ropewalk"):
        measured(tmp_path)


def test_a_folder_is_scored_again_and_compared_without_a_model(tmp_path: Path) -> None:
    result = measured(tmp_path)
    assert rescore(tmp_path / "out").to_json()["results"] == result.to_json()["results"]
    compared = compare_folders(CompareSettings(a=tmp_path / "out", b=tmp_path / "out")).to_json()
    assert [each["difference"] for each in compared["differences"]] == [0, 0]
    assert compared["a"]["model"] == "embedded"


@pytest.mark.parametrize(
    ("suite", "setting", "known"),
    [
        ("ruler", lambda path: {"squad": str(path)}, "squad"),
        ("ruler", lambda path: {"hotpotqa": str(path)}, "hotpotqa"),
        ("ruler", lambda path: {"essays": path}, "essays"),
        ("needle", lambda path: {"essays": path}, "essays"),
        ("short", lambda path: {"harness_tasks": path}, "harness_tasks"),
        ("short", lambda path: {"harness": {"hellaswag": path}}, "hellaswag"),
    ],
)
def test_what_a_named_file_holds_decides_results_where_it_is_read(
    tmp_path: Path, suite: str, setting: Callable[[Path], dict[str, Any]], known: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text("[]")
    settings = Settings(suites=(suite,), **setting(path))
    first = sources_identity(settings)
    path.write_text("[1]")
    second = sources_identity(settings)
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == {known}
    assert known not in sources_identity(settings.model_copy(update={"suites": ("passkey",)}))


def test_a_name_that_is_no_file_has_no_digest() -> None:
    assert "squad" not in sources_identity(Settings(suites=("ruler",), squad="hub"))


def corpus_of_a_book(folder: Path) -> Path:
    """A folder whose first file is a book, which alone would fill every row."""
    folder.mkdir()
    (folder / "a-book.txt").write_text("".join(f"It was the {n}th of many days. " for n in range(3000)))
    for number in range(12):
        (folder / f"note-{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    return folder


def test_a_folder_is_not_measured_on_its_first_file_alone(tmp_path: Path) -> None:
    what = Settings(suites=("perplexity",), lengths=(128,), rows=4, perplexity={"position_bins": 2})
    text = str(corpus_of_a_book(tmp_path / "corpus"))
    found = [
        evaluate(
            EvaluationSettings(model="embedded", what=what.model_copy(update={"seed": seed}), text=text),
            RunContext(),
        ).results[0]
        for seed in (0, 0, 1)
    ]
    for result in found:
        sources = result.details["sources"]
        assert sum(sources.values()) == result.details["documents"] >= 4
        assert sources.get("corpus/a-book.txt", 0) <= 1
        assert sum(name.startswith("corpus/note-") for name in sources) >= 3
        assert [(each.start, each.end) for each in result.positions] == [(0, 64), (64, 128)]
    texts = [[each["text_sha256"] for each in result.samples] for result in found]
    assert texts[0] == texts[1] != texts[2]
    many = what.model_copy(update={"perplexity": what.perplexity.model_copy(update={"position_bins": 200})})
    with pytest.raises(RopewalkError, match="--position-bins 200 is more than the 128 tokens of a sequence"):
        evaluate(EvaluationSettings(model="embedded", what=many, text=text), RunContext())
