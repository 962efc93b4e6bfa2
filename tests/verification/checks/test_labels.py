"""Targets are those that documents have, and a missing or wrong one is found."""

from dataclasses import replace

from ropewalk.attention.layout import PackedLayout, next_token_labels
from ropewalk.verification.checks.documents import packed_equals_separate
from ropewalk.verification.checks.labels import labels_of_rows
from tests.verification.verification_cases import with_layouts


def test_a_target_that_is_missing_is_found(case):
    labels = case.rows[1].labels.clone()
    labels[3] = -100
    rows = (case.rows[0], replace(case.rows[1], labels=labels), *case.rows[2:])
    outcome = labels_of_rows(replace(case, rows=rows))
    assert (outcome.error, outcome.passed) == (1.0, False)
    assert "token 3 of row 1 (document 0) has no target" in outcome.note


def test_an_anchor_of_several_tokens_has_no_target(case):
    layout = PackedLayout.from_lengths([20, 25], "anchor", anchor_length=3)
    anchored = with_layouts(case, [layout] * len(case.rows))
    assert labels_of_rows(anchored).passed
    assert packed_equals_separate(anchored).passed


def test_a_token_that_must_not_be_a_target_is_none(case):
    trained = case.trained[0].clone()
    trained[5] = False
    row = case.rows[0]
    masked = replace(row, labels=next_token_labels(row.input_ids, row.layout, trained))
    right = replace(case, rows=(masked, *case.rows[1:]), trained=(trained, *case.trained[1:]))
    assert labels_of_rows(right).passed
    assert not labels_of_rows(replace(right, rows=case.rows)).passed
