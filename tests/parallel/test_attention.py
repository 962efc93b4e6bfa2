"""Attention over rows that are cut: a rank alone computes attend itself, and padding is no token."""

import pytest
import torch

from ropewalk import PackedLayout, RopewalkError, attend
from ropewalk.attention.options import AttentionOptions
from ropewalk.parallel import ShardedLayouts, sharded_attend
from ropewalk.parallel.mesh import SequenceGroups

LAYOUT = PackedLayout.from_lengths([5, 9, 3], "anchor", 1)


def tensors(length, heads=4, kv_heads=2):
    torch.manual_seed(0)
    return tuple(torch.randn(1, n, length, 8) for n in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("engine", ["sdpa", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(scale=0.5),
        AttentionOptions(softcap=2.0),
        AttentionOptions(window=3),
        AttentionOptions(sinks=torch.arange(4.0)),
    ],
    ids=["plain", "scale", "soft cap", "window", "sinks"],
)
def test_a_rank_alone_computes_attend_to_the_last_bit(engine, options):
    q, k, v = tensors(18)
    sharded = ShardedLayouts.of([LAYOUT], SequenceGroups())
    found = sharded_attend(q, k, v, sharded, engine, options)
    assert torch.equal(found, attend(q, k, v, [LAYOUT], engine, options))


def test_the_scale_is_that_of_the_heads_where_none_is_given():
    q, k, v = tensors(18)
    sharded = ShardedLayouts.of([LAYOUT], SequenceGroups())
    given = sharded_attend(q, k, v, sharded, "sdpa", AttentionOptions(scale=8**-0.5))
    assert torch.equal(sharded_attend(q, k, v, sharded, "sdpa"), given)


def test_places_after_the_row_change_nothing_and_are_zero():
    q, k, v = tensors(21)
    sharded = ShardedLayouts.of([LAYOUT], SequenceGroups())
    output = sharded_attend(q, k, v, sharded, "sdpa")
    whole = attend(*(x[:, :, :18] for x in (q, k, v)), [LAYOUT], "sdpa")
    assert torch.equal(output[:, :, :18], whole)
    assert torch.count_nonzero(output[:, :, 18:]) == 0


def test_rows_that_contradict_their_layouts_are_refused():
    q, k, v = tensors(18)
    sharded = ShardedLayouts.of([LAYOUT, LAYOUT], SequenceGroups())
    with pytest.raises(RopewalkError):
        sharded_attend(q, k, v, sharded, "sdpa")
