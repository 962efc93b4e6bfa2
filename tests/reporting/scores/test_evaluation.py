"""An evaluation is shown by what its results say; its page holds that, and nothing a model wrote does harm in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.tasks.suite import EVERY_ROW
from ropewalk.reporting import (
    Picture,
    draw,
    evaluation_figures,
    evaluation_tables,
    needle_figure,
    score_rows,
    write_evaluation_report,
)
from ropewalk.reporting.scores.evaluation import chosen_examples, effective_sentences, pictures_of
from tests.reporting.axes_cases import only, panels, rules, ticks
from tests.reporting.evaluation_results import LENGTHS, documents, needle, retrieval, ruler, scored, short
from tests.reporting.reporting_cases import BEFORE
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
    picture = draw(needle_figure(score_rows({"m": needle()}), "Llama: needle"), tmp_path / "needle.png")
    results = [*ruler(), *retrieval("passkey", "passkey", {4096: 20}), *short()]
    page = write_evaluation_report(tmp_path / "new", RECORD, results, [picture], [example("ABCDE", 0.5)])
    assert page == tmp_path / "new" / "report.html"
    read = Reader(page.read_text(encoding="utf-8"))
    assert not read.open
    assert not {"script", "link", "a"} & set(read.tags)
    facts = ("Evaluation of meta-llama/Llama-3.1-8B", "sha256:abcd", "ruler, passkey", "4k, 128k")
    more = ("kind in memory, dtype bfloat16", "ropewalk 0.1.0, torch 2.13", "2026-11-21", "Exact RoPE", "yes")
    settings = ("Samples123", "Seed77", "Checkpointscheckpoint-40, checkpoint-50")
    assert all(text in read.text.replace("\n", "") for text in settings)
    for text in (*facts, *more, "niah_multikey_3", "hellaswag", "² not run: SQuAD", "50 % correct"):
        assert text in read.text
    assert "Sequences" not in read.text
    assert "SECRET" not in read.text
    assert read.tags.count("img") == 1
    assert dict(read.attributes)["alt"].startswith("Llama: needle. 4k tokens: 100 % at every depth; ")
    assert "Correct answers in percent, over 5 samples per cell." in read.text


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (EVERY_ROW, "Samplesall questions"),
        ({"ruler": 20, "aa_lcr": EVERY_ROW}, "Samplesruler 20, aa_lcr all questions"),
    ],
)
def test_all_questions_of_a_file_are_no_number(tmp_path: Path, samples: Any, words: str) -> None:
    record = {**RECORD, "settings": {"samples": samples}}
    page = write_evaluation_report(tmp_path, record, ruler())
    assert words in Reader(page.read_text(encoding="utf-8")).text.replace("\n", "")


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
    assert "End of prompt… " in read.text.replace("\n", "")
    assert "What is the key? The key is" in read.text
    assert "left out" not in read.text


def test_examples_hold_right_and_wrong_answers_and_say_of_how_many() -> None:
    answers = [example(f"right {n}", 1.0, n) for n in range(5)]
    answers += [example(f"wrong {n}", 0.0, n) for n in range(5, 40)]
    answers += [example("", None, 7, suite="passkey", task="passkey", length=131072)]
    one, two = chosen_examples(answers)
    assert one.title == "ruler vt, 4,096 tokens: 3 of 40 answers"
    assert [entry["Answer"] for entry in one.entries] == ["right 0", "wrong 5", "wrong 6"]
    assert [entry["Verdict"] for entry in one.entries] == ["correct", "wrong", "wrong"]
    assert [entry["Sample"] for entry in one.entries] == ["0", "5", "6"]
    assert one.entries[0]["Expected"] == "ABCDE, FGHIJ"
    assert two.title == "passkey, 131,072 tokens: 1 of 1 answers"
    assert (two.entries[0]["Answer"], two.entries[0]["Verdict"]) == ("(empty)", "not scored")
    (right,) = chosen_examples(answers[:5])
    assert [entry["Sample"] for entry in right.entries] == ["0", "1", "2"]
    half = [example("half", 0.5), example("half", 0.9), example("all", 1.0, 2)]
    (mixed,) = chosen_examples(half, most=2)
    assert [entry["Verdict"] for entry in mixed.entries] == ["50 % correct", "correct"]
    (single,) = chosen_examples(answers[:40], most=1)
    assert [entry["Answer"] for entry in single.entries] == ["right 0"]


def test_an_example_shows_what_follows_the_thoughts() -> None:
    ended, unended = "a" * 3000 + "</think>ABCDE", "<think>" + "b" * 3000
    (found,) = chosen_examples(
        [example(text, 0, n, thoughts_opened=text is ended) for n, text in enumerate((ended, unended))]
    )
    first, second = (entry["Answer"] for entry in found.entries)
    assert first == "ABCDE"
    assert second.startswith("<think>bbb")


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


def stems(results: list[TaskResult]) -> list[str]:
    return [stem for stem, _ in evaluation_figures("m", results, 85.6)]


def test_each_benchmark_has_its_figures_in_the_order_of_the_tables() -> None:
    forced = TaskResult("longppl", "longppl", 8192, 7, 3.3, (3.1, 3.6), unit="perplexity")
    results = [
        *short(),
        forced,
        BEFORE,
        documents("sliding"),
        *needle(LENGTHS[:2], task="teacher_forced"),
        *needle(),
        *retrieval("longeval", "lines", {8192: 12}),
        *retrieval("longeval", "lines_200", {8192: 12}),
        *retrieval("passkey", "passkey", {4096: 20, 8192: 3}),
        *ruler(),
    ]
    assert stems(results) == [
        *("ruler", "passkey", "longeval", "longeval-lines_200", "needle-teacher_forced", "needle-generated"),
        *("perplexity", "short"),
    ]
    titles = {stem: figure.title for stem, figure in evaluation_figures("m", results, 85.6)}
    assert titles["ruler"] == "m: RULER"
    assert titles["passkey"] == "m: passkey"
    assert titles["longeval-lines_200"] == "m: longeval, lines_200"
    assert titles["needle-teacher_forced"] == "m: needle, teacher_forced"
    assert titles["short"] == "m: short-context tasks"


def test_figures_mark_what_the_model_was_made_for_and_the_threshold() -> None:
    stated = {"max_position_embeddings": 6000}
    results = [scored("passkey", "passkey", n, 15, 20, **stated) for n in (4096, 8192)]
    ((_, figure),) = evaluation_figures("m", results, 70)
    assert rules(only(figure)) == {"threshold\n70": 70, "trained length 6,000": 6000}


def test_what_was_not_run_has_no_figure() -> None:
    reason = "no text was given"
    for suite, task in (
        ("passkey", "passkey"),
        ("ruler", "vt"),
        ("needle", "teacher_forced"),
        ("short", "mmlu"),
    ):
        assert stems([TaskResult.not_run(suite, task, None, reason)]) == []
    # As behind a server, which gives no likelihoods.
    forced = [TaskResult.not_run("needle", "teacher_forced", n, reason) for n in LENGTHS[:2]]
    assert stems([*needle(LENGTHS[:2]), *forced]) == ["needle-generated"]


def test_a_benchmark_that_nobody_named_is_shown_by_what_its_results_say() -> None:
    """Adding a benchmark needs no edit here: a table and a figure a task, and by depth where there are depths."""
    results = [
        *retrieval("copying", "copying", {4096: 20, 8192: 3}),
        *retrieval("copying", "backwards{0}", {4096: 9}),
    ]
    tables = evaluation_tables({"m": results})
    assert [table.title for table in tables] == [
        "copying: correct answers in percent with 95 % interval",
        "copying backwards{0}: correct answers in percent with 95 % interval",
    ]
    assert tables[0].rows[1] == ("8,192", "20", "15.0", "5.2 to 36.0")
    assert stems(results) == ["copying", "copying-backwards{0}"]
    by_depth = [scored("copying", "copying", r.length, 3, 5, **r.details) for r in needle(LENGTHS[:2])]
    assert [table.title.split(": ")[0] for table in evaluation_tables({"m": by_depth})] == [
        "copying",
        "copying, by depth",
    ]
    with_overall = [scored("new", task, 4096, 3, 5) for task in ("a", "b", "overall")]
    (table,) = evaluation_tables({"m": with_overall})
    assert [row[0] for row in table.rows] == ["a", "b", "overall"]
    ((stem, figure),) = evaluation_figures("m", with_overall, 85.6)
    assert (stem, [panel.get_title() for panel in panels(figure)]) == ("new", ["a", "b", "overall"])


def test_perplexity_by_position_is_drawn_of_the_longest_rows() -> None:
    ((stem, figure),) = evaluation_figures("m", [BEFORE], 85.6)
    assert (stem, figure.title) == ("perplexity", "m: perplexity by position")
    assert ticks(only(figure).xaxis)[-1] == "2k"


def test_a_task_in_foreign_results_draws_no_figure_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = TaskResult("passkey", "x/../../victim", 512, 4, 50.0, (25.0, 75.0))
    with pytest.raises(RopewalkError, match=r"results\.json lists the file 'passkey-x/../../victim\.png'"):
        list(pictures_of(out, "model", [result], 85.0))
    assert list(tmp_path.iterdir()) == []


def test_a_star_in_a_suites_title_stands_for_the_rest_of_a_tasks_name() -> None:
    (table,) = evaluation_tables({"m": [scored("longeval", "lines_200", 4096, 3, 5)]})
    assert table.title.startswith("LongEval, records of 200 lines: ")


def test_sentences_write_lengths_as_the_tables_do():
    effective = {"suite": "passkey", "task": "passkey", "threshold": 85.6, "longest": 131072}
    lengths = [{**effective, "length": 131072, "certain": 65536}, {**effective, "length": 4096, "certain": 0}]
    summary = {"effective_length": lengths, "ruler_weighted_average": None}
    assert list(effective_sentences(summary)) == [
        "Effective length by passkey: at least 131,072 (above 85.6 %; the 95 % intervals confirm 65,536)",
        "Effective length by passkey: 4,096 (above 85.6 %; the 95 % intervals confirm no length)",
    ]


def test_sentences_name_the_base_score():
    effective = {
        "suite": "nolima",
        "task": "nolima",
        "threshold": 68.0,
        "longest": 8192,
        "base": [80.0, 71.0, 86.6],
    }
    found = [{**effective, "length": length, "certain": None} for length in (4096, None)]
    found.append({**found[1], "base": [0.0, 0.0, 3.7]})
    bar = "85 % of the base score, which is 80 % (71–87)"
    assert list(effective_sentences({"effective_length": found, "ruler_weighted_average": None})) == [
        f"Effective length by nolima: 4,096 (at least {bar}; the 95 % intervals confirm no length)",
        f"Effective length by nolima: none; the score at the shortest length is less than {bar}",
        "Effective length by nolima: none; the score at all short lengths is 0 %",
    ]
