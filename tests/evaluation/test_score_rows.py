"""Rows of scores: each score of a result and each of its parts once, with its interval, and nothing made up."""

import math
from dataclasses import replace

from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import PUBLISHED, by_suite, by_task, score_records, score_rows
from ropewalk.reporting.scores.tables import evaluation_tables
from tests.reporting.evaluation_results import documents, needle, retrieval, ruler
from tests.reporting.reporting_cases import AFTER, BEFORE


def test_a_score_stands_before_its_parts_and_each_part_has_its_own_place():
    rows = score_rows({"before": [BEFORE], "after": [AFTER]})
    assert [row.when for row in rows] == ["before"] * 5 + ["after"] * 5
    whole, *parts = rows[:5]
    assert whole.is_whole
    assert (whole.value, whole.ci95, whole.n) == (BEFORE.score, BEFORE.ci95, BEFORE.n)
    assert [(row.cell, row.value, row.ci95, row.n) for row in parts] == [
        ((each.start, each.end), each.perplexity, each.ci95, each.n_windows) for each in BEFORE.positions
    ]
    assert not any(row.is_whole for row in parts)


def test_depths_are_rows_with_their_own_counts():
    (result,) = needle((4096,), depths=3)
    whole, *parts = score_rows({"model": [result]})
    assert whole.n == 15
    assert [(row.depth, row.n, row.value) for row in parts] == [
        (0.0, 5, 100.0),
        (0.5, 5, 100.0),
        (1.0, 5, 100.0),
    ]
    assert [list(row.ci95) for row in parts] == [each["ci95"] for each in result.details["depths"]]


def test_groups_are_rows_with_their_own_counts():
    easy, hard = (
        {"label": label, "n": n, "score": 50.0, "ci95": [10.0, 90.0]}
        for label, n in (("easy", 2), ("hard", 3))
    )
    (result,) = retrieval("longbench_v2", "longbench_v2", {4096: 10})
    grouped = replace(result, details={**result.details, "groups": {"difficulty": [easy, hard]}})
    whole, *parts = score_rows({"model": [grouped]})
    assert whole.is_whole
    assert not any(row.is_whole for row in parts)
    assert [(row.group, row.n, row.value, row.ci95) for row in parts] == [
        ("difficulty: easy", 2, 50, (10, 90)),
        ("difficulty: hard", 3, 50, (10, 90)),
    ]
    total, by_group = evaluation_tables({"m": [grouped]})
    assert by_group.title.startswith("LongBench v2")
    assert [row[0] for row in by_group.rows] == ["difficulty: easy", "difficulty: hard"]
    assert len(total.rows) == 1


def test_the_average_that_others_publish_is_another_metric_of_the_same_score():
    whole, published = score_rows({"model": [documents("truncated")]})
    assert (whole.value, published.value, published.metric) == (8.123, 9.456, PUBLISHED)
    assert whole.is_whole
    assert not published.is_whole
    missing = documents("truncated", published=math.nan)
    assert math.isnan(score_rows({"model": [missing]})[1].value)


def test_a_task_that_did_not_run_is_one_row_with_its_reason():
    (row,) = score_rows({"model": [TaskResult.not_run("passkey", "passkey", 2048, "no tokenizer")]})
    assert (row.ran, row.note, row.n) == (False, "no tokenizer", 0)
    assert math.isnan(row.value)


def test_suites_stand_in_the_order_of_the_registry_and_the_overall_score_last():
    rows = score_rows({"model": [*retrieval("passkey", "passkey", {4096: 20}), *ruler((4096,))]})
    assert list(by_suite(reversed(rows))) == list(by_suite(rows))
    assert list(by_task(reversed([row for row in rows if row.suite == "ruler"])))[-1] == "overall"


def test_records_are_the_rows_with_the_interval_as_two_columns():
    rows = score_rows({"before": [BEFORE]})
    records = score_records({"before": [BEFORE]})
    assert [(each["value"], each["low"], each["high"], each["start"], each["end"]) for each in records] == [
        (row.value, *row.ci95, *(row.cell or (None, None))) for row in rows
    ]
    assert set(records[0]) == set(vars(rows[0])) - {"ci95", "facts", "cell"} | {"low", "high", "start", "end"}
