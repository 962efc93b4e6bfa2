"""The varlen blocks with kernels written out in place of torch's, which need CUDA: indices, layers and sums."""

import math
import random
import weakref

import pytest
import torch

from ropewalk.attention.layout import PackedLayout
from ropewalk.errors import EngineError
from ropewalk.parallel import ShardedLayouts, ring_varlen
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring_blocks import PlainBlocks
from ropewalk.parallel.ring_plan import ring_plan, sent_on
from ropewalk.parallel.ring_varlen import VarlenBlocks, layers_of, varlen_forward
from ropewalk.testing import random_layout
from ropewalk.testing.attention import attention_errors
from tests.parallel.ring_cases import RanksInTurn


def weights_of(q, k, cu_q, cu_k, causal, scale):
    """Scores of all queries and keys of a layer, ``[H, n, S]``, -inf where they are of different runs or hidden."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    visible = torch.zeros(scores.shape[1:], dtype=torch.bool)
    for run in range(len(cu_q) - 1):
        (a, b), (c, d) = cu_q[run : run + 2].tolist(), cu_k[run : run + 2].tolist()
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        visible[a:b, c:d] = seen.tril((d - c) - (b - a)) if causal else seen
    return scores.masked_fill(~visible, -math.inf)


def forward_kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa):
    assert return_aux.lse
    assert len(cu_q) - 1 <= ring_varlen.MAX_RUNS
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert enable_gqa == (q.shape[1] != k.shape[1])
    scores = weights_of(q, k, cu_q, cu_k, {(-1, 0): True, (-1, -1): False}[window_size], scale)
    wide = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).float()
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), wide)
    return out.to(q.dtype), scores.logsumexp(-1)


def backward_kernel(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal,
    rng_state,
    scale=None,
    window_size=None,
):
    assert window_size == ([-1, 0] if is_causal else [-1, -1])
    assert (rng_state.dtype, lse.dtype, lse.is_contiguous()) == (torch.uint64, torch.float32, True)
    groups = query.shape[1] // key.shape[1]
    weights = (weights_of(query, key, cu_seq_q, cu_seq_k, is_causal, scale) - lse[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(groups, dim=1).float() for x in (key, value))
    delta = torch.einsum("nhd,nhd->hn", grad_out.float(), out.float())
    slopes = torch.einsum("nhd,mhd->hnm", grad_out.float(), wide_v) - delta[..., None]
    scores = weights * slopes * scale
    grads = (
        torch.einsum("hnm,mhd->nhd", scores, wide_k),
        torch.einsum("hnm,nhd->mhd", scores, query.float()).unflatten(1, (-1, groups)).sum(2),
        torch.einsum("hnm,nhd->mhd", weights, grad_out.float()).unflatten(1, (-1, groups)).sum(2),
    )
    return tuple(x.to(query.dtype) for x in grads)


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", forward_kernel)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward_kernel)


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


@pytest.mark.parametrize(("dtype", "max_runs"), [(torch.float16, 65535), (torch.bfloat16, 2)], ids=str)
def test_a_ring_of_varlen_blocks_is_within_the_error_budget(kernels, monkeypatch, dtype, max_runs):
    """A kernel takes so many runs at most; the others go into layers of their own."""
    monkeypatch.setattr(ring_varlen, "MAX_RUNS", max_runs)
    for seed in range(12):
        layouts, rows, qkv = batch(seed)

        def engine(q, k, v, layouts=layouts, rows=rows):
            return RanksInTurn.apply(q, k, v, layouts, rows, VarlenBlocks())

        errors = attention_errors(engine, *(x.to(dtype) for x in qkv), layouts)
        assert errors.worst_share <= 1, errors


@pytest.mark.parametrize("score_bytes", [1000, 2**22])
def test_ranks_in_turn_with_plain_blocks_are_within_the_error_budget(monkeypatch, score_bytes):
    monkeypatch.setattr("ropewalk.parallel.ring_blocks.CPU_SCORE_BYTES", score_bytes)
    for seed in range(8):
        layouts, rows, qkv = batch(seed)

        def engine(q, k, v, layouts=layouts, rows=rows):
            return RanksInTurn.apply(q, k, v, layouts, rows, PlainBlocks())

        errors = attention_errors(engine, *qkv, layouts)
        assert errors.worst_share <= 1, errors


def test_layers_hold_no_more_keys_than_the_buffer_and_the_anchors():
    several = 0
    for seed in range(20):
        layouts, rows, _ = batch(seed)
        for rank in range(4):
            for each in ring_plan(tuple(layouts), tuple(rows), rank).rounds:
                layers = layers_of(each, torch.device("cpu"))
                several += len(layers) > 1
                for layer in layers:
                    copies = sum(slots.numel() for _, slots in layer.shared)
                    assert layer.keys.numel() <= each.received + copies
                    assert layer.keys[layer.own].unique().numel() == layer.own.numel()
    assert several


def test_indices_on_a_device_die_with_their_plan():
    def indices(seed, device):
        layouts, rows, _ = batch(seed)
        plan = ring_plan(tuple(layouts), tuple(rows), 3)
        for each in plan.rounds:
            assert layers_of(each, device) is layers_of(each, device)
            assert sent_on(each, device) is sent_on(each, device)
        made = [layer for each in plan.rounds for layer in layers_of(each, device)]
        assert {layer.keys.device for layer in made} == {device}
        return [weakref.ref(x) for x in made + [sent_on(each, device) for each in plan.rounds]]

    # On the meta device all indices are tensors apart from the plan's own, as on a GPU.
    for device in (torch.device("cpu"), torch.device("meta")):
        found = [indices(seed, device) for seed in range(12)]
        alive = [any(each() is not None for each in refs) for refs in found]
        assert alive == [False] * 12


def test_a_log_sum_exp_of_another_shape_is_refused(kernels, monkeypatch):
    def other(q, k, v, *arguments, **options):
        return q, torch.zeros(q.shape[:2])

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", other)
    layout = PackedLayout.from_lengths([8], "full", 0)
    sharded = ShardedLayouts.of([layout], SequenceGroups(ring=2))
    (layer,) = layers_of(ring_plan((layout,), sharded.rows, 0).rounds[0], torch.device("cpu"))
    q = torch.zeros(4, 2, 8)
    with pytest.raises(
        EngineError, match=r"log-sum-exps of shape \(4, 2\) where a ring expects \(2, 4\); use engine"
    ):
        varlen_forward(q, q, q, layer, 1.0)


def test_torch_still_has_the_operators_that_are_called():
    import torch.nn.attention.varlen as module

    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    names = " ".join(each.name for each in schema.arguments)
    assert names == (
        "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
    )
    assert [str(each.type) for each in schema.returns] == ["Tensor"] * 3
    assert module.AuxRequest(lse=True).lse
    q, k = torch.empty(6, 4, 8, device="meta"), torch.empty(9, 2, 8, device="meta")
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    out, lse = module.varlen_attn(
        q,
        k,
        k,
        cu,
        cu,
        6,
        9,
        return_aux=module.AuxRequest(lse=True),
        scale=1.0,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    assert (out.shape, lse.shape) == ((6, 4, 8), (4, 6))
