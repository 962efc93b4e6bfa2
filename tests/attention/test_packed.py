"""Packed rows through every kernel against the float64 oracle: anchors, windows, chunks, sinks and interleaving."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import PackedLayout, attend
from ropewalk.attention import packed
from ropewalk.attention.engines import plain, sdpa, varlen
from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.options import EVERYTHING, AttentionOptions, Locality
from ropewalk.testing import attention_errors, random_layout
from tests.attention.attention_cases import random_qkv
from tests.attention.operator_cases import use_written_out

CPU = torch.device("cpu")


def run_of(kernel, layouts, options):
    def attention(q, k, v):
        return packed.run(kernel, q, k, v, packed.plan(layouts, CPU, options.locality), options)

    return attention


@given(
    seed=st.integers(0, 10**6),
    kernel=st.sampled_from(["plain", "sdpa", "cuDNN", "flash", "varlen"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.integers(1, 70),
    chunk=st.none() | st.integers(1, 70),
    interleaved=st.booleans(),
    with_sinks=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_kernel_is_within_the_error_budget(seed, kernel, dtype, window, chunk, interleaved, with_sinks):
    rng = random.Random(seed)
    layouts = [random_layout(60, rng, interleaved=interleaved, max_anchor=5) for _ in range(2)]
    inputs = random_qkv(2, 4, 2, 60, 8, dtype, seed=seed)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    options = AttentionOptions(window=window, chunk=chunk, sinks=sinks)
    with pytest.MonkeyPatch.context() as patch:
        if kernel in ("cuDNN", "flash", "varlen"):
            use_written_out(patch, kernel)
        patch.setattr(sdpa, "STEP", 16)
        module = {"plain": plain, "varlen": varlen}.get(kernel, sdpa)
        errors = attention_errors(run_of(module, layouts, options), *inputs, layouts, options)
    assert errors.worst_share <= 1, errors


def test_rows_of_documents_meet_few_shapes_of_cudnn(monkeypatch):
    """It compiles a graph for each; the lengths of documents differ in every row."""
    shapes = use_written_out(monkeypatch, "cuDNN")
    for seed in range(4):
        rng = random.Random(seed)
        layout = random_layout(2000, rng, 30, ["anchor"])
        q, k, v = random_qkv(1, 1, 1, 2000, 8, seed=seed)
        attend_with = run_of(sdpa, [layout], AttentionOptions())
        torch.testing.assert_close(
            attend_with(q, k, v), attend(q, k, v, layout, "reference"), rtol=0, atol=1e-5
        )
    assert {queries[2] for queries, _ in shapes} <= set(range(256, 2049, 256))


def test_a_row_of_one_run_is_computed_as_it_is(monkeypatch):
    shapes = use_written_out(monkeypatch, "cuDNN")
    layouts = [PackedLayout.from_lengths([299], "full"), PackedLayout.from_lengths([299], "anchor")]
    run_of(sdpa, layouts, AttentionOptions())(*random_qkv(2, 2, 1, 300, 8))
    assert shapes == [((2, 2, 300, 8), (2, 1, 300, 8))]


def test_shapes_that_recur_in_every_row_are_computed_as_they_are(monkeypatch):
    """Chunks of a whole row, and a rank's pieces of it in a ring: the last queries of runs, with keys before them."""
    shapes = use_written_out(monkeypatch, "cuDNN")
    runs = Runs((100, 60), (100, 160), recurring=True)
    q, k, v = (torch.randn(sum(n), h, 8) for n, h in ((runs.queries, 4), (runs.keys, 2), (runs.keys, 2)))
    out, _ = sdpa.forward(q, k, v, runs, AttentionOptions())
    expected, _ = plain.forward(q, k, v, runs, AttentionOptions())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert [(queries[2], keys[2]) for queries, keys in shapes] == [(100, 100), (60, 60), (60, 100)]
    shapes.clear()
    documents = Runs(runs.queries, runs.keys)
    out, _ = sdpa.forward(q, k, v, documents, AttentionOptions())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    # FlashAttention compiles nothing, so it takes the keys before a run's queries.
    assert [(queries[2], keys[2]) for queries, keys in shapes] == [(256, 256), (256, 256)]


def test_the_anchor_belongs_to_the_first_document_and_is_merged_to_the_others():
    layout = PackedLayout.from_lengths([3, 2, 4], "anchor", 2)
    made = packed.plan([layout], CPU, EVERYTHING)
    assert made.runs.queries == made.runs.keys == (5, 2, 4)
    assert made.by_document is None
    expected = [[index >= 5] * 2 for index in range(11)]
    assert made.seen.tolist() == [expected]
    # Nothing is merged where no other document is, or where it leaves every window or chunk.
    alone = PackedLayout.from_lengths([9], "anchor", 2)
    assert packed.plan([alone], CPU, EVERYTHING).seen is None
    assert packed.plan([layout], CPU, Locality(window=1)).seen is None
    assert packed.plan([layout], CPU, Locality(chunk=2)).seen is None
    # The second anchor token is one place before a document, and the first one two.
    seen = packed.plan([layout], CPU, Locality(window=2)).seen[0]
    assert seen.nonzero().tolist() == [[5, 1], [7, 1]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_sinks_are_those_of_the_reference(interleaved):
    rng = random.Random(3)
    layouts = [random_layout(50, rng, 5, ["anchor"], interleaved, 3) for _ in range(2)]
    inputs = [x.double().requires_grad_() for x in random_qkv(2, 4, 2, 50, 8)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = AttentionOptions(window=20, sinks=sinks)
    values = []
    for engine in ("sdpa", "reference"):
        output = attend(*inputs, layouts, engine, options)
        grad = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(0))
        values.append((output, *torch.autograd.grad(output, [*inputs, sinks], grad)))
    for found, expected in zip(*values, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
