"""Tables of an evaluation: every score with its n and interval, every gap with its reason, and no more."""

import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ropewalk.evaluation.comparison import compare
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import ScoreRow
from ropewalk.evaluation.statistics import NO_INTERVAL
from ropewalk.reporting import ResultTable, comparison_table, evaluation_tables
from ropewalk.reporting.scores.tables import grid_tables
from tests.reporting.evaluation_results import (
    DIFFERENCES,
    LENGTHS,
    NO_ESSAYS,
    NO_QUESTIONS,
    RULER_TASKS,
    documents,
    needle,
    retrieval,
    ruler,
    scored,
    short,
)
from tests.reporting.reporting_cases import AFTER, BEFORE, passkey, perplexity

SKIPPED = TaskResult.not_run("passkey", "passkey", 2048, "the model has no tokenizer")


def printed(table: ResultTable, width: int = 100) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table.rich())
    return capture.get().splitlines()


def column(table: ResultTable, heading: str) -> list[str]:
    return [row[table.header.index(heading)] for row in table.rows]


def row(table: ResultTable, name: str) -> tuple[str, ...]:
    (found,) = [row for row in table.rows if row[0] == name]
    return found[1:]


def every_result() -> list[TaskResult]:
    key_tokens = {"n_key_tokens": 4500}
    return [
        *short(),
        *ruler(),
        *retrieval("passkey", "passkey", {4096: 20, 8192: 3}),
        *needle(),
        *needle(LENGTHS[:2], task="teacher_forced"),
        *retrieval("longeval", "lines", {8192: 12}, 50),
        BEFORE,
        documents("truncated"),
        documents("sliding"),
        TaskResult("longppl", "longppl", 8192, 7, 3.3, (3.1, 3.6), details=key_tokens, unit="perplexity"),
        scored("lm_eval", "my_task", None, 3, 4),
    ]


def test_ruler_has_a_row_a_task_and_a_column_a_length() -> None:
    (table,) = evaluation_tables({"m": ruler()})
    assert table.header == ("task", *(f"{length:,}" for length in LENGTHS))
    assert column(table, "task") == [*RULER_TASKS, "overall"]
    assert table.title == (
        "RULER: correct answers in percent with 95 % interval; 100 samples per task and length"
    )
    assert row(table, "vt")[:2] == ("100 (96–100)", "82.0 (73–89)")
    assert row(table, "qa_2") == ("not run²",) * 6
    assert row(table, "niah_single_2")[-1] == "not run¹"
    assert table.notes == (
        f"¹ not run: {NO_ESSAYS}",
        f"² not run: {NO_QUESTIONS}",
        "overall at 4,096, 8,192, 16,384, 32,768 and 65,536: unweighted mean of 11 tasks (1,100 samples) "
        "without qa_1, qa_2",
        "overall at 131,072: unweighted mean of 10 tasks (1,000 samples) without niah_single_2, qa_1, qa_2",
    )


def test_few_lengths_have_room_for_words() -> None:
    (table,) = evaluation_tables({"m": ruler(LENGTHS[:2])})
    assert row(table, "vt") == ("100 (96 to 100)", "82.0 (73 to 89)")


def test_a_ruler_table_fits_a_hundred_characters_whole() -> None:
    (table,) = evaluation_tables({"m": ruler()})
    lines = printed(table)
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)
    body = [line for line in lines if line.startswith("niah")]
    assert len(body) == 8


def test_many_lengths_go_on_in_a_further_table() -> None:
    lengths = [1024 * n for n in range(1, 14)]
    tables = evaluation_tables({"m": ruler(lengths)})
    assert len(tables) > 1
    assert [cell for table in tables for cell in table.header[1:]] == [f"{1024 * n:,}" for n in range(1, 14)]
    for table in tables:
        assert f", {table.header[1]} to {table.header[-1]}" in table.title
        assert "…" not in "".join(printed(table))
        assert column(table, "task")[-1] == "overall"


def test_tasks_that_were_left_out_on_purpose_are_named_with_their_reason() -> None:
    kept = [r for r in ruler(LENGTHS[:2]) if r.task not in ("cwe", "niah_multikey_3")]
    out = {"cwe": "left out by --exclude", "niah_multikey_3": "left out by --exclude", "qa_1": NO_QUESTIONS}
    kept = [
        replace(r, details={"tasks": ["a"] * 9, "left_out": out}) if r.task == "overall" else r for r in kept
    ]
    (table,) = evaluation_tables({"m": kept})
    assert table.notes[-1] == "left out: cwe, niah_multikey_3 (left out by --exclude)"
    assert sum(NO_QUESTIONS in note for note in table.notes) == 1


def test_a_task_that_has_no_length_at_all_fills_its_row() -> None:
    results = [scored("ruler", "vt", 4096, 3, 4), TaskResult.not_run("ruler", "qa_1", None, NO_QUESTIONS)]
    (table,) = evaluation_tables({"m": results})
    assert row(table, "qa_1") == ("not run¹",)
    (table,) = evaluation_tables({"m": results[1:]})
    assert table.header == ("task", "all lengths")
    assert table.rows == (("qa_1", "not run¹"),)


def test_several_models_have_a_ruler_table_each_and_share_the_others() -> None:
    series = {
        "before": [*ruler(LENGTHS[:1]), *retrieval("passkey", "passkey", {4096: 20}), *short()],
        "after": [*ruler(LENGTHS[:2]), *retrieval("passkey", "passkey", {4096: 20, 8192: 3}), *short(0.05)],
    }
    before, after, retrieved, kept = evaluation_tables(series)
    assert (before.title[:15], after.title[:14]) == ("RULER of before", "RULER of after")
    assert retrieved.header == ("length in tokens", "samples", "before", "95 %", "after", "95 %")
    assert retrieved.rows[1] == ("8,192", "20", "–", "–", "15.0", "5.2 to 36.0")
    assert kept.header == ("task", "metric", "shots", "samples", "before", "95 %", "after", "95 %")
    assert row(kept, "hellaswag") == (
        *("acc_norm", "10", "1,000"),
        *("79.0 %", "76.4 to 81.4 %", "74.0 %", "71.2 to 76.6 %"),
    )
    assert row(kept, "truthfulqa_mc2") == ("–", "–", "–", "not run¹", "–", "not run¹", "–")
    assert kept.notes == ("¹ not run: its data set could not be reached",)


def test_needle_by_depth_has_lengths_across_and_depths_down() -> None:
    total, by_depth = evaluation_tables({"m": needle(LENGTHS[2:4], 4)})
    assert column(total, "samples") == ["20", "20"]
    assert column(by_depth, "depth") == ["0 %", "33.3 %", "66.7 %", "100 %"]
    assert by_depth.header == ("depth", "16,384", "32,768")
    assert by_depth.title.endswith("; 5 samples per depth and length")
    assert row(by_depth, "0 %") == ("100 (56 to 100)", "100 (56 to 100)")
    skipped = TaskResult.not_run("needle", "generated", 65536, "out of memory")
    odd = needle(LENGTHS[3:4], 3)
    _, by_depth = evaluation_tables({"m": [*needle(LENGTHS[:1], 4), *odd, skipped]})
    assert row(by_depth, "33.3 %")[1:] == ("–", "not run¹")
    assert row(by_depth, "50 %")[0] == "–"


def test_both_averages_of_documents_are_named_and_shown() -> None:
    (table,) = evaluation_tables({"m": [documents("sliding"), documents("truncated")]})
    assert table.header == (
        *(
            "task",
            "metric",
            "length in tokens",
            "documents",
            "stride",
            "windows",
            "tokens",
            "perplexity",
            "95 %",
        ),
    )
    assert table.rows[:3] == (
        ("sliding", "by token", "4,096", "7", "256", "1,234", "99,000", "8.12", "7.72 to 8.53"),
        ("sliding", "published", "4,096", "7", "256", "1,234", "99,000", "9.46", "8.51 to 10.40"),
        ("truncated", "by token", "4,096", "7", "–", "1,234", "99,000", "8.12", "7.72 to 8.53"),
    )
    assert any("mean of the windows' mean losses" in note for note in table.notes)
    broken = replace(documents("sliding"), details={"published": None, "published_ci95": [None, None]})
    (table,) = evaluation_tables({"m": [broken]})
    assert table.rows[1][-2:] == ("–", "–")
    missing = TaskResult.not_run("perplexity", "sliding", 4096, "no text", "perplexity")
    (table,) = evaluation_tables({"m": [missing]})
    assert table.rows == (("sliding", "4,096", "–", "not run¹", "–"),)


def test_a_score_that_did_not_run_stands_in_the_line_of_the_same_metric() -> None:
    missing = TaskResult.not_run("perplexity", "sliding", 4096, "no text", "perplexity")
    (table,) = evaluation_tables({"a": [missing], "b": [documents("sliding")]})
    assert [(row[1], row[-4]) for row in table.rows] == [("by token", "not run¹"), ("published", "–")]


def test_every_suite_is_shown_in_order_and_none_is_lost() -> None:
    tables = evaluation_tables({"m": every_result()})
    assert [table.title.split(":")[0].split(",")[0] for table in tables] == [
        "RULER",
        "Passkey retrieval",
        "LongEval lines",
        *["Needle"] * 4,
        "Perplexity by position in 16 sequences of 2",
        "Perplexity of documents",
        "LongPPL",
        "Short context",
        "lm_eval tasks",
    ]
    unknown = scored("new suite", "new task", None, 1, 4)
    (table,) = evaluation_tables({"m": [unknown]})
    assert table.rows == (("new task", "4", "25.0 %", "4.6 to 69.9 %"),)
    assert evaluation_tables({"m": []}) == []
    assert evaluation_tables({}) == []


def test_needle_tables_name_the_haystack_that_was_run() -> None:
    def titles(*haystacks: str | None) -> list[str]:
        results = [
            replace(r, details={**r.details, **({"haystack": haystack} if haystack else {})})
            for haystack, r in zip(haystacks, needle(LENGTHS[: len(haystacks)]), strict=True)
        ]
        return [table.title.split(":")[0] for table in evaluation_tables({"m": results})]

    assert titles("noise", "noise") == [
        "Needle in repeated noise, generated answers",
        "Needle in repeated noise, generated answers, by depth",
    ]
    assert titles("essay")[0] == "Needle in essays, generated answers"
    assert titles("noise", "essay")[0] == titles(None)[0] == "Needle, generated answers"


def test_no_number_stands_without_its_n() -> None:
    for table in evaluation_tables({"m": every_result()}):
        counted = {"samples", "documents", "tokens"} & set(table.header)
        assert counted or re.search(r"[\d,]+ samples per", table.title), table.title


def cell(score: float, n: int = 50, ends: tuple[float, float] = NO_INTERVAL, **changes) -> ScoreRow:
    return ScoreRow("copying", "copying", 4096, "m", score, ends, n, **changes)


def not_run(note: str) -> ScoreRow:
    return cell(math.nan, 0, ran=False, note=note)


def test_n_is_said_where_it_differs() -> None:
    lengths, skipped = [4096, 8192], not_run("no text")
    cells = {"a": [cell(50, 10), cell(50, 20)], "b": [cell(50, 10), skipped]}
    (table,) = grid_tables("t", "task", cells, lengths)
    assert (table.title, table.header) == ("t", ("task", "4,096 (n 10)", "8,192 (n 20)"))
    cells["b"][1] = cell(50, 10)
    (table,) = grid_tables("t", "task", cells, lengths)
    assert table.header == ("task", "samples", "4,096", "8,192")
    assert column(table, "samples") == ["10 / 20", "10"]
    (table,) = grid_tables("t", "task", {"b": [skipped]}, lengths[:1])
    assert (table.title, table.rows) == ("t", (("b", "not run¹"),))


@pytest.mark.parametrize(
    ("row", "wide", "narrow"),
    [
        (cell(93.76, 50, (88.4, 96.6)), "93.8 (88 to 97)", "93.8 (88–97)"),
        (cell(100.0, 50, (92.9, 100.0)), "100 (92 to 100)", "100 (92–100)"),
        # Rounded outwards: an interval must not look narrower than it is, but for float noise.
        (cell(50.0, 50, (29.0 - 1e-12, 71.0 + 1e-12)), "50.0 (29 to 71)", "50.0 (29–71)"),
        (cell(50.0, 1, note="a remark"), "50.0¹", "50.0¹"),
        (not_run("no text"), "not run¹", "not run¹"),
        (None, "–", "–"),
        (cell(0.0, 20, (0.0, 16.1)), "0.0 (0 to 17)", "0.0 (0–17)"),
    ],
)
def test_cells(row: ScoreRow | None, wide: str, narrow: str) -> None:
    for count, expected in ((1, wide), (6, narrow)):
        lengths = [4096 + 1024 * n for n in range(count)]
        (table,) = grid_tables("t", "task", {"a": [row] * count}, lengths)
        fits = len(wide) < 14
        assert table.rows[0][-1] == (wide if fits else expected)


def test_a_remark_on_a_score_is_marked() -> None:
    remarked = replace(scored("short", "mmlu", None, 3, 4), reason="2 prompts were cut")
    (table,) = evaluation_tables({"m": [remarked]})
    assert row(table, "mmlu")[1] == "75.0 %¹"
    assert table.notes == ("¹ 2 prompts were cut",)


def test_reasons_that_a_server_wrote_are_short_and_harmless() -> None:
    reason = "\x1b[31m" + "x" * 100_000
    (table,) = evaluation_tables({"m": [TaskResult.not_run("passkey", "passkey", 4096, reason)]})
    (note,) = table.notes
    assert len(note) < 400
    assert "\x1b" not in note


def test_means_over_checkpoints_say_how_far_they_lie_apart() -> None:
    each = [{"name": f"checkpoint-{n}", "score": n} for n in (40, 50, 60)]
    mean = replace(
        scored("passkey", "passkey", 4096, 10, 20),
        details={"checkpoints": each, "spread": {"sd": 10.0, "min": 40.0, "max": 60.0}},
    )
    one = replace(
        scored("ruler", "overall", 8192, 10, 20),
        details={"checkpoints": each[:1], "spread": {"sd": None, "min": 40.0, "max": 40.0}},
    )
    table = evaluation_tables({"m": [mean, one]})[-1]
    assert table.title.startswith("Means over 3 checkpoints")
    assert table.notes == ("checkpoints: checkpoint-40, checkpoint-50, checkpoint-60",)
    assert table.header == ("task", "length", "samples", "unit", "mean", "std dev", "lowest to highest")
    assert table.rows == (
        ("passkey", "4,096", "20", "%", "50.0", "10.0", "40.0 to 60.0"),
        ("ruler overall", "8,192", "20", "%", "50.0", "–", "40.0 to 40.0"),
    )


def test_comparison_says_what_is_real_and_what_was_not_compared() -> None:
    table = comparison_table(DIFFERENCES)
    assert table.rows[1] == (
        *("niah_multikey_2", "131,072", "100", "80.0", "67.7"),
        *("-12.3", "-16.3 to -8.3", "<0.001", "<0.001", "yes"),
    )
    assert table.rows[0][-4:] == ("-1.5 to +2.5", "0.300", "0.600", "no")
    assert table.rows[3] == ("qa_1", "4,096", "–", "80.0", "–", "–", "–", "–", "–", "–¹")
    assert table.rows[6][:6] == ("perplexity sliding", "8,192", "7", "8.12", "7.84", "-3.4 %")
    assert "Bonett and Price" in table.notes[1]
    assert "Student" in table.notes[1]
    assert table.notes[2] == f"¹ not compared: not run in B: {NO_QUESTIONS}"
    assert "sig.: significant, p below 0.05 after Holm" in table.notes[0]
    lines = printed(table)
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(lines)


def test_comparison_of_real_results() -> None:
    """Through the code that makes differences, so that names and units are those that it gives."""

    def result(right: int) -> TaskResult:
        samples = tuple({"index": n, "score": 100.0 * (n < right)} for n in range(50))
        return replace(scored("passkey", "passkey", 4096, right, 50, samples_sha256="7"), samples=samples)

    table = comparison_table(compare([result(10)], [result(40)]), ("base", "longer"))
    assert table.title == "Change from base to longer in percentage points, paired by sample, 95 % interval"
    (found,) = table.rows
    assert found[:6] == ("passkey", "4,096", "50", "20.0", "80.0", "+60.0")
    assert found[-1] == "yes"


def test_missing_numbers_are_never_zeros() -> None:
    nan = TaskResult("perplexity", "sliding", 4096, 3, math.nan, NO_INTERVAL, "ok", "no finite number", {})
    (table,) = evaluation_tables({"m": [replace(nan, unit="perplexity")]})
    assert table.rows[0] == ("sliding", "4,096", "3", "–¹", "–")


def test_before_and_after_stand_side_by_side() -> None:
    tables = evaluation_tables(
        {
            "before": [BEFORE, passkey(512, 19), SKIPPED],
            "after": [AFTER, passkey(512, 20), passkey(2048, 3, 30)],
        }
    )
    retrieval, by_position = tables
    assert (
        by_position.title
        == "Perplexity by position in 16 sequences of 2,048 tokens, with 95 % interval over sequences"
    )
    assert by_position.header == ("position", "tokens", "before", "95 %", "after", "95 %")
    assert by_position.rows[1] == ("512 to 1,023", "8,000", "2.79", "2.51 to 3.07", "2.50", "2.25 to 2.75")
    assert by_position.rows[-1][:3] == ("all", "32,000", f"{BEFORE.score:.2f}")
    assert retrieval.header == ("length in tokens", "samples", "before", "95 %", "after", "95 %")
    assert retrieval.rows == (
        ("512", "20", "95.0", "76.4 to 99.1", "100.0", "83.9 to 100.0"),
        ("2,048", "30", "not run¹", "–", "10.0", "3.5 to 25.6"),
    )
    assert retrieval.notes == ("¹ not run: the model has no tokenizer",)


def test_lengths_and_bins_that_one_model_lacks_leave_dashes() -> None:
    other = perplexity([3.0, 2.0], [0, 1024, 2048])
    (table,) = evaluation_tables({"a": [BEFORE], "b": [other]})
    assert table.rows[0] == ("0 to 511", "8,000", "2.64", "2.38 to 2.90", "–", "–")
    assert table.rows[1] == ("0 to 1,023", "8,000", "–", "–", "3.00", "2.70 to 3.30")
    (table,) = evaluation_tables({"a": [], "b": [passkey(512, 1, 10), passkey(256, 1, 20)]})
    assert [row[:4] for row in table.rows] == [("256", "20", "–", "–"), ("512", "10", "–", "–")]


def test_one_model_and_no_model() -> None:
    (table,) = evaluation_tables({"some/model": [AFTER]})
    assert table.header == ("position", "tokens", "perplexity", "95 %")
    assert evaluation_tables({}) == []
    not_run = TaskResult.not_run("perplexity", "perplexity", 64, "no text was given")
    (table,) = evaluation_tables({"a": [not_run]})
    assert table.rows == (("all", "not run¹", "–"),)
    assert table.notes == ("¹ not run: no text was given",)


def test_results_without_a_length_have_a_row_of_their_own() -> None:
    nowhere = TaskResult.not_run("passkey", "passkey", None, "no chat template")
    (table,) = evaluation_tables({"a": [nowhere, passkey(512, 1, 10)]})
    assert [row[:3] for row in table.rows] == [("512", "10", "10.0"), ("all lengths", "–", "not run¹")]
    (table,) = evaluation_tables({"a": [TaskResult.not_run("perplexity", "perplexity", None, "no text")]})
    assert table.title == "Perplexity by position, with 95 % interval over sequences"


def test_other_perplexities_are_not_taken_for_those_by_position() -> None:
    sliding = TaskResult("perplexity", "sliding", 2048, 3, 99.0, (90.0, 110.0), unit="perplexity")
    table, others = evaluation_tables({"a": [sliding, AFTER]})
    assert [row[0] for row in others.rows] == ["sliding"]
    assert table.rows[-1][2] == f"{AFTER.score:.2f}"


def test_a_table_of_perplexities_says_which_texts_were_drawn() -> None:
    drawn = replace(BEFORE, details={**BEFORE.details, "sources": {"web": 3, "books": 13}})
    (table,) = evaluation_tables({"before": [drawn], "after": [drawn]})
    assert table.notes == ("text drawn at random: 16 documents (books 13, web 3)",)
    many = replace(BEFORE, details={"sources": {f"file {n}": 1 for n in range(9)}})
    (table,) = evaluation_tables({"before": [many]})
    assert table.notes[0].endswith("file 5 1 and 3 more sources)")
    assert evaluation_tables({"before": [BEFORE]})[0].notes == ()
