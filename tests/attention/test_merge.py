"""Extra keys and sinks merged into attention over a part of the keys give attention over them all, in float64."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.attention import merge as module
from ropewalk.attention.merge import ExtraKeys, merge, merge_backward
from ropewalk.attention.options import AttentionOptions

WIDE = torch.float64


def over_all_keys(q, k, v, own, extra_k, extra_v, seen, options):
    """Softmax attention of ``[B, T, H, D]`` to own keys ``[B, S, K, D]``, extra keys and sinks, and its lse."""
    groups = q.shape[2] // k.shape[2]
    keys, values = (torch.cat(x, 1).repeat_interleave(groups, 2) for x in ((k, extra_k), (v, extra_v)))
    scores = torch.einsum("bthd,bshd->bths", q, keys) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    visible = torch.cat([own, seen], 2)[:, :, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)], -1)
        values = torch.cat([values, values.new_zeros(values.shape[0], 1, *values.shape[2:])], 1)
    return torch.einsum("bths,bshd->bthd", scores.softmax(-1), values), scores.logsumexp(-1)


def kernel_backward(grad, q, k, v, own, out, m, options):
    """A flash backward that is written out: weights are ``exp(scores - m)``, and need not sum to one."""
    groups = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bths", q, keys) * options.scale
    slope = 1.0
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
        slope = 1 - (scores / options.softcap) ** 2
    p = (scores - m[..., None]).exp().masked_fill(~own[:, :, None], 0.0)
    ds = p * (torch.einsum("bthd,bshd->bths", grad, values) - (grad * out).sum(-1)[..., None]) * slope
    dq = torch.einsum("bths,bshd->bthd", ds, keys) * options.scale
    dk = torch.einsum("bths,bthd->bshd", ds, q) * options.scale
    dv = torch.einsum("bths,bthd->bshd", p, grad)
    return dq, *(x.unflatten(2, (-1, groups)).sum(3) for x in (dk, dv))


def by_head(x_BTH):
    return x_BTH.permute(2, 0, 1).flatten(1)


def merged(inputs, own, seen, options, most_scores=2**27):
    """Output and gradients of q, k, v, extra keys, extra values and sinks, by the merge."""
    q, k, v, extra_k, extra_v = (x.detach() for x in inputs)
    without = AttentionOptions(options.scale, options.softcap)
    extra = ExtraKeys(extra_k, extra_v, seen) if extra_k.shape[1] else None
    nothing = torch.zeros(*q.shape[:2], 0, dtype=torch.bool)
    out, lse = over_all_keys(q, k, v, own, extra_k[:, :0], extra_v[:, :0], nothing, without)
    grad = torch.randn(out.shape, dtype=WIDE, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_SCORES", most_scores)
        total, m = merge(out.flatten(0, 1), by_head(lse), q.flatten(0, 1), extra, options)
        m_BTH = m.unflatten(1, q.shape[:2]).permute(1, 2, 0)
        dq, dk, dv = kernel_backward(grad, q, k, v, own, total.view_as(out), m_BTH, options)
        dq, more = merge_backward(
            grad.flatten(0, 1), q.flatten(0, 1), total, m, dq.flatten(0, 1), extra, options
        )
    return grad, (total.view_as(out), dq.view_as(q), dk, dv, more.k, more.v, more.sinks)


def drawn(seed, batch, tokens, anchors, kv_heads, groups, width, value_width, softcap, with_sinks):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, tokens, kv_heads * groups, width),
        *((batch, tokens, kv_heads, n) for n in (width, value_width)),
        *((batch, anchors, kv_heads, n) for n in (width, value_width)),
    ]
    inputs = [torch.randn(shape, dtype=WIDE, generator=generator).requires_grad_() for shape in shapes]
    sinks = torch.randn(kv_heads * groups, dtype=WIDE, generator=generator) if with_sinks else None
    own = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(batch, -1, -1)
    seen = torch.rand(batch, tokens, anchors, generator=generator) < 0.7
    if anchors:
        # Some queries see no extra key at all.
        seen[:, ::3] = False
    return inputs, own, seen, AttentionOptions(0.4, softcap, sinks=sinks)


@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 12),
    anchors=st.integers(0, 6),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    value_width=st.sampled_from([4, 6]),
    softcap=st.sampled_from([None, 1.5]),
    with_sinks=st.booleans(),
    most_scores=st.sampled_from([1, 100, 2**27]),
)
@settings(deadline=None)
def test_merged_attention_is_attention_over_all_keys(seed, most_scores, **shape):
    compare(seed, most_scores, **shape)


def compare(seed, most_scores, **shape):
    inputs, own, seen, options = drawn(seed, width=4, **shape)
    grad, found = merged(inputs, own, seen, options, most_scores)
    leaves = [*inputs]
    if options.sinks is not None:
        leaves.append(options.sinks.requires_grad_())
    expected, _ = over_all_keys(inputs[0], inputs[1], inputs[2], own, inputs[3], inputs[4], seen, options)
    wanted = dict(enumerate([expected, *torch.autograd.grad(expected, leaves, grad)]))
    for number, value in enumerate(found):
        if value is not None:
            assert float((value - wanted[number]).detach().abs().max()) <= 1e-12
        else:
            assert number not in wanted or wanted[number].numel() == 0


def test_nothing_to_merge_changes_nothing():
    out, lse = torch.randn(5, 2, 4), torch.randn(2, 5)
    assert merge(out, lse, out, None, AttentionOptions())[0] is out
    dq, more = merge_backward(out, out, out, lse, out, None, AttentionOptions())
    assert dq is out
    assert (more.k, more.v, more.sinks) == (None, None, None)


def test_gradients_of_extra_keys_add_up_in_float32():
    """4,000 queries give an extra value a gradient that sums in bfloat16 would stall on."""
    q, v = torch.zeros(4000, 1, 8, dtype=torch.bfloat16), torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    extra = ExtraKeys(torch.zeros_like(v), v, torch.ones(1, 4000, 1, dtype=torch.bool))
    out, m = merge(torch.zeros_like(q), torch.zeros(1, 4000), q, extra, AttentionOptions())
    _, more = merge_backward(torch.ones_like(q), q, out, m, q, extra, AttentionOptions())
    assert more.v.dtype == torch.float32
    # Each query gives half of its weight to the extra key.
    torch.testing.assert_close(more.v, torch.full_like(more.v, 2000.0), rtol=1e-6, atol=0)


MUTATIONS = {
    "scores are not scaled": ("scores = scale * _dots(", "scores = _dots("),
    "scores are rounded to 16 bits": (
        "_dots(q_BTHD.to(wide), k_BAKD.to(wide))",
        "_dots(q_BTHD.to(wide), k_BAKD.to(wide)).bfloat16().to(wide)",
    ),
    "extra keys that are not seen enter the sum": (
        "scores.masked_fill(~seen_BTA[:, :, None], -math.inf)",
        "scores",
    ),
    "unseen keys get gradients": (".exp().masked_fill(~seen_BTA[:, :, None], 0.0)", ".exp()"),
    "the kernel's output is not scaled down": ("* (lse - m).exp()[..., None]", "* 1.0"),
    "sinks do not enter the sum": ("m = torch.logaddexp(m, sinks_H.to(wide))", "m = m"),
    "delta is left out": ("- delta[..., None])", "- 0 * delta[..., None])"),
    "gradients of queries miss the extra keys": (
        "+ _weighted(ds, k_BAKD.to(wide))",
        "+ 0 * _weighted(ds, k_BAKD.to(wide))",
    ),
    "gradients of extra keys are not scaled": ("ds = scale * p *", "ds = p *"),
    "gradients of extra values take those of scores": (
        "_summed(p, grad, kv_heads)",
        "_summed(ds, grad, kv_heads)",
    ),
    "gradients of sinks have the other sign": ("dsinks = -((", "dsinks = (("),
    "the slope of the soft cap is left out": ("ds = ds * (1 - (scores / softcap).square())", "pass"),
    "a block of queries is lost": ("each[1:], each[0]", "each[1:1], each[0]"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_formula_is_noticed(monkeypatch, name):
    before, after = MUTATIONS[name]
    source = inspect.getsource(module)
    assert source.count(before) == 1
    wrong = ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, wrong)
    exec(compile(source.replace(before, after), module.__file__, "exec"), wrong.__dict__)
    for each in ("merge", "merge_backward", "module"):
        monkeypatch.setitem(globals(), each, wrong if each == "module" else getattr(wrong, each))
    shape = {"batch": 2, "tokens": 9, "anchors": 2, "kv_heads": 2, "groups": 2, "value_width": 6}
    with pytest.raises(AssertionError):
        compare(4, 20, softcap=1.5, with_sinks=True, **shape)
