"""How an audit is shown: every figure of it in a table, and every picture drawn or its absence said."""

from dataclasses import replace

import pytest

from ropewalk.audit import AuditSettings, audit_model
from ropewalk.reporting.audit import audit_tables, draw_audit, series_name
from tests.audit.audit_cases import sharp_llama, token_rows


@pytest.fixture(scope="module")
def found():
    settings = AuditSettings(shifts=(0, 16, 1000), ablation_samples=1)
    return audit_model(sharp_llama(), token_rows(2, 32), settings)


def test_each_curve_of_the_drift_is_a_row_and_each_shift_a_column(found):
    drift = audit_tables(found)[0]
    assert drift.header == ("arithmetic", "0", "16", "1,000")
    names = {series_name(each.dtype, each.angles, each.parameters) for each in found.drift}
    assert {row[0] for row in drift.rows} == names
    cells = {
        (row[0], shift): cell
        for row in drift.rows
        for shift, cell in zip((0, 16, 1000), row[1:], strict=True)
    }
    for each in found.drift:
        cell = cells[series_name(each.dtype, each.angles, each.parameters), each.delta1]
        assert float(cell) == pytest.approx(each.D, rel=0.06)


def test_every_step_mitigation_and_stage_stands_in_a_table(found):
    _, ablation, first, mitigations, rope = audit_tables(found)
    assert len(ablation.rows) == len({each.step for each in found.ablation})
    assert len(first.rows) == len(found.first_token)
    assert len(mitigations.rows) == len(found.mitigations)
    assert "so their D is not comparable with the others" in mitigations.notes[0]
    assert len(rope.rows) == len(found.rope)


def test_what_overflows_is_not_shown_as_a_number(found):
    drift = tuple(replace(each, D=float("nan")) if each.dtype == "float16" else each for each in found.drift)
    table = audit_tables(replace(found, drift=drift))[0]
    rows = {row[0]: row[1:] for row in table.rows}
    assert set(rows["float16"]) == {"not finite"}
    assert "not finite" not in rows["float32"]


@pytest.mark.slow
def test_every_picture_is_drawn_or_its_absence_is_said(found, tmp_path):
    files, missing = draw_audit(found, tmp_path, "tiny")
    assert len(files) + len(missing) == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)
