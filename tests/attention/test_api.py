"""Every engine against the float64 oracle, within twice the error of plain attention in the same dtype."""

import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import EngineError, PackedLayout, RopewalkError, attend
from ropewalk.attention import ENGINES, AttentionSpec, check_engine, prepare, resolve_engine, why_not
from ropewalk.attention.choices import PATTERNS
from ropewalk.attention.engines import varlen
from ropewalk.testing import (
    attention_errors,
    cut_row,
    oracle_attention,
    random_layout,
    repeated_anchor_attention,
)

CUDA = torch.cuda.is_available()


def random_qkv(batch, heads, kv_heads, length, head_dim, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads):
        return torch.randn(batch, heads, length, head_dim, generator=generator).to(device, dtype)

    return normal(heads), normal(kv_heads), normal(kv_heads)


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(4, 300),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    head_dim=st.sampled_from([8, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    interleaved=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_segments_within_the_error_budget(seed, length, batch, heads, head_dim, dtype, interleaved):
    rng = random.Random(seed)
    layouts = [
        random_layout(length, rng, max_documents=12, interleaved=interleaved, max_anchor=2)
        for _ in range(batch)
    ]
    q, k, v = random_qkv(batch, *heads, length, head_dim, dtype, seed=seed)
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine="segments"), q, k, v, layouts)
    assert errors.worst_share <= 1, (errors, [layout.pattern for layout in layouts])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("anchor", [0, 1])
@pytest.mark.parametrize(("documents", "total"), [(200, 1000), (3, 1300), (1, 700)])
def test_segments_on_long_rows(pattern, anchor, documents, total):
    rng = random.Random(documents)
    layout = PackedLayout.from_lengths(cut_row(total, documents, rng), pattern, anchor)
    q, k, v = random_qkv(1, 2, 1, layout.total_length, 16)
    errors = attention_errors(lambda *qkv: attend(*qkv, layout, engine="segments"), q, k, v, [layout])
    assert errors.worst_share <= 1, errors


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_segments_at_each_head_dim(head_dim):
    layout = PackedLayout.from_lengths([40, 7, 70], "anchor")
    q, k, v = random_qkv(2, 4, 2, layout.total_length, head_dim, torch.bfloat16)
    layouts = [layout, PackedLayout.from_lengths([117], "full")]
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine="segments"), q, k, v, layouts)
    assert errors.worst_share <= 1, errors


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("engine", ["reference", "segments"])
def test_soft_cap_and_scale(engine, softcap):
    layout = PackedLayout.from_lengths([30, 5, 20], "anchor")
    q, k, v = (x.double() for x in random_qkv(1, 4, 2, layout.total_length, 16))
    found = attend(q, k, v, layout, engine=engine, scale=0.7, softcap=softcap)
    expected = oracle_attention(q, k, v, [layout], scale=0.7, softcap=softcap)
    # Two float64 evaluations of sums over at most 55 terms of size 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    other = oracle_attention(q, k, v, [layout], scale=0.7, softcap=4.0)
    assert (found - other).abs().max() > 1e-3


def test_values_may_be_wider_than_heads():
    layout = PackedLayout.from_lengths([30, 5], "anchor")
    q, k, _ = random_qkv(1, 4, 2, layout.total_length, 16)
    v = random_qkv(1, 4, 2, layout.total_length, 24)[2]
    errors = attention_errors(lambda *qkv: attend(*qkv, layout, engine="segments"), q, k, v, [layout])
    assert errors.worst_share <= 1, errors


@given(seed=st.integers(0, 10**6), anchor=st.integers(1, 3), interleaved=st.booleans())
@settings(max_examples=20, deadline=None)
def test_anchor_by_mask_by_gather_and_by_repetition_agree(seed, anchor, interleaved):
    rng = random.Random(seed)
    lengths = cut_row(rng.randint(20, 120), rng.randint(1, 9), rng)
    documents = [rng.randrange(3) for _ in lengths] if interleaved else range(len(lengths))
    layout = PackedLayout.from_segments(lengths, documents, "anchor", anchor)
    q, k, v = (x.double() for x in random_qkv(1, 4, 2, layout.total_length, 8, seed=seed))
    by_mask = attend(q, k, v, layout, engine="reference")
    by_gather = attend(q, k, v, layout, engine="segments")
    by_repetition = repeated_anchor_attention(q, k, v, layout)
    torch.testing.assert_close(by_gather, by_mask, rtol=0, atol=1e-13)
    torch.testing.assert_close(by_repetition, by_mask, rtol=0, atol=1e-13)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_document_in_a_row_attends_as_it_does_alone(pattern):
    layout = PackedLayout.from_lengths([20, 33, 5], pattern, 1)
    q, k, v = (x.double() for x in random_qkv(1, 2, 1, layout.total_length, 8))
    packed = attend(q, k, v, layout, engine="segments")
    for document in range(3):
        own = (layout.document_ids == document).nonzero().flatten()
        index = torch.cat([torch.arange(1), own]) if pattern == "anchor" else own
        alone = PackedLayout.from_lengths([len(index)], "full", 0)
        separate = attend(q[:, :, index], k[:, :, index], v[:, :, index], alone)[:, :, -len(own) :]
        same = torch.allclose(packed[:, :, own], separate, rtol=0, atol=1e-13)
        # Under the pattern full a later document sees the earlier ones: the check must tell them apart.
        assert same == (pattern != "full")


def test_a_wrong_layout_leaves_the_budget():
    layout = PackedLayout.from_lengths([30, 30], "anchor")
    off_by_one = PackedLayout.from_lengths([31, 29], "anchor")
    q, k, v = random_qkv(1, 2, 2, 61, 16, torch.bfloat16)
    errors = attention_errors(lambda *qkv: attend(*qkv, off_by_one, engine="segments"), q, k, v, [layout])
    assert errors.worst_share > 10


def test_anchor_gradients_add_up_in_float32():
    """4000 documents of one token give the anchor's value a gradient that bfloat16 sums would stall on."""
    layout = PackedLayout.from_lengths([1] * 4000, "anchor")
    q, k, v = random_qkv(1, 1, 1, 4001, 8, torch.bfloat16)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    v = v.requires_grad_()
    attend(q, k, v, layout, engine="segments").backward(torch.ones(1, 1, 4001, 8, dtype=torch.bfloat16))
    # Each document gives half of its weight to the anchor, which gives itself all.
    expected = 1 + 0.5 * 4000
    assert (v.grad[0, 0, 0].float() - expected).abs().max() <= expected * torch.finfo(torch.bfloat16).eps


@given(seed=st.integers(0, 10**6), length=st.integers(4, 260), softcap=st.sampled_from([None, 3.0]))
@settings(max_examples=15, deadline=None)
def test_flex_forward_within_the_error_budget(seed, length, softcap):
    rng = random.Random(seed)
    layouts = [random_layout(length, rng, interleaved=rng.random() < 0.5, max_anchor=2) for _ in range(2)]
    q, k, v = random_qkv(2, 4, 2, length, 16, seed=seed)

    def flex(q, k, v):
        return attend(q, k, v, layouts, engine="flex", softcap=softcap)

    errors = attention_errors(flex, q, k, v, layouts, softcap, gradients=False)
    assert errors.worst_share <= 1, errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda q, k, v, lay: attend(q, k, v, lay, engine="varlen"),
            "varlen needs CUDA.*use engine segments",
        ),
        (lambda q, k, v, lay: attend(q.requires_grad_(), k, v, lay, engine="flex"), "flex has no backward"),
        (lambda q, k, v, lay: attend(q, k, v, lay, engine="xformers"), "unknown attention engine 'xformers'"),
    ],
)
def test_an_engine_that_cannot_raises_and_names_one_that_can(call, message):
    layout = PackedLayout.from_lengths([5, 4])
    with pytest.raises(EngineError, match=message):
        call(*random_qkv(1, 2, 2, 10, 8), layout)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 3, 10, 8), (1, 2, 10, 8), (1, 2, 10, 8)), "num_heads 3 is not a multiple of num_kv_heads 2"),
        (((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)), "describes 10 tokens, the tensors hold 9"),
        (((1, 2, 10, 8), (1, 2, 12, 8), (1, 2, 12, 8)), "as many keys as queries"),
        (((2, 10, 8), (2, 10, 8), (2, 10, 8)), "query must be"),
        (((1, 2, 10, 8), (1, 2, 10, 4), (1, 2, 10, 8)), "do not fit query"),
    ],
)
def test_tensors_that_do_not_fit_are_named(shapes, message):
    layout = PackedLayout.from_lengths([5, 4])
    with pytest.raises(RopewalkError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes), layout)


def test_layouts_must_match_the_batch():
    q, k, v = random_qkv(2, 2, 2, 10, 8)
    layout = PackedLayout.from_lengths([5, 4])
    with pytest.raises(RopewalkError, match="got 3 layouts for a batch of 2 rows"):
        attend(q, k, v, [layout] * 3)
    with pytest.raises(RopewalkError, match=r"key is torch\.bfloat16"):
        attend(q, k.bfloat16(), v, layout)


def test_plans_are_made_once_a_row_not_once_a_layer(monkeypatch):
    from ropewalk.attention.engines import segments

    calls = []
    monkeypatch.setattr(segments, "plan", lambda *a, plan=segments.plan: calls.append(1) or plan(*a))
    layout = PackedLayout.from_lengths([5, 4])
    for _ in range(4):
        attend(*random_qkv(1, 2, 2, 10, 8), layout, engine="segments")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("varlen", {"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32; use engine flex"),
        ("varlen", {"softcap": 50.0}, r"no soft cap \(softcap=50.0\); use engine flex"),
        ("varlen", {"head_dim": 288}, "up to 256, got 288 and 288; use engine segments"),
        ("varlen", {"head_dim": 100}, "a multiple of 8 up to 256, got 100 and 100; use engine flex"),
        ("varlen", {"value_dim": 32}, "equal head and value widths.*got 64 and 32; use engine flex"),
        ("varlen", {"capability": (7, 5)}, "capability 8.0 or later, this one has 7.5; use engine segments"),
        ("flex", {"capability": (7, 5)}, "capability 8.0 or later, this one has 7.5; use engine segments"),
        ("flex", {"dtype": torch.float64}, "float16 on CUDA, got torch.float64; use engine segments"),
        (
            "flex",
            {"dtype": torch.float32, "head_dim": 8},
            "at least 16 on CUDA, got 8 and 8; use engine segm",
        ),
        ("flex", {"value_dim": 8}, "at least 16 on CUDA, got 64 and 8; use engine segments"),
        ("flex", {"head_dim": 192, "value_dim": 128, "capability": (8, 6)}, "192 and 128 .* capability 8.6"),
        ("flex", {"head_dim": 512}, "no tiles .* 512 and 512 in torch.bfloat16"),
        ("flex", {"device": "cpu"}, "flex has no backward on cpu.*; use engine segments"),
        ("varlen", {"device": "cpu"}, "varlen needs CUDA, the tensors are on cpu; use engine segments"),
        (
            "flash",
            {},
            "unknown attention engine 'flash'; choose one of auto, reference, segments, flex, varlen",
        ),
    ],
)
def test_what_an_engine_needs_is_known_before_a_gpu_is_asked(engine, options, message):
    with pytest.raises(EngineError, match=message):
        check_engine(engine, spec_of(**options))


def spec_of(**options):
    return AttentionSpec(**{"device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, **options})


@given(
    device=st.sampled_from(["cpu", "cuda", "meta"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    head_dim=st.integers(1, 600),
    value_dim=st.none() | st.integers(1, 600),
    softcap=st.sampled_from([None, 30.0]),
    ring=st.booleans(),
    capability=st.sampled_from([(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]),
)
def test_auto_takes_an_engine_that_can_and_refusals_name_one(**options):
    spec = AttentionSpec(**options)
    chosen = resolve_engine(spec)
    assert why_not(chosen, spec) is None
    assert check_engine("auto", spec) == check_engine(chosen, spec) == chosen
    for engine in ENGINES:
        reason = why_not(engine, spec)
        if reason is None:
            assert check_engine(engine, spec) == engine
        else:
            with pytest.raises(EngineError, match=f"engine {engine} .*; use engine {chosen}"):
                check_engine(engine, spec)


def test_auto_says_once_what_it_took(caplog):
    from ropewalk.attention import api

    api._say_once.cache_clear()
    layout = PackedLayout.from_lengths([5, 4])
    with caplog.at_level("INFO", logger="ropewalk"):
        for _ in range(3):
            attend(*random_qkv(1, 2, 2, 10, 8), layout)
    assert caplog.messages == ["attention engine segments on cpu (auto)"]


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"device": "cpu"}, "segments"),
        ({}, "varlen"),
        ({"device": "meta"}, "varlen"),
        ({"head_dim": 256, "dtype": torch.float16}, "varlen"),
        ({"dtype": torch.float32}, "flex"),
        ({"softcap": 50.0}, "flex"),
        ({"softcap": 50.0, "head_dim": 256}, "flex"),
        # FlashAttention wants a multiple of 8, and as wide values as heads.
        ({"head_dim": 100}, "flex"),
        ({"head_dim": 36}, "flex"),
        ({"head_dim": 192, "value_dim": 128}, "flex"),
        # Triton's products want 16 columns at least.
        ({"head_dim": 8}, "varlen"),
        ({"head_dim": 8, "dtype": torch.float32}, "segments"),
        ({"head_dim": 12}, "segments"),
        ({"head_dim": 512}, "segments"),
        ({"dtype": torch.float64}, "segments"),
        ({"capability": (7, 5)}, "segments"),
        # 99 KiB of shared memory hold no tiles of 192 columns.
        ({"head_dim": 192, "value_dim": 128, "capability": (8, 6)}, "segments"),
        ({"head_dim": 192, "capability": (8, 6)}, "varlen"),
        ({"ring": True}, "varlen"),
        ({"ring": True, "head_dim": 100}, "segments"),
    ],
)
def test_auto_names_the_engine_of_each_device(options, engine):
    assert resolve_engine(spec_of(**options)) == engine


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped heads", "as many heads"])
@given(seed=st.integers(0, 10**6), interleaved=st.booleans(), max_runs=st.sampled_from([3, 65535]))
@settings(max_examples=25, deadline=None)
def test_varlen_asks_its_kernel_for_the_right_thing(grouped, seed, interleaved, max_runs):
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
            causal = window_size == (-1, 0)
            whole = scaled_dot_product_attention(*heads, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
            outputs.append(whole[0].transpose(0, 1))
        return torch.cat(outputs)

    def ungrouped_kernel(*args, window_size, scale):
        return kernel(*args, window_size=window_size, scale=scale, enable_gqa=False)

    def engine(q, k, v):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", kernel if grouped else ungrouped_kernel)
            patch.setattr(varlen, "MAX_RUNS", max_runs)
            return varlen.run(q, k, v, varlen.plan(layouts, torch.device("cpu")), 8**-0.5, None)

    errors = attention_errors(engine, q, k, v, layouts)
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
        varlen.run(q, k, v, varlen.plan(layouts, q.device), 1.0, None)
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


def test_plans_die_with_their_rows():
    from ropewalk.attention import api

    device, kept = torch.device("cpu"), []
    for anchor in range(20):
        rows = (
            PackedLayout.from_lengths([5, 4], "anchor", 1),
            PackedLayout.from_lengths([3, 6], "anchor", 1),
        )
        prepare(rows, "varlen", device)
        plan = api._plan(rows, "varlen", device)
        assert plan is api._plan(rows, "varlen", device)
        # Another order is another batch.
        assert plan is not api._plan(rows[::-1], "varlen", device)
        kept.append(weakref.ref(plan))
        del plan
        assert kept[-1]() is not None, anchor
    del rows
    assert [each() for each in kept] == [None] * 20


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["flex", "varlen", "segments"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_engines_within_the_error_budget(engine, interleaved, head_dim):
    rng = random.Random(0)
    layouts = [random_layout(1024, rng, 20, interleaved=interleaved) for _ in range(2)]
    q, k, v = random_qkv(2, 4, 2, 1024, head_dim, torch.bfloat16, "cuda")
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine=engine), q, k, v, layouts)
    assert errors.worst_share <= 1, errors
