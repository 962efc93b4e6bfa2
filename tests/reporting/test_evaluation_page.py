"""The page of an evaluation holds what a reader asks for, and nothing that a model wrote can do harm in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting import Picture, needle_figure, write_evaluation_report
from ropewalk.reporting.evaluation_page import chosen_examples
from tests.reporting.evaluation_results import needle, retrieval, ruler, short
from tests.reporting.test_page import Reader

RECORD: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "digest": "sha256:abcd",
    "suites": ["ruler", "passkey"],
    "lengths": [4096, 131072],
    "rows": None,
    "settings": {"samples": 123, "seed": 77, "stride": 256},
    "checkpoints": [{"name": "checkpoint-40", "model_sha256": "ff"}, {"name": "checkpoint-50"}],
    "backend": {"kind": "in memory", "dtype": "bfloat16"},
    "exact_rope": True,
    "date": "2026-11-21",
    "versions": {"ropewalk": "0.1.0", "torch": "2.13"},
    "results": ["SECRET"],
}


def example(prediction: str, score: float | None, index: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "suite": "ruler",
        "task": "vt",
        "length": 4096,
        "index": index,
        "references": ["ABCDE", "FGHIJ"],
        "prediction": prediction,
        "score": score,
        **changes,
    }


def test_page_says_what_was_measured_and_how(tmp_path: Path) -> None:
    figure = tmp_path / "needle.png"
    needle_figure(needle(), figure)
    results = [*ruler(), *retrieval("passkey", "passkey", {4096: 20}), *short()]
    page = write_evaluation_report(
        tmp_path / "new", RECORD, results, [Picture(figure)], [example("ABCDE", 0.5)]
    )
    assert page == tmp_path / "new" / "report.html"
    read = Reader(page.read_text(encoding="utf-8"))
    assert not read.open
    assert not {"script", "link", "a"} & set(read.tags)
    facts = ("Evaluation of meta-llama/Llama-3.1-8B", "sha256:abcd", "ruler, passkey", "4k, 128k")
    more = ("kind in memory, dtype bfloat16", "ropewalk 0.1.0, torch 2.13", "2026-11-21", "Exact RoPE", "yes")
    settings = ("Samples123", "Seed77", "Checkpointscheckpoint-40, checkpoint-50")
    assert all(text in read.text.replace("\n", "") for text in settings)
    for text in (*facts, *more, "niah_multikey_3", "hellaswag", "² not run: SQuAD", "50 % right"):
        assert text in read.text
    assert "Rows of text" not in read.text
    assert "SECRET" not in read.text
    assert read.tags.count("img") == 1


@pytest.mark.parametrize(
    "nasty",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "\x1b[2J\x1b]0;owned\x07",
        "\u202egnp.exe",
        "\ud800",
        "\x00",
        "</details></body>",
    ],
)
def test_nothing_that_a_model_wrote_is_taken_for_markup(nasty: str, tmp_path: Path) -> None:
    hostile = example(nasty, 0.0, prompt=nasty, references=[nasty], task=nasty)
    record = {**RECORD, "model": nasty, "backend": {"address": nasty}}
    page = write_evaluation_report(tmp_path, record, short(), examples=[hostile])
    content = page.read_text(encoding="utf-8")
    read = Reader(content)
    assert not read.open
    assert not {"script"} & set(read.tags)
    assert "img" not in read.tags
    assert not [c for c in content if (ord(c) < 32 and c != "\n") or c in "\x7f\u202e"]


def test_a_line_of_a_megabyte_does_not_make_a_page_of_one(tmp_path: Path) -> None:
    without = write_evaluation_report(tmp_path / "a", RECORD, short()).stat().st_size
    long = "x" * 2**20
    answers = [example(long, 0.0, n, prompt=long, references=[long] * 1000) for n in range(100)]
    page = write_evaluation_report(tmp_path / "b", RECORD, short(), examples=answers)
    assert page.stat().st_size - without < 20_000
    read = Reader(page.read_text(encoding="utf-8"))
    assert "(1,048,276 characters left out)" in read.text
    assert "and 990 more" in read.text


def test_the_end_of_a_prompt_is_shown(tmp_path: Path) -> None:
    prompt = "noise " * 1000 + "What is the key? The key is"
    page = write_evaluation_report(tmp_path, RECORD, [], examples=[example("x", 0.0, prompt=prompt)])
    read = Reader(page.read_text(encoding="utf-8"))
    assert "Prompt ends… " in read.text.replace("\n", "")
    assert "What is the key? The key is" in read.text
    assert "left out" not in read.text


def test_examples_hold_right_and_wrong_answers_and_say_of_how_many() -> None:
    answers = [example(f"right {n}", 1.0, n) for n in range(5)]
    answers += [example(f"wrong {n}", 0.0, n) for n in range(5, 40)]
    answers += [example("", None, 7, suite="passkey", task="passkey", length=131072)]
    one, two = chosen_examples(answers)
    assert one.title == "ruler vt, 4k tokens: 3 of 40 answers"
    assert [entry["Answer"] for entry in one.entries] == ["right 0", "wrong 5", "wrong 6"]
    assert [entry["Judged"] for entry in one.entries] == ["right", "wrong", "wrong"]
    assert [entry["Sample"] for entry in one.entries] == ["0", "5", "6"]
    assert one.entries[0]["Expected"] == "ABCDE, FGHIJ"
    assert two.title == "passkey, 128k tokens: 1 of 1 answers"
    assert (two.entries[0]["Answer"], two.entries[0]["Judged"]) == ("(empty)", "not scored")
    (right,) = chosen_examples(answers[:5])
    assert [entry["Sample"] for entry in right.entries] == ["0", "1", "2"]
    half = [example("half", 0.5), example("half", 0.9), example("all", 1.0, 2)]
    (mixed,) = chosen_examples(half, most=2)
    assert [entry["Judged"] for entry in mixed.entries] == ["50 % right", "right"]
    (single,) = chosen_examples(answers[:40], most=1)
    assert [entry["Answer"] for entry in single.entries] == ["right 0"]


def test_predictions_are_read_once_and_few_are_kept() -> None:
    def stream() -> Iterator[dict[str, Any]]:
        for n in range(20_000):
            yield example("x", n % 2, n)

    (found,) = chosen_examples(stream())
    assert found.title.endswith("3 of 20,000 answers")
    assert len(found.entries) == 3


def test_a_missing_figure_leaves_no_page(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match="cannot read the figure"):
        write_evaluation_report(tmp_path, RECORD, short(), [Picture(tmp_path / "missing.png")])
    assert list(tmp_path.iterdir()) == []


def test_the_record_is_folded_away_without_the_results(tmp_path: Path) -> None:
    page = write_evaluation_report(tmp_path, {**RECORD, "title": "My title"}, short())
    read = Reader(page.read_text(encoding="utf-8"))
    assert read.text.count("My title") == 2
    folded = json.loads(read.text.rpartition("Record")[2])
    assert folded == {key: value for key, value in RECORD.items() if key != "results"}
