"""Windows, chunks and sinks in every engine, against softmax attention that is written out here, in float64."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import PackedLayout, RopewalkError, attend
from ropewalk.attention.engines import plain
from ropewalk.attention.options import AttentionOptions
from ropewalk.testing import attention_errors, random_layout

STEPS = 2.0**-52


def runs_of(layout: PackedLayout) -> list[list[int]]:
    """The token lists on which the model would compute the same by itself, from the fields of the layout alone."""
    tokens = list(range(layout.total_length))
    if layout.pattern == "full":
        return [tokens]
    anchor = tokens[: layout.anchor_length]
    documents: dict[int, list[int]] = {}
    starts = layout.cu_seqlens.tolist()
    for document, start, end in zip(layout.segment_documents.tolist(), starts, starts[1:], strict=False):
        documents.setdefault(document, []).extend(range(start, end))
    if layout.pattern == "anchor":
        return [anchor + own for own in documents.values()]
    return [run for run in (anchor, *documents.values()) if run]


def written_out(q, k, v, layout: PackedLayout, options: AttentionOptions):
    """Each run by itself: scores, cap, mask by distance in the run, and a softmax with the sink in its sum."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    output = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for run in runs_of(layout):
        index = torch.tensor(run)
        place = torch.arange(len(run))
        behind = place[:, None] - place[None, :]
        seen = behind >= 0
        if options.window is not None:
            seen &= behind < options.window
        if options.chunk is not None:
            seen &= (place[:, None] // options.chunk) == (place[None, :] // options.chunk)
        scale = q.shape[3] ** -0.5 if options.scale is None else options.scale
        scores = scale * torch.einsum("bhqd,bhkd->bhqk", q[:, :, index], k[:, :, index])
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        exponentials = torch.where(seen, scores, -torch.inf).exp()
        total = exponentials.sum(-1, keepdim=True)
        if options.sinks is not None:
            total = total + options.sinks.exp()[None, :, None, None]
        output = output.index_copy(2, index, (exponentials / total) @ v[:, :, index])
    return output


def draw(seed: int, total: int | None = None):
    rng = random.Random(seed)
    total = total or rng.randint(10, 90)
    layout = random_layout(total, rng, 6, interleaved=rng.random() < 0.4, max_anchor=rng.choice([1, 9]))
    torch.manual_seed(seed)
    heads, kv_heads, value_dim = rng.choice([2, 4]), rng.choice([1, 2]), rng.choice([8, 6])
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, value_dim))
    inputs = [torch.randn(1, h, total, d, dtype=torch.float64, requires_grad=True) for h, d in shapes]
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True) if rng.random() < 0.5 else None
    # Shorter than documents, as long as some, and longer than the row.
    window = rng.choice([None, 1, 2, rng.randint(1, total), total + 5])
    chunk = rng.choice([None, None, rng.randint(1, total)])
    options = AttentionOptions(rng.choice([None, 0.3]), rng.choice([None, None, 2.0]), window, chunk, sinks)
    return layout, inputs, options


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), score_bytes=st.sampled_from([1, 500, 4 * 2**20]))
@settings(deadline=None)
def test_engines_equal_each_run_written_out(seed, score_bytes):
    layout, inputs, options = draw(seed)
    leaves = [*inputs, *([] if options.sinks is None else [options.sinks])]
    expected = written_out(*inputs, layout, options)
    cotangent = torch.randn_like(expected)
    exact = (expected, *torch.autograd.grad(expected, leaves, cotangent))
    # Sums of as many terms as the row has tokens, in another order.
    budget = 8 * layout.total_length * STEPS * max(float(x.detach().abs().max()) for x in exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "CPU_SCORE_BYTES", score_bytes)
        patch.setattr(plain, "LEAST_BLOCK", 3)
        for engine in ("reference", "sdpa"):
            output = attend(*inputs, layout, engine, options)
            found = (output, *torch.autograd.grad(output, leaves, cotangent))
            for a, b in zip(found, exact, strict=True):
                assert float((a - b).detach().abs().max()) <= budget, engine
        with torch.no_grad():
            output = attend(*inputs, layout, "flex", options)
        assert float((output - expected).detach().abs().max()) <= budget


@pytest.mark.parametrize("fault", [{"window": 6}, {"window": 8}, {"window": None}, {"sinks": None}])
def test_another_window_or_no_sink_is_noticed(fault):
    layout, inputs, _ = draw(1, 60)
    sinks = torch.randn(inputs[0].shape[1], dtype=torch.float64)
    options = AttentionOptions(window=7, sinks=sinks)
    expected = written_out(*inputs, layout, options)
    found = attend(*inputs, layout, "sdpa", replace(options, **fault))
    assert float((found - expected).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_windows_and_sinks_within_the_error_budget(dtype, seed):
    layout, inputs, options = draw(seed, 600)
    options = replace(options, window=(40, 200)[seed % 2], sinks=torch.randn(inputs[0].shape[1]))
    inputs = [x.detach().to(dtype) for x in inputs]
    errors = attention_errors(
        lambda q, k, v: attend(q, k, v, layout, "sdpa", options), *inputs, [layout], options
    )
    assert errors.worst_share <= 1, errors


def test_a_window_computes_no_more_than_its_keys(monkeypatch):
    """Work and memory of a windowed layer grow with the window: no product is of the whole row."""
    products = []
    scores = plain._scores

    def counted(q, k, options):
        products.append((q.shape[2], k.shape[2]))
        return scores(q, k, options)

    monkeypatch.setattr(plain, "_scores", counted)
    layout = PackedLayout.from_lengths([6000, 2191])
    q = k = v = torch.randn(1, 1, layout.total_length, 8)
    attend(q, k, v, layout, "sdpa", AttentionOptions(window=512))
    ideal = layout.total_length * 512
    assert sum(a * b for a, b in products) <= 1.3 * ideal
    assert max(b for _, b in products) <= 512 + 128 + 128


@pytest.mark.parametrize("name", ["window", "chunk"])
@pytest.mark.parametrize("tokens", [0, -3])
def test_windows_and_chunks_of_no_token_are_refused(name, tokens):
    layout, inputs, _ = draw(0)
    with pytest.raises(
        RopewalkError, match=f"the {name} of an attention layer must be 1 token or more, got {tokens}"
    ):
        attend(*inputs, layout, "sdpa", AttentionOptions(**{name: tokens}))


def test_sinks_of_other_heads_are_refused():
    layout, inputs, _ = draw(0)
    heads = inputs[0].shape[1]
    with pytest.raises(
        RopewalkError, match=rf"must have the shape \(num_heads,\) = \({heads},\), got \({heads + 1},\)"
    ):
        attend(*inputs, layout, "sdpa", AttentionOptions(sinks=torch.zeros(heads + 1)))
