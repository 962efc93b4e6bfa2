"""The varlen kernel asks its operator for the right thing, and copies tokens only where it must."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import PackedLayout
from ropewalk.attention import operators, packed
from ropewalk.attention.engines import varlen
from ropewalk.attention.options import EVERYTHING, AttentionOptions
from ropewalk.testing import attention_errors, random_layout
from tests.attention.attention_cases import random_qkv
from tests.attention.operator_cases import use_written_out

CPU = torch.device("cpu")


@given(
    seed=st.integers(0, 10**6),
    interleaved=st.booleans(),
    max_runs=st.sampled_from([3, 65535]),
    window=st.none() | st.integers(1, 70),
    chunk=st.none() | st.integers(1, 70),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(deadline=None)
def test_varlen_is_within_the_error_budget(seed, interleaved, max_runs, window, chunk, dtype):
    rng = random.Random(seed)
    layouts = [random_layout(60, rng, interleaved=interleaved, max_anchor=5) for _ in range(2)]
    inputs = random_qkv(2, 4, 2, 60, 8, dtype, seed=seed)
    options = AttentionOptions(window=window, chunk=chunk)

    def attention(q, k, v):
        return packed.run(varlen, q, k, v, packed.plan(layouts, CPU, options.locality), options)

    with pytest.MonkeyPatch.context() as patch:
        use_written_out(patch)
        patch.setattr(varlen, "MAX_RUNS", max_runs)
        errors = attention_errors(attention, *inputs, layouts, options)
    assert errors.worst_share <= 1, errors


@pytest.mark.parametrize(
    ("layouts", "gathers"),
    [
        ([PackedLayout.from_segments([5, 4, 3], [0, 1, 0], "full", 0)], 0),
        ([PackedLayout.from_lengths([5, 4, 3], "intra_document", 0)], 0),
        ([PackedLayout.from_lengths([5, 4, 1], "intra_document", 2)], 0),
        ([PackedLayout.from_lengths([11], "anchor", 1)], 0),
        ([PackedLayout.from_lengths([11], "full"), PackedLayout.from_lengths([6, 5], "intra_document")], 0),
        # The anchor's key is merged into the output.
        ([PackedLayout.from_lengths([6, 5], "anchor")], 0),
        ([PackedLayout.from_segments([5, 4, 3], [0, 1, 0], "intra_document", 0)], 3),
        ([PackedLayout.from_lengths([11], "full"), PackedLayout.from_lengths([6, 5], "anchor")], 0),
    ],
)
def test_varlen_copies_tokens_only_where_documents_lie_apart(monkeypatch, layouts, gathers):
    """Queries, keys and values: 5 GB of traffic in a layer's forward at 128K tokens."""
    seen = []
    use_written_out(monkeypatch)
    kernel = operators.VARLEN

    def kept(*args, **options):
        seen.append((args, copies.count))
        return kernel(*args, **options)

    monkeypatch.setattr(operators, "VARLEN", kept)
    length = layouts[0].total_length
    # As projections leave them: heads of one token side by side.
    q, k, v = (torch.randn(len(layouts), length, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    with CountCopies() as copies:
        packed.run(varlen, q, k, v, packed.plan(layouts, CPU, EVERYTHING), AttentionOptions(1.0))
    ((args, copied),) = seen
    assert copied == gathers
    shared = [a.data_ptr() == b.data_ptr() for a, b in zip(args, (q, k, v), strict=False)]
    assert shared == [gathers == 0] * 3


class CountCopies(TorchDispatchMode):
    """Counts operations that copy at least a tensor of heads."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.is_floating_point()
            and isinstance(args[0], torch.Tensor)
        ):
            self.count += result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
        return result
