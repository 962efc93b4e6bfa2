"""A batch with a RoPE method a row: each row as its method alone gives it, to the last bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.rope import STYLES, Default, DynamicNtk, Linear, LongRope, RotaryEmbedding, RotaryRows, Yarn
from tests.rope.rope_cases import examples

X = torch.empty(0)
DIM = 16
LONG = tuple(1.0 + i / 2 for i in range(8))
METHODS = [
    Default(DIM, 10000.0),
    Default(DIM, 500000.0),
    Linear(DIM, 10000.0, 4.0),
    Yarn(DIM, 10000.0, 4.0, 512),
    DynamicNtk(DIM, 10000.0, 4.0, 512),
    LongRope(DIM, 10000.0, (1.0,) * 8, LONG, 1.2, 512),
    LongRope(DIM, 10000.0, (1.0,) * 8, LONG, 1.2, 512, start_tokens=4),
]


def parts(rotation):
    """cos and sin, or the one complex tensor."""
    return rotation if isinstance(rotation, tuple) else (rotation,)


def test_each_row_has_its_own_methods_of_each_layer_type() -> None:
    kinds = [{"full_attention": method, "sliding_attention": METHODS[0]} for method in METHODS[:3]]
    rows, at = RotaryRows(kinds).eval(), torch.arange(5)[None]
    with rows.pinned(512):
        cos, _ = rows(X, at, "full_attention")
        near, _ = rows(X, at, "sliding_attention")
    alone = RotaryEmbedding(METHODS[0]).eval()
    with alone.pinned(512):
        assert all(torch.equal(row, alone(X, at)[0][0]) for row in near)
    for row, method in zip(cos, METHODS[:3], strict=True):
        own = RotaryEmbedding(method).eval()
        with own.pinned(512):
            assert torch.equal(row, own(X, at)[0][0])


@examples
@given(
    st.lists(st.sampled_from(METHODS), min_size=1, max_size=5),
    st.sampled_from(STYLES),
    st.sampled_from([100, 512, 513, 4096]),
    st.lists(st.integers(0, 99), min_size=1, max_size=6),
    st.booleans(),
)
def test_each_row_is_its_methods_own_to_the_last_bit(methods, style, total, at, one_row) -> None:
    rows = RotaryRows(methods, style).eval()
    positions = torch.tensor(
        [at] if one_row else [[each + row for each in at] for row in range(len(methods))]
    )
    with rows.pinned(total):
        assert rows.total_length == total
        found = parts(rows(X, positions))
    assert rows.total_length is None
    width = DIM if style in ("halves", "interleaved") else DIM // 2
    assert all(part.shape == (len(methods), len(at), width) for part in found)
    assert {part.dtype for part in found} == {torch.complex64 if style == "complex" else torch.float32}
    for row, method in enumerate(methods):
        alone = RotaryEmbedding(method, style).eval()
        with alone.pinned(total):
            expected = parts(alone(X, positions if one_row else positions[row][None]))
        assert all(torch.equal(a[row], b[0]) for a, b in zip(found, expected, strict=True))


def test_rows_hold_no_parameters_no_buffers_and_no_submodules() -> None:
    rows = RotaryRows(METHODS).eval().to(torch.bfloat16)
    assert not rows.state_dict()
    assert list(rows.modules()) == [rows]
    assert rows(X, torch.arange(4)[None])[0].dtype == torch.float32


def test_rows_that_are_no_batch_are_refused() -> None:
    with pytest.raises(RopewalkError, match=r"the same number of dimensions, got \[8, 16\]"):
        RotaryRows([Default(16, 10000.0), Default(8, 10000.0)])
    with pytest.raises(RopewalkError, match="got no rows"):
        RotaryRows([])
    with pytest.raises(RopewalkError, match="2 methods for a batch of 3 rows"):
        RotaryRows(METHODS[:2])(X, torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(RopewalkError, match="no RoPE method for layer type 'full_attention'"):
        RotaryRows(METHODS[:2])(X, torch.zeros(2, 5, dtype=torch.int64), "full_attention")
    with pytest.raises(RopewalkError, match="unknown rotary style 'thirds'"):
        RotaryRows(METHODS[:2], "thirds")


def test_an_inference_only_row_is_not_trained_with() -> None:
    rows = RotaryRows([METHODS[0], METHODS[4]]).train()
    with pytest.raises(RopewalkError, match="method 'dynamic' is for inference only"):
        rows(X, torch.zeros(2, 5, dtype=torch.int64))


def test_the_pinned_length_comes_back_when_the_block_raises() -> None:
    rows = RotaryRows(METHODS)
    with pytest.raises(KeyError), rows.pinned(700):
        raise KeyError
    assert all(row.total_length is None for row in rows.rows)
