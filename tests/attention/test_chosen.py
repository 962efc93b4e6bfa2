"""Attention to chosen tokens, against softmax attention with a dense mask in float64."""

import random

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.attention.chosen import Visibility, attend_chosen, visibility
from ropewalk.attention.engines import plain
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.oracle import random_layout

LENGTH, CHOSEN = 37, 6
ROUNDING = 2.0**-40
"""Of values near 1, in float64."""


def inputs_of(rows, heads=4, kv_heads=2):
    """Queries, keys and values, sinks, and for each query its own place and some others, seen and unseen."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    tensors = draw(rows, heads, LENGTH, 8), draw(rows, kv_heads, LENGTH, 8), draw(rows, kv_heads, LENGTH, 5)
    others = torch.randint(LENGTH, (rows, LENGTH, CHOSEN - 1), generator=generator)
    chosen = torch.cat([torch.arange(LENGTH).expand(rows, -1)[..., None], others], -1)
    return (*tensors, draw(heads)), chosen.to(torch.int32)


def expected(q, k, v, layouts, chosen, options):
    visible = torch.stack([layout.dense_mask() for layout in layouts])
    picked = torch.zeros_like(visible).scatter_(-1, chosen.long(), True)
    return plain_attention(q, k, v, (visible & picked)[:, None], options)


def layouts_of(count=3):
    rng = random.Random(0)
    return tuple(random_layout(LENGTH, rng, interleaved=bool(n % 2), max_anchor=3) for n in range(count))


@pytest.mark.parametrize("bytes_of_block", [plain.CPU_SCORE_BYTES, 2048])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_outputs_and_gradients_are_those_of_a_dense_mask(with_sinks, softcap, bytes_of_block, monkeypatch):
    monkeypatch.setattr(plain, "CPU_SCORE_BYTES", bytes_of_block)
    layouts = layouts_of()
    (q, k, v, sinks), chosen = inputs_of(len(layouts))
    options = AttentionOptions(scale=0.4, softcap=softcap, sinks=sinks if with_sinks else None)
    leaves = [q, k, v, *([sinks] if with_sinks else [])]
    found = attend_chosen(q, k, v, layouts, chosen, options)
    exact = expected(q, k, v, layouts, chosen, options)
    assert float((found - exact).detach().abs().max()) < ROUNDING
    cotangent = torch.randn_like(exact)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, cotangent),
        torch.autograd.grad(exact, leaves, cotangent),
        strict=True,
    ):
        assert float((ours - theirs).abs().max()) < ROUNDING * float(theirs.abs().max() + 1)


@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
def test_what_queries_see_is_the_dense_mask_of_their_row(pattern):
    layouts = tuple(
        PackedLayout.from_segments(lengths, documents, pattern, 2)
        for lengths, documents in (([9, 4, 7], [0, 1, 0]), ([6, 14], [0, 1]))
    )
    seen = visibility(layouts, torch.device("cpu"))
    for start, stop in ((0, 22), (5, 6), (7, 19)):
        exact = torch.stack([each.dense_mask()[start:stop, :stop] for each in layouts])
        assert torch.equal(seen.seen(start, stop), exact)


def test_chosen_tokens_that_a_query_does_not_see_would_be_noticed(monkeypatch):
    layouts = layouts_of()
    (q, k, v, _), chosen = inputs_of(len(layouts))
    exact = expected(q, k, v, layouts, chosen, AttentionOptions())

    def unseen(self, chosen, start, stop):
        picked = torch.zeros(*chosen[:, start:stop].shape[:2], LENGTH, dtype=torch.bool)
        return picked.scatter_(-1, chosen[:, start:stop].long(), True)[:, None, :, :stop]

    monkeypatch.setattr(Visibility, "chosen", unseen)
    wrong = attend_chosen(q, k, v, layouts, chosen, AttentionOptions())
    assert float((wrong - exact).detach().abs().max()) > 0.1
