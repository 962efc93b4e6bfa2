"""The varlen engine asks its kernel for the right thing, and copies tokens only where it must."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import PackedLayout
from ropewalk.attention.engines import varlen
from ropewalk.attention.options import EVERYTHING, AttentionOptions
from ropewalk.testing import (
    attention_errors,
    random_layout,
)
from tests.attention.attention_cases import random_qkv


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped heads", "as many heads"])
@given(
    seed=st.integers(0, 10**6),
    interleaved=st.booleans(),
    max_runs=st.sampled_from([3, 65535]),
    window=st.none() | st.integers(1, 70),
    chunk=st.none() | st.integers(1, 70),
)
@settings(deadline=None)
def test_varlen_asks_its_kernel_for_the_right_thing(grouped, seed, interleaved, max_runs, window, chunk):
    """The kernel itself needs CUDA; one that does what its options say shows that they are the right ones.

    torch 2.11's has no option for keys and values of fewer heads than queries, and takes as many heads alone.
    """
    rng = random.Random(seed)
    layouts = [random_layout(60, rng, interleaved=interleaved, max_anchor=2) for _ in range(2)]
    q, k, v = random_qkv(2, 4, 2, 60, 8, seed=seed)

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, scale, enable_gqa):
        assert enable_gqa or q.shape[1] == k.shape[1] == v.shape[1]
        assert torch.equal(cu_q, cu_k)
        assert cu_q.dtype == torch.int32
        assert len(cu_q) - 1 <= max_runs
        assert max_q == max_k == cu_q.diff().max()
        outputs = []
        for a, b, c in zip(*(x.split(cu_q.diff().tolist()) for x in (q, k, v)), strict=True):
            heads = (x.transpose(0, 1)[None] for x in (a, b, c))
            behind, ahead = window_size
            distance = torch.arange(len(a))[:, None] - torch.arange(len(a))
            seen = (distance >= -ahead) & ((distance <= behind) | (behind < 0))
            whole = scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
            outputs.append(whole[0].transpose(0, 1))
        return torch.cat(outputs)

    def ungrouped_kernel(*args, window_size, scale):
        return kernel(*args, window_size=window_size, scale=scale, enable_gqa=False)

    def engine(q, k, v):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", kernel if grouped else ungrouped_kernel)
            patch.setattr(varlen, "MAX_RUNS", max_runs)
            plan = varlen.plan(layouts, torch.device("cpu"), options.locality)
            return varlen.run(q, k, v, plan, options)

    options = AttentionOptions(window=window, chunk=chunk)
    errors = attention_errors(engine, q, k, v, layouts, options)
    assert errors.worst_share <= 1, errors


@pytest.mark.parametrize(
    ("layouts", "gathers"),
    [
        ([PackedLayout.from_segments([5, 4, 3], [0, 1, 0], "full", 0)], 0),
        ([PackedLayout.from_lengths([5, 4, 3], "intra_document", 0)], 0),
        ([PackedLayout.from_lengths([5, 4, 1], "intra_document", 2)], 0),
        ([PackedLayout.from_lengths([11], "anchor", 1)], 0),
        ([PackedLayout.from_lengths([11], "full"), PackedLayout.from_lengths([6, 5], "intra_document")], 0),
        ([PackedLayout.from_lengths([6, 5], "anchor")], 4),
        ([PackedLayout.from_segments([5, 4, 3], [0, 1, 0], "intra_document", 0)], 4),
        ([PackedLayout.from_lengths([11], "full"), PackedLayout.from_lengths([6, 5], "anchor")], 4),
    ],
)
def test_varlen_copies_tokens_only_where_runs_lie_apart(monkeypatch, layouts, gathers):
    """Queries, keys, values and the output: 5 GB of traffic in a layer's forward at 128K tokens."""
    seen = []

    def kernel(*args, window_size, scale, enable_gqa):
        seen.append(args)
        return args[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    length = layouts[0].total_length
    # As projections leave them: heads of one token side by side.
    q, k, v = (torch.randn(len(layouts), length, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    with CountCopies() as copies:
        varlen.run(q, k, v, varlen.plan(layouts, q.device, EVERYTHING), AttentionOptions(1.0))
    assert copies.count == gathers
    shared = [a.data_ptr() == b.data_ptr() for a, b in zip(seen[0], (q, k, v), strict=False)]
    assert shared == [gathers == 0] * 3


class CountCopies(TorchDispatchMode):
    """Counts operations that copy at least a tensor of heads."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.count += result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
        return result
