"""Installed kernels of recurrent layers keep the runs of a packed row apart, as far as their own rounding goes."""

import copy
import sys

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.models.attention import recurrent
from ropewalk.models.attention.kernels import boundary_keywords
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.config.model import ModelConfig
from tests.models.attention.standin_kernels import PACKAGES
from tests.models.attention.test_kernels import FAMILIES, functions_of, mixer_of, recurrence_of
from tests.models.attention.test_recurrent import attached
from tests.models.families import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


ROUNDED = 2.0**-8
"""Of a tensor's largest value: tensor cores may round factors to TF32, 2**-11, and gradients of two numbers in which
terms cancel, such as OLMo hybrid's ``A_log``, are off by some times that. Rows that restart nowhere are off by 2.4."""


def logits_and_gradients(model, ids, layout):
    logits = model(input_ids=ids, layout=layout).logits
    (logits * torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)).sum().backward()
    found = [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [each.double().cpu() for each in found]


def worst(found, expected):
    """Largest difference of each tensor, in units of its largest value."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if bool(b.any()))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_as_exact_as_padded_batches(family, training, monkeypatch):
    plain = tiny_model(family, sharp=True).train(training)
    mixer = mixer_of(plain)
    for name in functions_of(plain):
        pytest.importorskip(PACKAGES[name][0])
    assert boundary_keywords(mixer, recurrence_of(plain)) is not None
    for each in mixers_of(plain, ModelConfig.of(plain.config)):
        if hasattr(each, "chunk_size"):
            # Tensor cores multiply tiles of at least 16.
            each.chunk_size = 64
    layout = PackedLayout.from_segments([90, 33, 4, 170, 12], [1, 0, 2, 1, 0], "anchor", 2)
    ids = torch.randint(3, 90, (1, layout.total_length), generator=torch.Generator().manual_seed(1))
    packed = logits_and_gradients(attached(plain).cuda(), ids.cuda(), layout)
    with monkeypatch.context() as padding:
        padding.setattr(recurrent, "boundary_keywords", lambda mixer, recurrence: None)
        padded = logits_and_gradients(attached(plain).cuda(), ids.cuda(), layout)
    module = sys.modules[type(mixer).__module__]
    for name in functions_of(plain):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    oracle = copy.deepcopy(plain).double()
    if hasattr(oracle, "set_experts_implementation"):
        oracle.set_experts_implementation("eager")
    exact = logits_and_gradients(attached(oracle), ids, layout)
    # Both round the same products in another order.
    assert worst(packed, exact) <= max(2 * worst(padded, exact), ROUNDED)
