"""Chunked token losses against the plain cross entropy of the model's own logits."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from ropewalk import PackedLayout, RopewalkError
from ropewalk.attention.layout import IGNORED, next_token_labels
from ropewalk.models.compute import losses, tiles
from ropewalk.models.compute.losses import OutputHead, chunked_token_losses, token_losses
from ropewalk.models.load import attach
from tests.models.families import FAMILIES, tiny_model

LAYOUT = PackedLayout.from_lengths([20, 1, 30, 12], "anchor")


def row():
    ids = torch.randint(3, 97, (64,), generator=torch.Generator().manual_seed(2))
    return ids, next_token_labels(ids, LAYOUT)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_token_losses_equal_the_models_own_logits(family):
    model = tiny_model(family)
    attach(model)
    ids, labels = row()
    head = OutputHead.of(model)
    found = token_losses(model, ids[None], labels[None], [LAYOUT], head)[0]
    logits = model(ids[None], layout=LAYOUT).logits[0].float()
    expected = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    # Losses of about ln 97 from float32 logits.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_neither_loss_nor_gradients(monkeypatch, softcap, chunk):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 50, bias=True)
    hidden = torch.randn(64, 16)
    labels = torch.randint(0, 50, (64,))
    labels[::5] = IGNORED
    head = OutputHead(linear, multiplier=1.5, softcap=softcap)

    def gradients():
        h = hidden.clone().requires_grad_()
        loss = chunked_token_losses(h, labels, head)
        grads = torch.autograd.grad(loss.sum(), [h, linear.weight, linear.bias])
        return [loss.detach(), *grads]

    whole = gradients()
    monkeypatch.setattr(losses, "LOGITS_BYTES", chunk * 4 * 50)
    for chunked, plain in zip(gradients(), whole, strict=True):
        # Sums of 64 float32 terms of size 1 in another order.
        torch.testing.assert_close(chunked, plain, rtol=0, atol=64 * torch.finfo(torch.float32).eps)
    assert whole[0][::5].abs().max() == 0


def head_gradients(dtype, tokens=None, autocast=False, tied=False):
    """Gradients of the hidden states and of a head by 4,096 tokens in chunks; of all of them at once if None."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(4096, 32, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(dtype)
    weight = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(torch.bfloat16).to(dtype)
    labels = torch.randint(0, 16, (4096,), generator=generator)
    linear = torch.nn.Linear(32, 64, bias=False, dtype=dtype)
    linear.weight = torch.nn.Parameter(weight)
    hidden.requires_grad_()
    # A tied head reads the hidden states from the same weights.
    given = hidden + F.embedding(labels, linear.weight) if tied else hidden
    chunk = 4096 if tokens is None else tokens
    with (
        patch.object(losses, "LOGITS_BYTES", chunk * 4 * 64),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        chunked_token_losses(given, labels, OutputHead(linear, softcap=20.0)).sum().backward()
    return [each.grad.double() for each in (hidden, linear.weight)]


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_the_heads_gradient_is_summed_over_1024_chunks_in_float32(autocast, tied, monkeypatch):
    """Each chunk adds its own rounding to that of the whole product, but the sum over them adds none."""
    dtype = torch.float32 if autocast else torch.bfloat16
    exact = head_gradients(torch.float64, tied=tied)
    whole = head_gradients(dtype, None, autocast, tied)
    chunked = head_gradients(dtype, 4, autocast, tied)
    for found, at_once, expected in zip(chunked, whole, exact, strict=True):
        assert error(found, expected) <= 1.1 * error(at_once, expected)
    if not autocast:
        monkeypatch.setattr(tiles, "_added", lambda total, part: part if total is None else total + part)
        narrow = head_gradients(dtype, 4, tied=tied)[1]
        assert error(narrow, exact[1]) > 2 * error(whole[1], exact[1])


def test_a_frozen_head_gets_no_gradient(monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * 50)
    linear = torch.nn.Linear(16, 50, bias=False).requires_grad_(False)
    monkeypatch.setattr(tiles, "_added", None)
    hidden = torch.randn(64, 16, requires_grad=True)
    labels = torch.randint(0, 50, (64,))
    chunked_token_losses(hidden, labels, OutputHead(linear)).sum().backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(linear(hidden), labels, reduction="sum"), hidden)
    assert linear.weight.grad is None
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=16 * torch.finfo(torch.float32).eps)


def test_a_head_that_we_do_not_know_is_refused():
    model = tiny_model("llama")
    attach(model)
    model.register_forward_hook(
        lambda module, args, output: type(output)(logits=output.logits * 1.01), prepend=True
    )
    with pytest.raises(RopewalkError, match=r"'s logits differ by .* from the product of its output head"):
        OutputHead.of(model)
