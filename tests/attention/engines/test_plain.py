"""The plain kernel against softmax attention with a mask; test_runs.py has runs with more keys than queries."""

import pytest
import torch

from ropewalk.attention.engines import plain
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.options import AttentionOptions


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("score_bytes", [1, 2**20])
def test_gradients_from_the_log_sum_exp_are_those_of_softmax_attention(
    monkeypatch, softcap, window, score_bytes
):
    monkeypatch.setattr(plain, "CPU_SCORE_BYTES", score_bytes)
    monkeypatch.setattr(plain, "LEAST_BLOCK", 4)
    torch.manual_seed(0)
    shapes = ((20, 4, 8), (20, 2, 8), (20, 2, 5))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    # Adjacent runs of equal length are computed together.
    runs, options = Runs((6, 6, 8), (6, 6, 8)), AttentionOptions(0.3, softcap, window)
    own = torch.block_diag(*(torch.ones(n, n) for n in runs.queries)).bool().tril()
    visible = own & own.new_ones(20, 20).triu(1 - (window or 20))
    expected = plain_attention(*(x.transpose(0, 1)[None] for x in inputs), visible, options)[0].transpose(
        0, 1
    )
    grad = torch.randn_like(expected)
    q, k, v = (x.detach() for x in inputs)
    out, lse = plain.forward(q, k, v, runs, options)
    found = (out, *plain.backward(grad, q, k, v, out, lse, runs, options))
    for a, b in zip(found, (expected, *torch.autograd.grad(expected, inputs, grad)), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-13)


def test_large_scores_are_normalised_by_the_sum_of_their_weights():
    """A log-sum-exp of 1,000 in float32 is rounded by 3e-5; the weights must sum to one more exactly."""
    q = torch.full((1, 1, 1), 1000.0)
    keys, values = torch.tensor([1.0, 0.9993]).view(2, 1, 1), torch.ones(2, 1, 1)
    out, lse = plain.forward(q, keys, values, Runs((1,), (2,)), AttentionOptions(1.0))
    assert float(out) == 1.0
    assert float(lse) == pytest.approx(1000.4, abs=0.1)
