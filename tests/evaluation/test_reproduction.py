"""A result is reproduced from its files, and each file that was changed contradicts it by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk import evaluate
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.reproduction import verify_result


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    evaluate("embedded", suites=("passkey", "perplexity"), lengths=128, samples=3, rows=2, out=out)
    return out


def statuses(folder: Path, tokenizer: str | None = None) -> dict[str, str]:
    return {each.what: each.status for each in verify_result(folder, tokenizer).findings}


def test_a_result_follows_from_its_files(finished: Path) -> None:
    assert statuses(finished) == dict.fromkeys(
        ("scores", "tokenizer", "prompts", "model", "versions"), "reproduced"
    )
    assert not verify_result(finished).contradicted


def _answer(lines: list[dict], record: dict) -> None:
    lines[0]["prediction"] = "I do not know"


def _score(lines: list[dict], record: dict) -> None:
    record["results"][0]["score"] += 1


def _no_such_metric(lines: list[dict], record: dict) -> None:
    further = {**record["results"][0], "task": "passkey.renamed"}
    record["results"].append({**further, "details": {**further["details"], "answers_of": "passkey"}})


def _interval(lines: list[dict], record: dict) -> None:
    record["results"][0]["ci95"][0] += 1


def _missing(lines: list[dict], record: dict) -> None:
    del lines[0]


def _prompt(lines: list[dict], record: dict) -> None:
    record["settings"]["seed"] = 1


def _weights(lines: list[dict], record: dict) -> None:
    record["model_sha256"] = "0" * 64


def _tokenizer(lines: list[dict], record: dict) -> None:
    record["tokenizer_sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_answer, "scores"),
        (_score, "scores"),
        (_interval, "scores"),
        (_no_such_metric, "scores"),
        (_missing, "scores"),
        (_prompt, "prompts"),
        (_weights, "model"),
        (_tokenizer, "tokenizer"),
    ],
)
def test_what_was_changed_is_named(
    finished: Path, tmp_path: Path, change: Callable[[list[dict], dict], None], what: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(finished, folder)
    answers, results = folder / "predictions.jsonl", folder / "results.json"
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    record = json.loads(results.read_text())
    change(lines, record)
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results.write_text(json.dumps(record))
    found = verify_result(folder)
    assert [each.what for each in found.findings if each.status == "differs"] == [what]
    assert found.contradicted


def test_what_is_not_at_hand_is_not_checked(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    shutil.copytree(finished, folder)
    (folder / "predictions.jsonl").unlink()
    record = json.loads((folder / "results.json").read_text())
    record |= {"model": str(tmp_path / "nowhere"), "versions": {"ropewalk": "0.0.1"}}
    (folder / "results.json").write_text(json.dumps(record))
    assert set(statuses(folder).values()) == {"not checked"}
    assert statuses(folder, "embedded")["tokenizer"] == "reproduced"
    with pytest.raises(RopewalkError, match="nowhere"):
        verify_result(folder, str(tmp_path / "nowhere"))
