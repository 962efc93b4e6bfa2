"""Rows on both sides of a longrope's original length in one batch: each is as alone, on one process and on two."""

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.models.rope.rotary import rope_of
from ropewalk.rope import LongRope
from tests.longrope_cases import ORIGINAL, TARGET
from tests.models.attention.two_ropes_cases import (
    LAYOUTS,
    PAIRS,
    ROPE,
    SHORT,
    each_call_decides,
    ids,
    in_one_batch,
    model_of,
    on_ranks,
    the_longest_decides,
)

ROUNDING = 1e-12
"""Of the largest value: sums of some hundred terms in another order, in float64."""
WRONG = 1e-3


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("rows_module", [False, True])
def test_rows_of_a_batch_equal_each_row_alone(checkpointed, rows_module):
    logits, gradients = in_one_batch(checkpointed=checkpointed, rows_module=rows_module)
    assert logits <= ROUNDING
    assert gradients <= ROUNDING


@pytest.mark.parametrize("broken", [the_longest_decides, each_call_decides])
def test_rows_would_differ_if_the_longest_decided(broken):
    assert min(in_one_batch(broken)) > WRONG


@pytest.mark.parametrize("shape", [{"sequence": 2}, {"ring": 2}], ids=str)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_on_ranks_equal_each_row_alone(two_ranks, shape, checkpointed):
    for logits, gradients in two_ranks.run(on_ranks, shape, None, checkpointed):
        assert logits <= ROUNDING
        assert gradients <= ROUNDING


@pytest.mark.parametrize("shape", [{"sequence": 2}, {"ring": 2}], ids=str)
def test_rows_on_ranks_would_differ_if_the_longest_decided(two_ranks, shape):
    for found in two_ranks.run(on_ranks, shape, the_longest_decides):
        assert max(found) > WRONG


def test_the_length_of_a_layout_is_its_largest_position_and_one():
    assert [layout.rope_length <= ORIGINAL for layout in LAYOUTS] == list(SHORT)
    assert [layout.rope_length for layout in LAYOUTS] == [TARGET, ORIGINAL, TARGET, ORIGINAL]
    assert PackedLayout.from_lengths([5, 9], "anchor", 2, "reset").rope_length == 11


def test_positions_that_are_given_decide_for_each_row():
    """A short row and the same one far behind, in one batch: the second has the long factors."""
    model, layout, row = model_of(), LAYOUTS[1], ids()[[1]]
    positions = torch.stack([layout.position_ids, layout.position_ids + TARGET])
    long = LongRope(2 * PAIRS, 1e4, ROPE.long_factor, ROPE.long_factor, ROPE.attention_factor, ORIGINAL)
    with torch.no_grad(), rope_of(model, ROPE):
        near, far = model(row.expand(2, -1), layout=[layout] * 2, position_ids=positions).logits
        alone = model(row, layout=[layout]).logits[0]
    with torch.no_grad(), rope_of(model, long):
        shifted = model(row, layout=[layout], position_ids=positions[1:]).logits[0]
    for found, expected in ((near, alone), (far, shifted)):
        assert float((found - expected).abs().max()) <= ROUNDING * float(expected.abs().max())
    assert float((near - far).abs().max()) > WRONG * float(far.abs().max())
