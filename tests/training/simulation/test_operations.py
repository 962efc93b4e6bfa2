"""Pairs, operations and scratch memory of attention kernels, against counting one by one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.training.simulation.operations import (
    CPU_FLASH,
    CPU_FLASH_BACKWARD,
    VARLEN,
    VARLEN_BACKWARD,
    attention_call,
    visible_pairs,
    workspace,
)


def attention_flops(*arguments):
    return attention_call(*arguments).flops


def pairs_one_by_one(queries, keys, window):
    """Query i is aligned with key i + keys - queries, and sees at most ``window`` keys up to it."""
    seen = 0
    for query in range(queries):
        own = query + keys - queries
        first = 0 if window is None else max(0, own - window + 1)
        seen += sum(first <= key <= own for key in range(keys))
    return seen


@given(st.integers(1, 12), st.integers(1, 12), st.none() | st.integers(1, 14))
def test_pairs_are_those_of_a_mask(queries, keys, window):
    assert visible_pairs(queries, keys, window) == pairs_one_by_one(queries, keys, window)


def tensors(tokens, heads, kv_heads, width, value_width):
    make = torch.empty
    return make(tokens, heads, width), make(tokens, kv_heads, width), make(tokens, kv_heads, value_width)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_kernels_count_the_pairs_of_each_document(window):
    lengths = [5, 2, 9]
    offsets = torch.tensor([0, 5, 7, 16], dtype=torch.int32)
    q, k, v = tensors(16, 8, 2, 16, 32)
    size = [-1 if window is None else window - 1, 0]
    pairs = sum(pairs_one_by_one(length, length, window) for length in lengths)
    forward = (q, k, v, offsets, offsets, 9, 9)
    given_ = {"window_size": size, "enable_gqa": True}
    assert attention_flops(VARLEN, forward, given_, lambda x: x) == pairs * 8 * 2 * (16 + 32)
    backward = (q, q, k, v, q, q, offsets, offsets, 9, 9, True, q)
    # Two products for dV and the gradient of the weights, and three of the keys' width: scores, dQ, dK.
    assert attention_flops(VARLEN_BACKWARD, backward, {"window_size": size}, lambda x: x) == pairs * 8 * 2 * (
        3 * 16 + 2 * 32
    )


def test_without_known_lengths_one_document_is_the_bound():
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    q, k, v = tensors(16, 1, 1, 4, 4)
    arguments = (q, k, v, offsets, offsets, 8, 8)
    known = attention_flops(VARLEN, arguments, {"window_size": [-1, 0]}, lambda x: x)
    unknown = attention_flops(VARLEN, arguments, {"window_size": [-1, 0]}, lambda x: None)
    assert known == 2 * pairs_one_by_one(8, 8, None) * 16
    assert unknown == pairs_one_by_one(16, 16, None) * 16


def test_the_kernel_of_the_cpu_counts_all_pairs_without_causality():
    q, k, v = (torch.empty(2, 4, length, 8) for length in (6, 10, 10))
    assert attention_flops(CPU_FLASH, (q, k, v), {}, lambda x: x) == 2 * 4 * 60 * 32
    q = torch.empty(2, 4, 10, 8)
    causal = 2 * 4 * pairs_one_by_one(10, 10, None)
    assert attention_flops(CPU_FLASH, (q, k, v, 0.0, True), {}, lambda x: x) == causal * 32
    assert (
        attention_flops(CPU_FLASH_BACKWARD, (q, q, k, v, q, q, 0.0, True), {}, lambda x: x)
        == causal * 2 * 5 * 8
    )


def test_scratch_memory_of_flash_attention():
    """By hand from flash_api.cpp: 130 rows of 8 heads of 64 + 1 float32, and keys and values of every query head."""
    q, k = torch.empty(2, 8, 40, dtype=torch.bfloat16), torch.empty(2, 2, 40, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    arguments = (q, q, k, k, q, q, offsets, offsets, 2, 2, True, q)
    assert workspace(VARLEN_BACKWARD, arguments, {}) == 130 * 8 * 65 * 4 + 2 * 2 * 8 * 40 * 2
    assert workspace(VARLEN, (q, k, k, offsets, offsets, 2, 2), {}) == 0
