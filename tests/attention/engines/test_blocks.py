"""Closed-form blocks against the dense evaluation that they replace."""

import random
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from ropewalk import PackedLayout
from ropewalk.attention.engines import flex
from ropewalk.attention.engines.blocks import padded_lists, touched_blocks
from ropewalk.attention.options import EVERYTHING, AttentionOptions, Locality
from ropewalk.testing import cut_row, oracle_attention, random_layout


def dense_blocks(layout: PackedLayout, size: int, locality: Locality = EVERYTHING) -> tuple[set, set]:
    """(partial, full) block pairs by looking at every pair of tokens."""
    order = layout.document_order if layout.pattern != "full" else torch.arange(layout.total_length)
    mask = layout.dense_mask(locality)[order][:, order]
    # In document order, an interleaved document's tokens keep their order, so the mask stays causal.
    partial, full = set(), set()
    blocks = -(-layout.total_length // size)
    for i in range(blocks):
        for j in range(blocks):
            block = mask[i * size : (i + 1) * size, j * size : (j + 1) * size]
            if block.all() and block.shape[1] == size and j < i:
                full.add((i, j))
            elif block.any():
                partial.add((i, j))
    return partial, full


@given(seed=st.integers(0, 10**6), length=st.integers(8, 200), size=st.sampled_from([4, 8, 16]))
@settings(max_examples=60, deadline=None)
def test_touched_blocks_equal_the_dense_evaluation(seed, length, size):
    rng = random.Random(seed)
    layout = random_layout(length, rng, max_documents=10, interleaved=rng.random() < 0.3, max_anchor=7)
    blocks = touched_blocks(layout, size)
    partial, full = dense_blocks(layout, size)
    assert {tuple(pair) for pair in blocks.partial.tolist()} == partial
    assert {tuple(pair) for pair in blocks.full.tolist()} == full


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(8, 200),
    size=st.sampled_from([4, 8, 16]),
    window=st.none() | st.integers(1, 210),
    chunk=st.none() | st.integers(1, 210),
)
@settings(deadline=None)
def test_blocks_of_windows_and_chunks_are_those_that_hold_a_pair(seed, length, size, window, chunk):
    """A full block may be taken for a partial one, which costs a mask; never the other way round."""
    rng, locality = random.Random(seed), Locality(window, chunk)
    layout = random_layout(length, rng, max_documents=10, interleaved=rng.random() < 0.3, max_anchor=7)
    blocks = touched_blocks(layout, size, locality)
    partial, full = dense_blocks(layout, size, locality)
    found_partial, found_full = (
        {tuple(pair) for pair in pairs.tolist()} for pairs in (blocks.partial, blocks.full)
    )
    assert found_full <= full
    assert found_partial | found_full == partial | full
    assert not found_partial & found_full


@given(seed=st.integers(0, 10**6), by=st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_padded_lists_hold_each_block_once_in_order(seed, by):
    rng = random.Random(seed)
    layout = random_layout(100, rng)
    pairs = touched_blocks(layout, 8).partial
    counts, indices = padded_lists([pairs], 13, by)
    assert (counts.dtype, indices.dtype, indices.shape) == (np.int32, np.int32, (1, 1, 13, 13))
    found = {(i, int(indices[0, 0, i, j])) for i in range(13) for j in range(counts[0, 0, i])}
    assert found == {(int(p[by]), int(p[1 - by])) for p in pairs}
    assert all(np.all(np.diff(indices[0, 0, i, : counts[0, 0, i]]) > 0) for i in range(13))


@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
def test_block_mask_equals_the_one_torch_evaluates(pattern):
    """Same touched blocks as ``create_block_mask`` of the same rule, for queries and for keys."""
    layout = PackedLayout.from_lengths(cut_row(1023, 7, random.Random(0)), pattern, 1)
    plan = flex.plan([layout], torch.device("cpu"), EVERYTHING)
    theirs = create_block_mask(plan.block_mask.mask_mod, 1, None, 1024, 1024, device="cpu")
    for side in ("kv", "q"):
        ours_all, theirs_all = (
            {
                (i, int(getattr(mask, f"{kind}{side}_indices")[0, 0, i, j]))
                for kind in ("", "full_")
                for i in range(8)
                for j in range(int(getattr(mask, f"{kind}{side}_num_blocks")[0, 0, i]))
            }
            for mask in (plan.block_mask, theirs)
        )
        assert ours_all == theirs_all


def test_blocks_of_a_long_row_take_memory_for_the_touched_ones_only():
    layout = PackedLayout.from_lengths([4096] * 256, "anchor", 0)
    blocks = touched_blocks(layout, 128)
    # 256 documents of 32 blocks: a triangle each, out of 8192 squared.
    assert len(blocks.partial) + len(blocks.full) == 256 * 32 * 33 // 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler does not quote paths with a space")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler uses what torch deprecates
def test_compiled_flex_reads_our_block_mask():
    """Compiled, FlexAttention skips blocks that the mask does not list: the lists themselves are tested.

    Five blocks and an incomplete one: a row need be no multiple of the block size. Rows that list two of them and six.
    """
    layouts = [
        PackedLayout.from_lengths([100] * 7 + [12], "intra_document", 0),
        PackedLayout.from_lengths([130, 300, 131, 150], "anchor"),
        PackedLayout.from_lengths([712], "full", 0),
    ]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 712, 16, generator=generator) for heads in (2, 1, 1))
    compiled = flex.compiled()
    mask = flex.plan(layouts, torch.device("cpu"), EVERYTHING).block_mask
    with torch.no_grad():
        found = compiled(q, k, v, block_mask=mask, scale=0.25, enable_gqa=True)
    # Float32 sums of at most 712 terms of size 1, whose order differs.
    expected = oracle_attention(*(x.double() for x in (q, k, v)), layouts, AttentionOptions(0.25))
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rows_of_one_length_share_one_compiled_graph():
    """Whatever their documents: torch compiles eight graphs of a function, and then runs it uncompiled."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 600, 16, generator=generator) for _ in range(3))
    torch._dynamo.reset()
    compiled = flex.compiled("eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for layout in (
            PackedLayout.from_lengths([599], "anchor"),
            PackedLayout.from_lengths([50] * 12, "intra_document", 0),
            PackedLayout.from_lengths([600], "full", 0),
        ):
            compiled(q, k, v, block_mask=flex.block_mask_of([layout], q.device), scale=0.25)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_more_lengths_than_torch_compiles_are_refused_not_run_uncompiled(monkeypatch):
    # A second's work, which collecting the tests need not do.
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def attention(length):
        q = torch.zeros(1, 1, length, 16)
        mask = flex.block_mask_of([PackedLayout.from_lengths([length], "full", 0)], q.device)
        with torch.no_grad():
            return compiled(q, q, q, block_mask=mask)

    torch._dynamo.reset()
    compiled = flex.compiled("eager")
    monkeypatch.setattr(flex, "MOST_GRAPHS", 2)
    attention(130)
    attention(131)
    with pytest.raises(FailOnRecompileLimitHit):
        attention(132)
