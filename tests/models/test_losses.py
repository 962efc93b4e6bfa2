"""Chunked token losses against the plain cross entropy of the model's own logits."""

import pytest
import torch
import torch.nn.functional as F

from ropewalk import PackedLayout, RopewalkError
from ropewalk.attention.layout import IGNORED, next_token_labels
from ropewalk.models import losses
from ropewalk.models.load import attach
from ropewalk.models.losses import OutputHead, chunked_token_losses, token_losses
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


def test_a_head_that_we_do_not_know_is_refused():
    model = tiny_model("llama")
    attach(model)
    model.register_forward_hook(
        lambda module, args, output: type(output)(logits=output.logits * 1.01), prepend=True
    )
    with pytest.raises(RopewalkError, match=r"'s logits differ by .* from the product of its output head"):
        OutputHead.of(model)
