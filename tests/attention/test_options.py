"""AttentionOptions and Locality: plain values, and what follows from them."""

import math

import torch

from ropewalk.attention.options import EVERYTHING, AttentionOptions, Locality


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
