"""Plans of a ring against the layouts' dense masks, all ranks in one process."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.errors import RopewalkError
from ropewalk.parallel import BALANCES, RowShards, ShardedLayouts, row_shards
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import ring_bytes
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


def plans_of(layouts, rows, locality=EVERYTHING):
    return [ring_plan(tuple(layouts), tuple(rows), rank, locality) for rank in range(rows[0].ring)]


def any_locality(seed, total):
    """Of a layer: often all keys, else a window or chunks from one token to more than the row."""
    rng = random.Random(seed)
    window, chunk = (rng.choice([None, rng.randint(1, total + 2)]) for _ in range(2))
    return Locality(window, chunk)


def tokens_of(rows, rank):
    """``[places]``: the token in each place of a rank, counted through the batch; -1 in padding."""
    held = [row.tokens[rank] for row in rows]
    total = rows[0].total_length
    return torch.cat([torch.where(each < 0, each, each + row * total) for row, each in enumerate(held)])


def received_by(plans, rows, rank):
    """The token of each key that a rank receives, by what the others send."""
    parts = []
    for source, plan in enumerate(plans):
        sent, held = plan.sent.split(list(plan.send_counts))[rank], tokens_of(rows, source)
        assert len(sent) == plans[rank].receive_counts[source]
        parts.append(held[held >= 0][sent])
    return torch.cat(parts)


def anchors_seen(plans, rows):
    """int64 ``[tokens, tokens]``: how often a query sees a key among the anchors' keys."""
    total = sum(row.total_length for row in rows)
    pairs = torch.zeros(total, total, dtype=torch.int64)
    for rank, plan in enumerate(plans):
        if plan.anchors is not None:
            held = tokens_of(rows, rank)
            keys = received_by(plans, rows, rank)[plan.anchors.received]
            pairs[held[held >= 0][:, None], keys[None]] += plan.anchors.seen
            assert torch.equal(keys[plan.anchors.places], held[held >= 0][plan.anchors.held])
    return pairs


def runs_of(layouts, rows, locality=EVERYTHING):
    """Queries' and keys' tokens of every run of every rank."""
    plans = plans_of(layouts, rows, locality)
    for rank, plan in enumerate(plans):
        held = tokens_of(rows, rank)
        keys = received_by(plans, rows, rank)[plan.slots].split(list(plan.runs.keys))
        yield from zip(held[held >= 0].split(list(plan.runs.queries)), keys, strict=True)


@given(st.integers(0, 10**9))
def test_every_visible_pair_is_computed_once_and_no_other(seed):
    layouts, rows = random_batch(seed)
    locality = any_locality(seed, rows[0].total_length)
    expected = torch.block_diag(*(layout.dense_mask(locality).long() for layout in layouts))
    pairs = torch.zeros_like(expected)
    for queries, keys in runs_of(layouts, rows, locality):
        assert len(keys) >= len(queries) > 0
        seen = torch.ones(len(queries), len(keys), dtype=torch.int64).tril(len(keys) - len(queries))
        if locality.window is not None:
            seen = seen.triu(len(keys) - len(queries) - locality.window + 1)
        pairs[queries[:, None], keys[None]] += seen
    pairs += anchors_seen(plans_of(layouts, rows, locality), rows)
    assert torch.equal(pairs, expected)


@given(st.integers(0, 10**9))
def test_all_ranks_have_the_same_anchors(seed):
    """They add up the gradients of these keys in one collective."""
    layouts, rows = random_batch(seed)
    plans = plans_of(layouts, rows, any_locality(seed, rows[0].total_length))
    keys = [
        None if plan.anchors is None else received_by(plans, rows, rank)[plan.anchors.received].tolist()
        for rank, plan in enumerate(plans)
    ]
    assert all(each == keys[0] for each in keys)
    if keys[0] is not None:
        held = torch.cat([plan.anchors.places for plan in plans])
        assert held.sort().values.tolist() == list(range(len(keys[0])))


@given(st.integers(0, 10**9))
def test_keys_of_a_run_stand_in_the_order_of_the_row(seed):
    """A sliding window counts keys back from the query, so none is missing in between."""
    layouts, rows = random_batch(seed)
    total = rows[0].total_length
    place = torch.cat([row.order.argsort() + number * total for number, row in enumerate(rows)])
    for queries, keys in runs_of(layouts, rows, any_locality(seed, total)):
        assert bool((place[keys].diff() > 0).all())
        assert torch.equal(keys[-len(queries) :], queries)


@given(st.integers(0, 10**9))
def test_only_keys_that_the_receiver_sees_are_sent_and_each_once(seed):
    layouts, rows = random_batch(seed)
    locality = any_locality(seed, rows[0].total_length)
    visible = torch.block_diag(*(layout.dense_mask(locality) for layout in layouts))
    plans = plans_of(layouts, rows, locality)
    for rank, plan in enumerate(plans):
        received, held = received_by(plans, rows, rank), tokens_of(rows, rank)
        assert len(received.unique()) == len(received)
        needed = plan.slots if plan.anchors is None else torch.cat([plan.slots, plan.anchors.received])
        assert torch.equal(needed.unique(), torch.arange(len(received)))
        own = received[plan.slots]
        assert bool(visible[held[held >= 0]][:, own].any(dim=0).all())


@given(st.integers(0, 10**9))
def test_every_token_is_held_once_and_stands_before_padding(seed):
    layouts, rows = random_batch(seed)
    held = []
    for rank, plan in enumerate(plans_of(layouts, rows)):
        per_row = tokens_of(rows, rank).unflatten(0, (len(rows), -1))
        assert [int((row >= 0).sum()) for row in per_row] == list(plan.tokens)
        assert all(bool((row[:count] >= 0).all()) for row, count in zip(per_row, plan.tokens, strict=True))
        assert sum(plan.runs.queries) == sum(plan.tokens)
        held.append(per_row[per_row >= 0])
    assert torch.equal(torch.cat(held).sort().values, torch.arange(len(rows) * rows[0].total_length))


@pytest.mark.parametrize("balance", ["contiguous", "auto"])
def test_documents_within_a_shard_send_nothing(balance):
    layouts = [PackedLayout.from_lengths([8] * 4, "intra_document", 0)]
    rows = [row_shards(layouts[0], 4, 1, balance)]
    for plan in plans_of(layouts, rows):
        assert (plan.sent_to_others, plan.received_from_others) == (0, 0)
        assert ring_bytes(plan, 2, 8, 8, torch.float32) == (0, 0)


def test_the_anchor_alone_travels_to_documents_within_a_shard():
    layouts = [PackedLayout.from_lengths([6, 8, 8, 8], "anchor", 2)]
    rows = [row_shards(layouts[0], 4, 1, "contiguous")]
    plans = plans_of(layouts, rows)
    assert [part.tolist() for part in plans[0].sent.split(list(plans[0].send_counts))[1:]] == [[0, 1]] * 3
    assert all(plan.sent_to_others == 0 for plan in plans[1:])
    # 2 tokens to 3 ranks, 3 heads of 5 + 7 numbers of 2 bytes; who received them returns as much, which is nothing but
    # zeros: the gradients are reduced in 4 bytes.
    reduced = 2 * 2 * 3 * 12 * 4 * 3 // 4
    assert ring_bytes(plans[0], 3, 5, 7, torch.bfloat16) == (2 * 3 * 3 * 12 * 2, reduced)
    assert ring_bytes(plans[1], 3, 5, 7, torch.bfloat16) == (0, 2 * 3 * 12 * 2 + reduced)


def test_a_zigzag_of_one_document_sends_what_later_pieces_see():
    layouts = [PackedLayout.from_lengths([64], "full", 0)]
    rows = [row_shards(layouts[0], 4, 1, "zigzag")]
    for rank, plan in enumerate(plans_of(layouts, rows)):
        # The last piece of every other rank sees this rank's first piece; those of lower ranks its last one too.
        assert plan.send_counts == tuple(16 if other <= rank else 8 for other in range(4))


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_a_zigzag_of_one_document_holds_a_row_of_keys_and_one_piece_more(ring):
    layouts = [PackedLayout.from_lengths([16 * ring], "full", 0)]
    rows = [row_shards(layouts[0], ring, 1, "zigzag")]
    *slots, last = (len(plan.slots) for plan in plans_of(layouts, rows))
    assert slots == [16 * ring + 8] * (ring - 1)
    # Its two pieces stand beside each other: one run.
    assert last == 8 * (ring + 1)


def test_layouts_that_are_cut_in_storage_order_are_refused():
    layout = PackedLayout.from_segments([4, 4, 4], [0, 1, 0], "intra_document", 0)
    rows = (RowShards(torch.arange(12), (((0, 6),), ((6, 12),))),)
    with pytest.raises(RopewalkError, match=r"must be the layout's storage_in_order"):
        ring_plan((layout,), rows, 0)


def test_rows_of_other_shard_lengths_are_refused():
    layout = PackedLayout.from_lengths([8], "full", 0)
    rows = (row_shards(layout, 2, 1), row_shards(layout, 2, 3))
    with pytest.raises(
        RopewalkError, match=r"got ring 2 and ring_length 4 in one row, ring 2 and ring_length 6 in another"
    ):
        ring_plan((layout, layout), rows, 0)


@pytest.mark.parametrize(("ring", "window", "keys"), [(4, None, 294_912), (8, 1024, 14_322), (8, 128, 1_778)])
def test_keys_that_a_document_sends_are_those_of_the_documentation(ring, window, keys):
    layout = PackedLayout.from_lengths([2**17], "intra_document", 0)
    rows = (row_shards(layout, ring, 1),)
    plans = [ring_plan((layout,), rows, rank, Locality(window)) for rank in range(ring)]
    assert sum(plan.sent_to_others for plan in plans) == keys
    # Zigzag: all borders of its 2 ring pieces but the middle one lie between two ranks.
    assert window is None or keys == (window - 1) * 2 * (ring - 1)
