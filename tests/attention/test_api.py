"""Every engine against the float64 oracle, within twice the error of plain attention in the same dtype."""

import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import EngineError, PackedLayout, RopewalkError, attend
from ropewalk.attention import prepare
from ropewalk.attention.choices import PATTERNS
from ropewalk.attention.options import EVERYTHING, AttentionOptions
from ropewalk.testing import (
    attention_errors,
    cut_row,
    random_layout,
    repeated_anchor_attention,
)
from tests.attention.attention_cases import random_qkv

CUDA = torch.cuda.is_available()


@given(seed=st.integers(0, 10**6), anchor=st.integers(1, 3), interleaved=st.booleans())
@settings(max_examples=20, deadline=None)
def test_anchor_by_mask_by_gather_and_by_repetition_agree(seed, anchor, interleaved):
    rng = random.Random(seed)
    lengths = cut_row(rng.randint(20, 120), rng.randint(1, 9), rng)
    documents = [rng.randrange(3) for _ in lengths] if interleaved else range(len(lengths))
    layout = PackedLayout.from_segments(lengths, documents, "anchor", anchor)
    q, k, v = (x.double() for x in random_qkv(1, 4, 2, layout.total_length, 8, seed=seed))
    by_mask = attend(q, k, v, layout, engine="reference")
    by_gather = attend(q, k, v, layout, engine="sdpa")
    by_repetition = repeated_anchor_attention(q, k, v, layout)
    torch.testing.assert_close(by_gather, by_mask, rtol=0, atol=1e-13)
    torch.testing.assert_close(by_repetition, by_mask, rtol=0, atol=1e-13)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_document_in_a_row_attends_as_it_does_alone(pattern):
    layout = PackedLayout.from_lengths([20, 33, 5], pattern, 1)
    q, k, v = (x.double() for x in random_qkv(1, 2, 1, layout.total_length, 8))
    packed = attend(q, k, v, layout, engine="sdpa")
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
    errors = attention_errors(lambda *qkv: attend(*qkv, off_by_one, engine="sdpa"), q, k, v, [layout])
    assert errors.worst_share > 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda q, k, v, lay: attend(q, k, v, lay, engine="varlen"),
            "varlen needs CUDA.*use engine sdpa",
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
        (((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)), "describes 10 tokens, but the tensors have 9"),
        (((1, 2, 10, 8), (1, 2, 12, 8), (1, 2, 12, 8)), "query and key must have the same batch and length"),
        (((2, 10, 8), (2, 10, 8), (2, 10, 8)), "query must be"),
        (
            ((1, 2, 10, 8), (1, 2, 10, 4), (1, 2, 10, 8)),
            "key must have the batch, heads and length of value, and the head_dim of query",
        ),
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
    from ropewalk.attention import packed

    calls = []
    monkeypatch.setattr(packed, "plan", lambda *a, plan=packed.plan: calls.append(1) or plan(*a))
    layout = PackedLayout.from_lengths([5, 4])
    for _ in range(4):
        attend(*random_qkv(1, 2, 2, 10, 8), layout, engine="sdpa")
    assert len(calls) == 1


def test_auto_says_once_what_it_took(caplog):
    from ropewalk.attention import api

    api._log_choice_once.cache_clear()
    layout = PackedLayout.from_lengths([5, 4])
    with caplog.at_level("INFO", logger="ropewalk"):
        for _ in range(3):
            attend(*random_qkv(1, 2, 2, 10, 8), layout)
    assert caplog.messages == ["attention engine sdpa on cpu (auto)"]


def test_plans_die_with_their_rows():
    from ropewalk.attention import api

    device, kept = torch.device("cpu"), []
    for anchor in range(20):
        rows = (
            PackedLayout.from_lengths([5, 4], "anchor", 1),
            PackedLayout.from_lengths([3, 6], "anchor", 1),
        )
        prepare(rows, "varlen", device)
        plan = api._plan(rows, "varlen", device, EVERYTHING)
        assert plan is api._plan(rows, "varlen", device, EVERYTHING)
        # Another order is another batch.
        assert plan is not api._plan(rows[::-1], "varlen", device, EVERYTHING)
        kept.append(weakref.ref(plan))
        del plan
        assert kept[-1]() is not None, anchor
    del rows
    assert [each() for each in kept] == [None] * 20


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["flex", "varlen", "sdpa"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gpu_engines_within_the_error_budget(engine, interleaved, head_dim):
    rng = random.Random(0)
    layouts = [random_layout(1024, rng, 20, interleaved=interleaved) for _ in range(2)]
    q, k, v = random_qkv(2, 4, 2, 1024, head_dim, torch.bfloat16, "cuda")
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine=engine), q, k, v, layouts)
    assert errors.worst_share <= 1, errors


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["varlen", "sdpa"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 200}, {"chunk": 300}, {"sinks": True}, {"window": 100, "sinks": True}], ids=str
)
def test_gpu_kernels_take_the_merged_output_and_log_sum_exp(engine, options):
    """Anchors of several tokens, windows, chunks and sinks, with gradients of the sinks too."""
    rng = random.Random(1)
    layouts = [random_layout(2048, rng, 9, ["anchor"], max_anchor=5) for _ in range(2)]
    q, k, v = random_qkv(2, 8, 2, 2048, 128, torch.bfloat16, "cuda")
    sinks = torch.randn(8, device="cuda", requires_grad=True) if options.get("sinks") else None
    made = AttentionOptions(window=options.get("window"), chunk=options.get("chunk"), sinks=sinks)
    errors = attention_errors(lambda *qkv: attend(*qkv, layouts, engine, made), q, k, v, layouts, made)
    assert errors.worst_share <= 1, errors
    if sinks is not None:
        exact = attend(*(x.double() for x in (q, k, v)), layouts, "reference", made)
        # With the output as its own gradient all summands have one sign, so their relative errors bound the sum's.
        grad = exact.detach().bfloat16()
        (expected,) = torch.autograd.grad(exact, sinks, grad.double())
        (found,) = torch.autograd.grad(attend(q, k, v, layouts, engine, made), sinks, grad)
        # Weights and output are rounded to 16 bits, by half a unit of 2^-7 each; and the output once more when merged.
        torch.testing.assert_close(found, expected, rtol=3 * 2**-8, atol=0)
