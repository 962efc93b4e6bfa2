"""Runs of which only the last queries are there: gathered by an index, and attended to in blocks on a CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.engines import plain, sdpa
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.runs import Runs, gather_by, into_runs
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.packed import attend_runs

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_gather_by_index_takes_tokens_to_their_slots_and_gradients_back(drawn):
    known = sorted(set(drawn))
    index = torch.tensor([known.index(each) for each in drawn])
    tokens = torch.randn(1, 2, len(known), 3, dtype=torch.float64, requires_grad=True)
    slots = into_runs(tokens, gather_by(index, CPU))
    expected = tokens[0].transpose(0, 1)[index]
    assert torch.equal(slots, expected)
    cotangent = torch.randn_like(slots)
    found, wanted = (torch.autograd.grad(x, tokens, cotangent)[0] for x in (slots, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=30 * 2**-52 * float(cotangent.abs().max()))


def test_tokens_that_lie_in_their_slots_are_not_gathered():
    assert gather_by(torch.arange(5), CPU) is None
    assert gather_by(torch.tensor([0, 1, 0]), CPU) is not None


def test_gradients_of_copies_add_up_in_float32():
    """256 and eight times 1, in bfloat16: added one by one each 1 would be lost."""
    index = torch.zeros(9, dtype=torch.int64)
    token = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    slots = into_runs(token, gather_by(index, CPU))
    (grad,) = torch.autograd.grad(slots, token, torch.tensor([256.0] + [1.0] * 8).bfloat16()[:, None, None])
    assert grad.item() == 264


def qkv_of(queries, keys, dtype=torch.float64, value_dim=8):
    torch.manual_seed(0)
    shapes = ((sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, value_dim))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def causal_runs(q, k, v, runs, options, kernel=sdpa):
    return attend_runs(kernel, q, k, v, Runs(*zip(*runs, strict=True)), options)


def oracle(q, k, v, runs, options):
    queries, keys = map(list, zip(*runs, strict=True))
    outputs = []
    for a, b, c in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        behind = torch.arange(len(b) - len(a), len(b))[:, None] - torch.arange(len(b))
        visible = (behind >= 0) & (behind < (options.window or len(b)))
        run = (x.transpose(0, 1)[None] for x in (a, b, c))
        outputs.append(plain_attention(*run, visible, options)[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("score_bytes", [1, 500, 2**22])
@pytest.mark.parametrize(("softcap", "value_dim"), [(None, 8), (None, 5), (1.5, 8), (1.5, 12)])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 30])
def test_the_last_queries_of_runs_see_the_keys_before_them(
    monkeypatch, score_bytes, softcap, value_dim, window
):
    monkeypatch.setattr(plain, "CPU_SCORE_BYTES", score_bytes)
    monkeypatch.setattr(plain, "LEAST_BLOCK", 2)
    options = AttentionOptions(0.3, softcap, window)
    queries, keys = [3, 7, 1, 5], [3, 20, 9, 6]
    inputs = qkv_of(queries, keys, value_dim=value_dim)
    values = []
    for run in (causal_runs, oracle):
        output = run(*inputs, list(zip(queries, keys, strict=True)), options)
        values.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    # A gradient may cancel altogether: a query with one key has none.
    atol = 64 * 2**-52 * max(float(x.detach().abs().max()) for x in values[1])
    for found, expected in zip(*values, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_keys_that_blocks_share_collect_gradients_in_float32(monkeypatch):
    """Each query is a block by itself: in bfloat16 their many small gradients would be lost beside the sum."""
    monkeypatch.setattr(plain, "CPU_SCORE_BYTES", 1)
    inputs = qkv_of([600], [601], torch.bfloat16)
    cotangent = torch.ones(600, 4, 8)
    errors = []
    exact = [x.detach().double().requires_grad_() for x in inputs]
    (expected,) = torch.autograd.grad(
        oracle(*exact, [(600, 601)], AttentionOptions(0.01)), exact[2], cotangent.double()
    )
    (found,) = torch.autograd.grad(
        causal_runs(*inputs, [(600, 601)], AttentionOptions(0.01)), inputs[2], cotangent.bfloat16()
    )
    errors = (found.double() - expected).abs()
    # The weights' own rounding, and that of the result.
    assert float(errors.max()) <= 2**-7 * float(expected.max())


def test_masks_and_scores_are_not_kept_until_the_backward():
    queries, keys = [256], [1024]
    for softcap in (None, 2.0):
        inputs = qkv_of(queries, keys, torch.float32)
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            causal_runs(*inputs, list(zip(queries, keys, strict=True)), AttentionOptions(0.3, softcap))
        # The output and the log-sum-exp besides.
        results = inputs[0].nbytes + 256 * 4 * torch.float32.itemsize
        assert sum(size for size, _ in kept.values()) <= sum(x.nbytes for x in inputs) + results
