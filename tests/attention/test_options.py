"""AttentionOptions and Locality: plain values, and what follows from them."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.options import EVERYTHING, AttentionOptions, Locality, stacked_reach


def test_a_window_that_holds_a_run_is_none():
    local = Locality(window=10, chunk=20)
    assert local.within(10) == Locality(None, None) == EVERYTHING
    assert local.within(11) == Locality(10, None)
    assert local.within(21) == local


def test_the_reach_is_the_shorter_of_window_and_chunk():
    assert EVERYTHING.reach is None
    assert Locality(7).reach == 7
    assert Locality(chunk=5).reach == 5
    assert Locality(7, 5).reach == 5


def test_the_scale_is_that_of_the_head_unless_one_is_given():
    assert AttentionOptions().scale_of(64) == 1 / math.sqrt(64)
    assert AttentionOptions(0.3).scale_of(64) == 0.3


def test_a_rank_s_heads_have_their_own_sinks():
    options = AttentionOptions(window=3, sinks=torch.arange(4.0))
    assert options.of_heads(slice(2, 4)).sinks.tolist() == [2.0, 3.0]
    assert options.of_heads(slice(2, 4)).window == 3
    plain = AttentionOptions()
    assert plain.of_heads(slice(0, 2)) is plain


def test_scores_that_enter_the_softmax_as_they_are_are_plain():
    assert AttentionOptions(0.5, window=3).is_plain
    assert not AttentionOptions(softcap=30.0).is_plain
    assert not AttentionOptions(sinks=torch.zeros(2)).is_plain


LAYERS = st.lists(
    st.builds(Locality, st.none() | st.integers(1, 6), st.none() | st.integers(1, 6)), min_size=1, max_size=6
)


@given(LAYERS, st.integers(1, 24))
def test_what_reaches_the_last_query_is_what_dense_masks_let_through(layers, length):
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    reached = np.eye(length, dtype=int)
    for layer in layers:
        sees = key <= query
        if layer.window is not None:
            sees &= query - key < layer.window
        if layer.chunk is not None:
            sees &= query // layer.chunk == key // layer.chunk
        reached = np.minimum(sees.astype(int) @ reached, 1)
    assert stacked_reach(layers, length) == reached[-1].sum()


def test_windows_add_up_and_chunks_do_not():
    assert stacked_reach([Locality(4096)] * 32, 10**6) == 1 + 32 * 4095
    assert stacked_reach([Locality(4096)] * 32, 5000) == 5000
    assert stacked_reach([Locality(chunk=8192)] * 48, 81920) == 8192
    assert stacked_reach([Locality(4096), EVERYTHING], 10**6) == 10**6
