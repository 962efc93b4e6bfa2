"""The ring through varlen with a kernel written out in place of torch's, which needs CUDA: offsets, slots and sums."""

import random
import weakref

import pytest
import torch

from ropewalk.attention.engines import varlen
from ropewalk.attention.options import PLAIN, AttentionOptions
from ropewalk.attention.oracle import attention_errors
from ropewalk.parallel import ShardedLayouts
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring.exchange import indices_on
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.testing import random_layout
from tests.attention.operator_cases import use_written_out
from tests.parallel.ring.ring_cases import ranks_in_turn


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
    use_written_out(monkeypatch)
    monkeypatch.setattr(varlen, "MAX_RUNS", max_runs)
    for seed in range(12):
        layouts, rows, qkv = batch(seed)
        assert worst_share(layouts, rows, [x.to(dtype) for x in qkv], "varlen", OPTIONS[seed % 4]) <= 1


@pytest.mark.parametrize("score_bytes", [1000, 2**22])
def test_a_ring_through_sdpa_is_within_the_error_budget(monkeypatch, score_bytes):
    monkeypatch.setattr("ropewalk.attention.engines.plain.CPU_SCORE_BYTES", score_bytes)
    for seed in range(8):
        assert worst_share(*batch(seed), "sdpa", OPTIONS[seed % 4]) <= 1


def test_indices_on_a_device_die_with_their_plan():
    def indices(seed, device):
        layouts, rows, _ = batch(seed)
        plan = ring_plan(tuple(layouts), tuple(rows), 3)
        indices = indices_on(plan, device)
        assert indices is indices_on(plan, device)
        made = [plan, indices, indices.sent, *varlen.calls_of(plan.runs, device)]
        assert {call.cu_keys.device for call in made[3:]} == {device}
        return [weakref.ref(x) for x in made]

    # On the meta device all indices are tensors apart from the plan's own, as on a GPU.
    for device in (torch.device("cpu"), torch.device("meta")):
        found = [indices(seed, device) for seed in range(12)]
        alive = [any(each() is not None for each in refs) for refs in found]
        assert alive == [False] * 12
