"""Plans of a ring against the layouts' dense masks, all ranks in one process."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.parallel import BALANCES, RowShards, ShardedLayouts, row_shards
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring_plan import ring_bytes, ring_plan
from ropewalk.testing import random_layout


def random_batch(seed, ring=None, total=None):
    """Layouts of a batch and how each row is cut, sometimes at random places, with ranks that hold nothing."""
    rng = random.Random(seed)
    ring = ring or rng.randint(1, 6)
    total = max(total or rng.choice([6, 7, 16, 33, 64]), ring)
    layouts = [
        random_layout(
            total, rng, interleaved=rng.random() < 0.3, max_anchor=rng.randint(0, min(9, total - 1))
        )
        for _ in range(rng.randint(1, 3))
    ]
    sequence, balance = rng.randint(1, 2), rng.choice(BALANCES)
    if ring == 1 or rng.random() < 0.3:
        rows = [random_cut(layout, ring, rng) for layout in layouts]
        length = max(row.ring_length for row in rows) + rng.randint(0, 3)
        return layouts, [RowShards(row.order, row.chunks, 1, length) for row in rows]
    sharded = ShardedLayouts.of(layouts, SequenceGroups(ring=ring, sequence=sequence), balance)
    return layouts, list(sharded.rows)


def random_cut(layout, ring, rng):
    cuts = sorted({0, layout.total_length, *(rng.randrange(layout.total_length) for _ in range(9))})
    owners = [rng.randrange(ring) for _ in cuts[1:]]
    chunks = tuple(
        tuple(chunk for chunk, owner in zip(pairwise(cuts), owners, strict=True) if owner == rank)
        for rank in range(ring)
    )
    return RowShards(layout.storage_in_order, chunks)


def plans_of(layouts, rows):
    return [ring_plan(tuple(layouts), tuple(rows), rank) for rank in range(rows[0].ring)]


def tokens_of(rows, rank):
    """``[places]``: the token in each place of a rank, counted through the batch; -1 in padding."""
    held = [row.tokens[rank] for row in rows]
    total = rows[0].total_length
    return torch.cat([torch.where(each < 0, each, each + row * total) for row, each in enumerate(held)])


def rounds_of(layouts, rows):
    """Every round of every rank, with its queries' tokens and the tokens in its buffer of keys."""
    plans = plans_of(layouts, rows)
    for rank, plan in enumerate(plans):
        for step, each in enumerate(plan.rounds):
            buffer = tokens_of(rows, each.source)
            if step:
                sender = plans[each.source].rounds[step]
                assert sender.destination == rank
                buffer = buffer[sender.sent]
            yield each, tokens_of(rows, rank), buffer


def counted(layouts, rows):
    """``[rows · total, rows · total]``: how often each query sees each key, by the plans."""
    size = len(rows) * rows[0].total_length
    pairs = torch.zeros(size, size, dtype=torch.int64)
    for each, queries, buffer in rounds_of(layouts, rows):
        assert len(buffer) == each.received
        for run in each.runs:
            q = queries[slice(*run.queries)]
            k = torch.cat([buffer[slice(*keys)] for keys in run.keys])
            assert len(k) == run.num_keys > 0
            seen = torch.ones(len(q), len(k), dtype=torch.int64)
            pairs[q[:, None], k[None]] += seen.tril(len(k) - len(q)) if each.causal else seen
    return pairs


@given(st.integers(0, 10**9))
def test_every_visible_pair_is_computed_once_and_no_other(seed):
    layouts, rows = random_batch(seed)
    expected = torch.block_diag(*(layout.dense_mask().long() for layout in layouts))
    assert torch.equal(counted(layouts, rows), expected)


@given(st.integers(0, 10**9))
def test_only_keys_that_the_receiver_sees_are_sent_and_each_once(seed):
    layouts, rows = random_batch(seed)
    visible = torch.block_diag(*(layout.dense_mask() for layout in layouts))
    for each, queries, buffer in rounds_of(layouts, rows):
        assert len(buffer.unique()) == len(buffer) or each.causal
        if not each.causal and len(buffer):
            assert visible[queries[queries >= 0]][:, buffer].any(dim=0).all()


@given(st.integers(0, 10**9))
def test_a_query_stands_in_one_run_and_a_layer_shares_no_keys_but_anchors(seed):
    layouts, rows = random_batch(seed)
    for each, queries, _ in rounds_of(layouts, rows):
        met = torch.zeros(len(queries), dtype=torch.int64)
        own = {}
        for run in each.runs:
            met[slice(*run.queries)] += 1
            own.setdefault(run.layer, torch.zeros(each.received, dtype=torch.int64))[slice(*run.own)] += 1
        assert int(met.max()) <= 1
        assert int(met[queries < 0].sum()) == 0
        assert all(int(keys.max()) <= 1 for keys in own.values() if len(keys))
        if each.causal:
            assert bool((met[queries >= 0] == 1).all())


@pytest.mark.parametrize("balance", ["contiguous", "auto"])
def test_documents_within_a_shard_send_nothing(balance):
    layouts = [PackedLayout.from_lengths([8] * 4, "intra_document", 0)]
    rows = [row_shards(layouts[0], 4, 1, balance)]
    for plan in plans_of(layouts, rows):
        assert [(each.sent.numel(), each.received, each.runs) for each in plan.rounds[1:]] == [(0, 0, ())] * 3
        assert ring_bytes(plan, 2, 8, 8, torch.float32) == (0, 0)


def test_the_anchor_alone_travels_to_documents_within_a_shard():
    layouts = [PackedLayout.from_lengths([6, 8, 8, 8], "anchor", 2)]
    rows = [row_shards(layouts[0], 4, 1, "contiguous")]
    plans = plans_of(layouts, rows)
    assert [each.sent.tolist() for each in plans[0].rounds] == [[], [0, 1], [0, 1], [0, 1]]
    assert all(each.sent.numel() == 0 for plan in plans[1:] for each in plan.rounds)
    # 2 tokens to 3 ranks, 3 heads of 5 + 7 numbers of 2 bytes; who received them returns gradients of 4 bytes.
    assert ring_bytes(plans[0], 3, 5, 7, torch.bfloat16) == (2 * 3 * 3 * 12 * 2,) * 2
    assert ring_bytes(plans[1], 3, 5, 7, torch.bfloat16) == (0, 2 * 3 * 12 * 4)


def test_a_zigzag_of_one_document_sends_what_later_pieces_see():
    layouts = [PackedLayout.from_lengths([64], "full", 0)]
    rows = [row_shards(layouts[0], 4, 1, "zigzag")]
    for rank, plan in enumerate(plans_of(layouts, rows)):
        # The last piece of every other rank sees this rank's first piece; those of lower ranks its last one too.
        assert [each.sent.numel() for each in plan.rounds[1:]] == [
            16 if (rank + step) % 4 < rank else 8 for step in (1, 2, 3)
        ]


def test_layouts_that_are_cut_in_storage_order_are_refused():
    layout = PackedLayout.from_segments([4, 4, 4], [0, 1, 0], "intra_document", 0)
    rows = (RowShards(torch.arange(12), (((0, 6),), ((6, 12),))),)
    with pytest.raises(RopewalkError, match=r"cut in \(document, order\) order"):
        ring_plan((layout,), rows, 0)


def test_rows_of_other_shard_lengths_are_refused():
    layout = PackedLayout.from_lengths([8], "full", 0)
    rows = (row_shards(layout, 2, 1), row_shards(layout, 2, 3))
    with pytest.raises(RopewalkError, match=r"cut alike, got rings of 2 x 6 places and of 2 x 4"):
        ring_plan((layout, layout), rows, 0)
