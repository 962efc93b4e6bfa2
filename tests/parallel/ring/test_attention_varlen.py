"""The ring through varlen with a kernel written out in place of torch's, which needs CUDA: offsets, slots and sums."""

import math
import random
import weakref

import pytest
import torch

from ropewalk.attention.engines import varlen
from ropewalk.attention.options import PLAIN, AttentionOptions
from ropewalk.attention.oracle import attention_errors
from ropewalk.parallel import ShardedLayouts
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring.plan import calls_on, gather_on, ring_plan, sent_on
from ropewalk.testing import random_layout
from tests.parallel.ring.ring_cases import ranks_in_turn


def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch's documentation says of varlen_attn: causal, aligned at the last query and key of each run."""
    assert len(cu_q) == len(cu_k) <= varlen.MAX_RUNS + 1
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert window_size[1] == 0
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).float() for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    visible = torch.zeros(scores.shape[1:], dtype=torch.bool)
    for run in range(len(cu_q) - 1):
        (a, b), (c, d) = cu_q[run : run + 2].tolist(), cu_k[run : run + 2].tolist()
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        if window_size[0] >= 0:
            seen = seen.triu((d - c) - (b - a) - window_size[0])
        visible[a:b, c:d] = seen
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v).to(q.dtype)


def batch(seed, ring=4):
    rng = random.Random(seed)
    total = rng.choice([16, 33, 64, 130])
    layouts = [
        random_layout(total, rng, 6, interleaved=rng.random() < 0.3, max_anchor=5)
        for _ in range(rng.choice([1, 2]))
    ]
    sharded = ShardedLayouts.of(
        layouts, SequenceGroups(ring=ring), rng.choice(["contiguous", "zigzag", "cost"])
    )
    torch.manual_seed(seed)
    return layouts, sharded.rows, [torch.randn(len(layouts), h, total, 8) for h in (4, 2, 2)]


OPTIONS = (PLAIN, AttentionOptions(window=5), AttentionOptions(window=40), AttentionOptions(chunk=13))


def worst_share(layouts, rows, qkv, engine, options=PLAIN):
    def attention(q, k, v):
        return ranks_in_turn(q, k, v, layouts, rows, engine, options)

    return attention_errors(attention, *qkv, layouts, options).worst_share


@pytest.mark.parametrize(("dtype", "max_runs"), [(torch.float16, 65535), (torch.bfloat16, 2)], ids=str)
def test_a_ring_through_varlen_is_within_the_error_budget(monkeypatch, dtype, max_runs):
    """A kernel takes so many runs at most; the others go into calls of their own."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(varlen, "MAX_RUNS", max_runs)
    for seed in range(12):
        layouts, rows, qkv = batch(seed)
        assert worst_share(layouts, rows, [x.to(dtype) for x in qkv], "varlen", OPTIONS[seed % 4]) <= 1


@pytest.mark.parametrize("score_bytes", [1000, 2**22])
def test_a_ring_through_segments_is_within_the_error_budget(monkeypatch, score_bytes):
    monkeypatch.setattr("ropewalk.attention.engines.segments.CPU_SCORE_BYTES", score_bytes)
    for seed in range(8):
        assert worst_share(*batch(seed), "segments", OPTIONS[seed % 4]) <= 1


def test_indices_on_a_device_die_with_their_plan():
    def indices(seed, device):
        layouts, rows, _ = batch(seed)
        plan = ring_plan(tuple(layouts), tuple(rows), 3)
        made = [plan, sent_on(plan, device), *calls_on(plan, device)]
        gather = gather_on(plan, device)
        assert gather is gather_on(plan, device)
        assert sent_on(plan, device) is made[1]
        assert {call.keys.cu_seqlens.device for call in made[2:]} == {device}
        return [weakref.ref(x) for x in [*made, *([gather] if gather is not None else [])]]

    # On the meta device all indices are tensors apart from the plan's own, as on a GPU.
    for device in (torch.device("cpu"), torch.device("meta")):
        found = [indices(seed, device) for seed in range(12)]
        alive = [any(each() is not None for each in refs) for refs in found]
        assert alive == [False] * 12
