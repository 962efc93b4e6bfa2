"""Attention in blocks against attention from its definition, and the memory that blocks are there to save."""

import cmath
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropewalk import PackedLayout
from ropewalk.attention.options import AttentionOptions
from ropewalk.audit.arithmetic import EXACT, PRODUCTS, stock_arithmetic
from ropewalk.audit.audited_model import LayerRotation
from ropewalk.audit.layer_attention import LayerAttention, block_edges, rotated, streamed_attention
from ropewalk.audit.replaced_attention import AttentionCall
from tests.audit.audit_cases import inner_products
from tests.audit.peak_bytes import peak_bytes

EPS = 2.0**-52
ARITHMETICS = {
    "float64": EXACT,
    "float32": stock_arithmetic(torch.float32),
    "bfloat16": stock_arithmetic(torch.bfloat16),
    "float16": stock_arithmetic(torch.float16),
}
ONE_AND_THE_OTHERS = [
    name if name == "float32" else pytest.param(name, marks=pytest.mark.slow) for name in sorted(ARITHMETICS)
]
"""For what takes seconds: memory is held alike, whatever the dtype of the steps."""


def random_call(
    seed,
    heads,
    kv_heads,
    length,
    head_dim,
    value_dim=None,
    window=None,
    softcap=None,
    size=1.0,
    chunk=None,
    sinks=False,
):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim)
    q, k, v = (torch.randn(n, length, d, generator=generator, dtype=torch.float64) * size for n, d in shapes)
    sink = torch.randn(heads, generator=generator, dtype=torch.float64) * 3 if sinks else None
    return AttentionCall(0, q, k, v, AttentionOptions(head_dim**-0.5, softcap, window, chunk, sink))


def random_angles(seed, length, rotary_dim):
    generator = np.random.default_rng(seed)
    positions = np.sort(generator.choice(10 * length, length, replace=False))
    return positions[:, None] * generator.uniform(0.01, 1.0, rotary_dim // 2)


def tables(angles):
    return torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))


def turned(x, angles, rotation):
    """Each pair as one complex number, times e^{i angle}."""
    x, width = x.numpy().copy(), rotation.rotary_dim
    for pair in range(width // 2):
        a, b = (pair, pair + width // 2) if rotation.style == "halves" else (2 * pair, 2 * pair + 1)
        a, b = a + rotation.start, b + rotation.start
        z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angles[:, pair])
        x[..., a], x[..., b] = z.real, z.imag
    return x


def sees(i, j, call, layout):
    """Whether query i sees key j: both in one run, in order, and near enough in it."""
    run = run_of(i, layout)
    if j > i or j not in run:
        return False
    query, key = run.index(i), run.index(j)
    if call.options.chunk is not None and query // call.options.chunk != key // call.options.chunk:
        return False
    return call.options.window is None or query - key < call.options.window


def run_of(i, layout):
    """The tokens of the sequence that the model would run on by itself: a row, a document, an anchor and a document."""
    if layout is None or layout.pattern == "full":
        return list(range(i + 1))
    bounds, owners = layout.cu_seqlens.tolist(), layout.segment_documents.tolist()

    def document(token):
        inside = [owner for owner, start in zip(owners, bounds, strict=False) if start <= token]
        return inside[-1] if inside else -1

    anchor = range(layout.anchor_length) if layout.pattern == "anchor" else ()
    own = [j for j in range(i + 1) if document(j) == document(i) and j not in anchor]
    return [j for j in anchor if j <= i] + own


def dense(call, angles, rotation, layout):
    """(output, received, scores) by the definition, one query at a time."""
    q, k = (turned(x, angles, rotation) for x in (call.query, call.key))
    v = call.value.numpy()
    heads, length, group = len(q), q.shape[1], len(q) // len(k)
    output, weights = np.zeros((heads, length, v.shape[-1])), np.zeros((heads, length, length))
    scores = np.zeros((heads, length, length))
    seen = [[j for j in range(length) if sees(i, j, call, layout)] for i in range(length)]
    for head in range(heads):
        keys, values = k[head // group], v[head // group]
        for i in range(length):
            s = keys @ q[head, i] * call.options.scale
            if call.options.softcap is not None:
                s = call.options.softcap * np.tanh(s / call.options.softcap)
            scores[head, i] = s
            largest = s[seen[i]].max()
            e = np.exp(s[seen[i]] - largest)
            # A sink is a score without a value.
            sink = 0.0 if call.options.sinks is None else np.exp(float(call.options.sinks[head]) - largest)
            weights[head, i, seen[i]] = e / (e.sum() + sink)
            output[head, i] = weights[head, i] @ values
    return output, weights, scores


def weight_error(call, scores, eps=EPS):
    """How far roundings may move a weight, relative to itself.

    A score is a sum of head_dim rotated products, off by (head_dim + 8) eps of |q| |k|, and by a few eps of itself for
    scale, softcap and exponential; a weight is a quotient of two such exponentials, and of a sum over the row.
    """
    head_dim, length = call.query.shape[-1], call.query.shape[1]
    norms = [float(x.norm(dim=-1).max()) for x in (call.query, call.key)]
    score = (head_dim + 8) * eps * call.options.scale * math.prod(norms) + 8 * eps * float(
        np.abs(scores).max()
    )
    return 2 * score + (length + 8) * eps


@st.composite
def cases(draw):
    length = draw(st.integers(1, 24))
    kv_heads = draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 5))
    rotation = LayerRotation(
        None, 2 * draw(st.integers(0, head_dim // 2)), draw(st.sampled_from(["halves", "interleaved"]))
    )
    if draw(st.booleans()):
        # The last dimensions of a head.
        rotation = replace(rotation, start=head_dim - rotation.rotary_dim)
    call = random_call(
        draw(st.integers(0, 10**6)),
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        length,
        head_dim,
        draw(st.integers(1, 7)),
        draw(st.none() | st.integers(1, 26)),
        draw(st.none() | st.floats(0.5, 30)),
        draw(st.sampled_from([0.3, 1.0, 3.0])),
        draw(st.none() | st.integers(1, 26)),
        draw(st.booleans()),
    )
    return call, rotation, draw(layouts(length)), draw(st.integers(0, 10**6))


@st.composite
def layouts(draw, length):
    if length < 3 or draw(st.booleans()):
        return None
    pattern = draw(st.sampled_from(["full", "intra_document", "anchor"]))
    anchor = draw(st.integers(0, 2))
    cuts = (
        sorted(draw(st.sets(st.integers(anchor + 1, length - 1), max_size=5))) if anchor + 1 < length else []
    )
    bounds = [anchor, *cuts, length]
    sizes = [b - a for a, b in pairwise(bounds)]
    # Any owner of any segment: segments of one document need not be neighbours.
    owners = draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    return PackedLayout.from_segments(sizes, owners, pattern, anchor)


BLOCKS = st.sampled_from([1, 100, 1000, 5000, 2**40])


@given(case=cases(), block_bytes=BLOCKS)
@settings(max_examples=60)
def test_blocks_in_float64_are_attention_by_its_definition(case, block_bytes):
    call, rotation, layout, seed = case
    length = call.query.shape[1]
    angles = random_angles(seed, length, rotation.rotary_dim)
    output, trace = streamed_attention(
        LayerAttention(call, tables(angles), rotation, EXACT, layout), block_bytes
    )
    expected, weights, scores = dense(call, angles, rotation, layout)
    allowed = weight_error(call, scores)
    largest = float(call.value.abs().max())
    np.testing.assert_allclose(output.numpy(), expected, rtol=0, atol=2 * allowed * largest)
    np.testing.assert_allclose(trace.received.numpy(), weights.sum(1), rtol=0, atol=length * allowed)
    if call.options.sinks is None:
        np.testing.assert_allclose(trace.received.sum(-1).numpy(), length, rtol=0, atol=length * allowed)
    seen = np.array([[sees(i, j, call, layout) for j in range(length)] for i in range(length)])
    np.testing.assert_allclose(
        trace.first_scores.numpy(), np.where(seen[:, 0], scores[..., 0], 0), rtol=0, atol=allowed
    )
    assert trace.seen_by.tolist() == seen.sum(0).tolist()
    # Evenly: each query gives every token that it sees the same. Quotients of whole numbers, in float32.
    np.testing.assert_allclose(trace.even.numpy(), (seen / seen.sum(1)[:, None]).sum(0), rtol=length * 1.2e-7)
    assert output.dtype == trace.received.dtype == trace.first_scores.dtype == torch.float64


def rounding_of(call, arithmetic):
    """How far another order of summation may move a weight: by a rounding of its score, and one of its own."""
    norms = [float(x.norm(dim=-1).max()) for x in (call.query, call.key)]
    largest = call.options.scale * math.prod(norms)
    if call.options.softcap is not None:
        largest = largest + call.options.softcap
    eps = torch.finfo(arithmetic.scores).eps
    summed = (call.query.shape[-1] + call.query.shape[1] + 16) * torch.finfo(arithmetic.wide).eps
    # Five roundings of a score at the most: product, scale, quotient, tanh, softcap.
    return math.expm1(2 * (5 * eps + summed) * (1 + largest)) + eps


@given(case=cases(), name=st.sampled_from(sorted(ARITHMETICS)), block_bytes=BLOCKS)
@settings(max_examples=60)
def test_the_size_of_a_block_changes_no_more_than_the_order_of_sums(case, name, block_bytes):
    call, rotation, layout, seed = case
    arithmetic = ARITHMETICS[name]
    length = call.query.shape[1]
    angles = random_angles(seed, length, rotation.rotary_dim)
    (a, one), (b, other) = (
        streamed_attention(LayerAttention(call, tables(angles), rotation, arithmetic, layout), size)
        for size in (block_bytes, 2**40)
    )
    allowed = rounding_of(call, arithmetic)
    torch.testing.assert_close(one.received, other.received, rtol=0, atol=length * allowed)
    largest = float(call.value.abs().max())
    atol = (allowed + torch.finfo(arithmetic.rest).eps) * largest
    torch.testing.assert_close(a, b, rtol=0, atol=2 * atol)
    assert a.dtype == arithmetic.rest


@given(seed=st.integers(0, 10**6), block_bytes=BLOCKS, name=st.sampled_from(sorted(ARITHMETICS)))
def test_where_sums_are_exact_no_bit_depends_on_the_size_of_a_block(seed, block_bytes, name):
    """Scores of whole numbers are exact in any order.

    In general their sums are not: the order in which a matrix product adds up depends on its shape, and a last bit of
    float32 that differs may turn a rounding to bfloat16 the other way.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randint(-3, 4, (2, 20, 8), generator=generator).double() for _ in range(3))
    call = AttentionCall(0, q, k, v, AttentionOptions(0.25))
    traces = [
        streamed_attention(
            LayerAttention(
                call, tables(np.zeros((20, 0))), LayerRotation(None, 0, "halves"), ARITHMETICS[name]
            ),
            size,
        )[1]
        for size in (block_bytes, 2**40)
    ]
    assert torch.equal(traces[0].first_scores, traces[1].first_scores)
    assert torch.equal(traces[0].first_scores, (q @ k.mT)[..., 0] * 0.25)


@pytest.mark.parametrize("name", sorted(ARITHMETICS))
@pytest.mark.parametrize("hidden", ["window", "documents"])
def test_a_first_token_out_of_sight_has_no_score(name, hidden):
    call = random_call(0, 2, 1, 12, 4, window=3 if hidden == "window" else None)
    layout = PackedLayout.from_lengths([5, 7], "intra_document", 0) if hidden == "documents" else None
    angles = random_angles(0, 12, 4)
    _, trace = streamed_attention(
        LayerAttention(call, tables(angles), LayerRotation(None, 4, "halves"), ARITHMETICS[name], layout)
    )
    scores = dense(call, angles, LayerRotation(None, 4, "halves"), layout)[2]
    seen = np.array([sees(i, 0, call, layout) for i in range(12)])
    assert 0 < seen.sum() < 12
    allowed = rounding_of(call, ARITHMETICS[name])
    np.testing.assert_allclose(
        trace.first_scores.numpy(), np.where(seen, scores[..., 0], 0), rtol=0, atol=allowed
    )
    assert not trace.first_scores[:, torch.from_numpy(~seen)].any()


@given(case=cases())
@example(case=(random_call(1, 2, 1, 5, 4), LayerRotation(None, 4, "interleaved"), None, 1))
def test_a_rotation_is_a_product_of_complex_numbers(case):
    call, rotation, _, seed = case
    angles = random_angles(seed, call.query.shape[1], rotation.rotary_dim)
    found = rotated(call.query, *tables(angles), rotation, EXACT).numpy()
    largest = float(call.query.abs().max())
    np.testing.assert_allclose(found, turned(call.query, angles, rotation), rtol=0, atol=8 * EPS * largest)


def test_a_pair_is_turned_as_python_turns_a_complex_number():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    angles = np.array([[0.3]])
    z = (1 + 3j) * cmath.exp(0.3j)
    for style, width, expected in (
        ("halves", 2, None),
        ("interleaved", 2, None),
        ("halves", 4, [z.real, 2.0, z.imag, 4.0]),
    ):
        turns = np.array([[0.3, 0.0]]) if width == 4 else angles
        found = rotated(x, *tables(turns), LayerRotation(None, width, style), EXACT).flatten().tolist()
        if expected is None:
            first = (1 + 2j) * cmath.exp(0.3j)
            expected = [first.real, first.imag, 3.0, 4.0]
        assert found == pytest.approx(expected, abs=4 * EPS * 4)


def test_products_of_a_rotation_are_rounded_and_their_sum_is_not():
    x = torch.tensor([[[1.0, 1.0]]])
    cos, sin = torch.tensor([[1.0]]), torch.tensor([[2.0**-12]])
    arithmetic = replace(stock_arithmetic(torch.bfloat16), product="float32")
    found = rotated(x, cos, sin, LayerRotation(None, 2, "halves"), arithmetic)
    assert found.flatten().tolist() == [1 - 2**-12, 1 + 2**-12]


@pytest.mark.parametrize("product", PRODUCTS)
def test_scores_are_the_product_that_the_arithmetic_names(product):
    """All else exact, first_scores are the scaled products with the first key."""
    call = random_call(2, 2, 1, 6, 8)
    arithmetic = replace(EXACT, product=product)
    _, trace = streamed_attention(
        LayerAttention(call, tables(np.zeros((6, 0))), LayerRotation(None, 0, "halves"), arithmetic)
    )
    expected = inner_products(call.query, call.key, product).double()[..., 0] * call.options.scale
    # The same products of the same operands, perhaps added in another order.
    sums_in = torch.float64 if product == "float64" else torch.float32
    size = (call.query.abs() @ call.key[:, :1].abs().transpose(-2, -1))[..., 0] * call.options.scale
    bound = call.query.shape[-1] * torch.finfo(sums_in).eps * size.double()
    assert bool(((trace.first_scores - expected).abs() <= bound).all())


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_rounded_after_each_step_as_in_a_tensor_of_their_dtype(dtype, softcap):
    """Whole numbers, whose products are exact until they are rounded: to the last bit what torch does in the dtype."""
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randint(-15, 16, (2, 30, 8), generator=generator).double() for _ in range(2))
    call = AttentionCall(0, q, k, k, AttentionOptions(0.3, softcap))
    plain = LayerRotation(None, 0, "halves")
    _, trace = streamed_attention(
        LayerAttention(call, tables(np.zeros((30, 0))), plain, stock_arithmetic(dtype))
    )
    expected = (q @ k.mT)[..., 0].to(dtype) * 0.3
    if softcap is not None:
        expected = torch.tanh(expected / softcap) * softcap
    assert expected.dtype == dtype
    assert torch.equal(trace.first_scores, expected.double())


def masked_weights(call, arithmetic):
    """``[heads, length, length]``: all weights at once."""
    layer = LayerAttention(
        call, tables(np.zeros((call.query.shape[1], 0))), LayerRotation(None, 0, "halves"), arithmetic
    )
    return layer.weights(*layer.scores(0, call.query.shape[1])).flatten(0, 1)


def eager_weights(call, dtype):
    """What transformers' own eager attention of gpt-oss makes of a call in a dtype."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = (x[None].to(dtype) for x in (call.query, call.key, call.value))
    module = torch.nn.Module().eval()
    module.num_key_value_groups = len(call.query) // len(call.key)
    module.sinks = call.options.sinks.to(dtype)
    length = q.shape[2]
    mask = torch.zeros(length, length, dtype=dtype).masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), torch.finfo(dtype).min
    )
    return eager_attention_forward(module, q, k, v, mask, call.options.scale)[1][0]


@pytest.mark.parametrize("seed", range(3))
def test_sinks_in_float64_are_those_of_gpt_oss(seed):
    call = random_call(seed, 4, 2, 30, 8, size=2.0, sinks=True)
    expected = eager_weights(call, torch.float64)
    found = masked_weights(call, EXACT)
    scores = dense(call, np.zeros((30, 0)), LayerRotation(None, 0, "halves"), None)[2]
    torch.testing.assert_close(found, expected, rtol=0, atol=weight_error(call, scores))
    # The sinks take their share.
    assert bool((found.sum(-1) < 1).all())
    assert float(found.sum(-1).min()) < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_sinks_are_rounded_to_the_last_bit_as_gpt_oss_does(seed, dtype):
    """Whole numbers, whose products are exact until they are rounded; scores of tens, so that roundings show."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(-15, 16, (heads, 30, 8), generator=generator).double() for heads in (4, 2))
    sinks = torch.randn(4, generator=generator).double() * 30
    call = AttentionCall(0, q, k, k, AttentionOptions(0.03, sinks=sinks.to(dtype)))
    found, expected = masked_weights(call, stock_arithmetic(dtype)), eager_weights(call, dtype)
    assert found.dtype == expected.dtype == dtype
    assert torch.equal(found, expected)
    if dtype != torch.float32:
        # A maximum that is subtracted before it is rounded would give others.
        unrounded = replace(stock_arithmetic(dtype), scores=torch.float32)
        assert not torch.equal(masked_weights(call, unrounded), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_their_dtype_before_they_are_summed(dtype):
    call = random_call(3, 2, 2, 9, 4)
    arithmetic = replace(EXACT, weights=dtype)
    plain = LayerRotation(None, 0, "halves")
    _, trace = streamed_attention(LayerAttention(call, tables(np.zeros((9, 0))), plain, arithmetic))
    weights = torch.from_numpy(dense(call, np.zeros((9, 0)), plain, None)[1])
    # A weight next to a tie may round either way; random ones are not.
    torch.testing.assert_close(trace.received, weights.to(dtype).double().sum(1), rtol=0, atol=9 * EPS)


@pytest.mark.parametrize(
    ("device", "length", "block_bytes", "queries"),
    [
        ("cpu", 512, None, 128),
        ("cpu", 4096, None, 64),
        # So long a row that not even 64 queries fit into the largest block.
        ("cpu", 2**18, None, 4),
        ("cuda", 512, None, 2048),
        ("cpu", 512, 2**40, 2**25),
        ("cpu", 512, 10 * 2**15, 10),
        ("cuda", 512, 1, 1),
    ],
)
def test_blocks_are_of_a_size_that_suits_the_device(device, length, block_bytes, queries):
    edges = block_edges(length, 8, 8, (33,), block_bytes, torch.device(device))
    assert edges == sorted({*range(0, length, queries), 33, length})


def held_at_once(length, arithmetic, block_bytes, sinks=False):
    """Bytes at the peak, and the bytes of what is as long as the row: a dozen tensors like the queries."""
    heads, head_dim = 2, 4
    call = random_call(0, heads, heads, length, head_dim, sinks=sinks)
    call = replace(
        call, **{name: getattr(call, name).to(arithmetic.rest) for name in ("query", "key", "value")}
    )
    angles = tables(random_angles(0, length, head_dim))
    rotation = LayerRotation(None, head_dim, "halves")
    peak = peak_bytes(
        lambda: streamed_attention(LayerAttention(call, angles, rotation, arithmetic), block_bytes)
    )
    return peak, 12 * heads * length * head_dim * 8


@pytest.mark.parametrize("name", ONE_AND_THE_OTHERS)
@pytest.mark.parametrize("sinks", [False, True])
def test_memory_is_six_blocks_and_what_is_as_long_as_the_row(name, sinks):
    block_bytes = 2**20
    peak, linear = held_at_once(2048, ARITHMETICS[name], block_bytes, sinks)
    assert peak <= 6 * block_bytes + linear


def test_all_scores_at_once_do_not_fit_into_that_memory():
    peak, linear = held_at_once(2048, EXACT, 2**40)
    assert peak >= 2 * 2048**2 * 8 > 6 * 2**20 + linear


@pytest.mark.parametrize("name", ONE_AND_THE_OTHERS)
def test_a_row_twice_as_long_takes_no_more_than_twice_the_memory(name):
    short, long = (held_at_once(length, ARITHMETICS[name], 2**18)[0] for length in (512, 1024))
    assert long <= 2 * short
