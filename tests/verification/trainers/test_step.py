"""Targets and weights are read from gradients, whatever the loss divides by."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ropewalk.models.compute.losses import OutputHead
from ropewalk.verification.trainers.step import NO_TARGET, UNCLEAR, targets_of


@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.5, None), (1.0, 3.0)])
def test_targets_and_weights_are_those_of_the_loss(multiplier, softcap):
    torch.manual_seed(0)
    head = OutputHead(nn.Linear(16, 40, bias=False), multiplier, softcap)
    hidden = torch.randn(2, 5, 16, requires_grad=True)
    ids = torch.randperm(40)[:10].view(2, 5)
    targets = ids.flip(1).clone()
    weights = torch.rand(2, 5, dtype=torch.float64)
    weights[0, 2] = 0
    losses = F.cross_entropy(head.logits(hidden).flatten(0, 1), targets.flatten(), reduction="none")
    (losses * weights.flatten()).sum().backward()
    found, factors = targets_of(hidden.detach(), hidden.grad, ids, head)
    targets[0, 2] = NO_TARGET
    assert torch.equal(found, targets)
    assert torch.allclose(factors, weights, rtol=1e-4)


def test_smoothed_labels_are_unclear():
    torch.manual_seed(0)
    head = OutputHead(nn.Linear(16, 40, bias=False))
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    ids = torch.arange(4)[None]
    F.cross_entropy(head.logits(hidden)[0], ids[0], label_smoothing=0.5).backward()
    found, factors = targets_of(hidden.detach(), hidden.grad, ids, head)
    assert (found == UNCLEAR).all()
    assert (factors == 0).all()
