"""Mitigations: each drifts less, and what a layout truly changes is not called drift."""

import pytest
import torch

from ropewalk import PackedLayout, RopewalkError
from ropewalk.audit import EXACT, measure_mitigations, stock_arithmetic
from ropewalk.audit.ablation import moved
from ropewalk.audit.mitigations import anchored, changes, documents_of, separated
from tests.audit.audit_cases import FAR, LOW


@pytest.fixture(scope="module")
def mitigations(runner, rows):
    layouts = [PackedLayout.from_lengths([20, 30, 14], "full", 0)] * len(rows)
    return {
        mitigation.name: mitigation
        for mitigation in measure_mitigations(runner, rows, layouts, LOW, (0, FAR))
    }


@pytest.mark.slow
def test_each_mend_of_arithmetic_drifts_less_than_the_one_before(mitigations):
    order = ["fused attention", "float32 rotation", "tf32 attention", "float32 attention"]
    drifts = [mitigations[name].D for name in order]
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[-1] < drifts[0] / 5
    errors = [mitigations[name].logit_error for name in ("fused attention", "float32 attention")]
    assert errors[0] > errors[1]


def test_positions_that_restart_cannot_drift(mitigations):
    reset = mitigations["positions reset"]
    assert reset.D == reset.far_D == 0
    # They are as wrong as any, only the same everywhere.
    assert reset.logit_error > mitigations["float32 attention"].logit_error


def test_what_the_anchor_truly_changes_is_not_called_drift(runner, rows):
    """Documents move and the anchor does not: relative positions change, in float64 too."""
    layout = changes(LOW, PackedLayout.from_lengths([30, 34], "full", 0))["anchor layout"].layout
    exact = [runner.run(rows[0], EXACT, moved(layout, shift), layout).received.mean(1) for shift in (0, 16)]
    true_change = float((exact[0] - exact[1]).abs().sum(-1).mean())
    row_layouts = [PackedLayout.from_lengths([30, 34], "full", 0)]
    (anchor,) = [
        m
        for m in measure_mitigations(runner, rows[:1], row_layouts, stock_arithmetic(torch.float32), (0, 100))
        if m.name == "anchor layout"
    ]
    assert true_change > 0.1
    assert true_change / 100 > anchor.D


def test_float32_needs_no_float32_attention():
    layout = PackedLayout.from_lengths([2, 3], "full", 0)
    assert "float32 attention" not in changes(stock_arithmetic(torch.float32), layout)
    assert "split product" not in changes(stock_arithmetic(torch.float16), layout)
    assert len(changes(LOW, layout)) == 9


def test_a_row_of_one_document_is_laid_out_as_four():
    one = PackedLayout.from_lengths([11], "full", 0)
    assert documents_of(one).cu_seqlens.tolist() == [0, 2, 4, 6, 11]
    with pytest.raises(RopewalkError, match="7 tokens"):
        documents_of(PackedLayout.from_lengths([7], "full", 0))


def test_layouts_of_the_layout_mends():
    layout = PackedLayout.from_segments([1, 3, 2, 4], [0, 1, 2, 1], "full", 0)
    found = anchored(layout)
    assert (found.pattern, found.anchor_length, found.total_length) == ("anchor", 1, 10)
    # The first document was one token, which is the anchor now.
    assert found.document_ids.tolist() == [-1, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert found.position_ids.tolist() == list(range(10))
    found = separated(layout)
    assert (found.pattern, found.anchor_length) == ("intra_document", 0)
    assert found.document_ids.tolist() == layout.document_ids.tolist()
    assert found.position_ids.tolist() == [0, 0, 1, 2, 0, 1, 3, 4, 5, 6]
    layout = PackedLayout.from_lengths([3, 2], "full", 2)
    assert anchored(layout).document_ids.tolist() == layout.document_ids.tolist()
    assert separated(layout).document_ids.tolist() == [0, 0, 0, 0, 0, 1, 1]
