"""Rows that are sorted by document, and runs of which only the last queries are there."""

import pytest
import torch

from ropewalk.attention.engines import plain, sdpa
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.engines.runs import Runs, sort_by_document, sort_rows, unsort_rows
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.packed import attend_runs


def test_sorting_a_batch_and_back_changes_neither_it_nor_its_gradient():
    layouts = [
        PackedLayout.from_segments([3, 2, 4], [1, 0, 1], "anchor", 1),
        PackedLayout.from_lengths([9], "intra_document", 1),
    ]
    gather = sort_by_document(layouts, torch.device("cpu"))
    x = torch.randn(2, 3, 10, 4, requires_grad=True)
    rows = sort_rows(x, gather)
    for row, sorted_row, layout in zip(x, rows, layouts, strict=True):
        assert torch.equal(row[:, layout.document_order], sorted_row)
    back = unsort_rows(rows, gather)
    assert torch.equal(back, x)
    cotangent = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(back, x, cotangent, retain_graph=True)[0], cotangent)
    (grad,) = torch.autograd.grad(rows, x, cotangent)
    assert torch.equal(sort_rows(grad, gather), cotangent)


def test_rows_of_sorted_documents_are_not_moved():
    assert sort_by_document([PackedLayout.from_lengths([3, 2])], torch.device("cpu")) is None
    full = PackedLayout.from_segments([3, 2, 4], [1, 0, 1], "full", 1)
    assert sort_by_document([full], torch.device("cpu")) is None


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
