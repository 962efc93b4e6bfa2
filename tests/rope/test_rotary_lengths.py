"""A batch whose rows have lengths of their own: each row has the frequencies of its own length, whatever the others."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.rope import STYLES, Default, DynamicNtk, LongRope, RotaryEmbedding, RotaryRows, Yarn
from tests.rope.rope_cases import examples

X = torch.empty(0)
DIM, T = 16, 512
LONG = tuple(1.0 + i / 2 for i in range(DIM // 2))
LONGROPE = LongRope(DIM, 10000.0, (1.0,) * 8, LONG, 1.2, T)
METHODS = [
    LONGROPE,
    LongRope(DIM, 10000.0, (1.0,) * 8, LONG, 1.2, T, start_tokens=4),
    DynamicNtk(DIM, 10000.0, 4.0, T),
    Yarn(DIM, 10000.0, 4.0, T),
]
LENGTHS = st.lists(st.sampled_from([1, T - 1, T, T + 1, 4 * T]), min_size=1, max_size=4)


def parts(rotation):
    """cos and sin, or the one complex tensor."""
    return rotation if isinstance(rotation, tuple) else (rotation,)


@examples
@given(st.sampled_from(METHODS), st.sampled_from(STYLES), LENGTHS, st.booleans())
def test_each_row_is_as_alone_at_its_length_to_the_last_bit(method, style, lengths, one_row) -> None:
    rotary = RotaryEmbedding(method, style).eval()
    positions = torch.arange(7)[None] + torch.arange(1 if one_row else len(lengths))[:, None]
    with rotary.pinned_rows(lengths):
        together = parts(rotary(X, positions))
    assert rotary.row_lengths is None
    for row, length in enumerate(lengths):
        alone = RotaryEmbedding(method, style).eval()
        with alone.pinned(length):
            expected = parts(alone(X, positions[row % len(positions)][None]))
        for found, each in zip(together, expected, strict=True):
            assert torch.equal(found[row % len(found)], each[0])


def test_rows_on_both_sides_of_the_original_length_differ() -> None:
    """Without this difference, the test above would accept a module that gives every row the longest one's factors."""
    rotary, positions = RotaryEmbedding(LONGROPE), torch.arange(7).expand(2, -1)
    with rotary.pinned_rows([T, T + 1]):
        cos, _ = rotary(X, positions)
    assert float((cos[0] - cos[1]).abs().max()) > 0.1


def test_a_length_for_the_whole_sequence_takes_precedence() -> None:
    rotary, positions = RotaryEmbedding(LONGROPE), torch.arange(7).expand(2, -1)
    with rotary.pinned(T + 1), rotary.pinned_rows([T, T + 1]):
        cos, _ = rotary(X, positions)
    assert torch.equal(cos[0], cos[1])


def test_lengths_must_be_those_of_the_batch() -> None:
    rotary = RotaryEmbedding(LONGROPE)
    with rotary.pinned_rows([T, T + 1]), pytest.raises(RopewalkError, match=r"2 row lengths .* 3 rows"):
        rotary(X, torch.arange(7).expand(3, -1))
    for wrong in ([], [T, 0]):
        with pytest.raises(RopewalkError, match="at least 1 token"), rotary.pinned_rows(wrong):
            pass


def test_alternating_lengths_compute_each_list_of_factors_once() -> None:
    rotary, positions = RotaryEmbedding(LONGROPE), torch.arange(7)[None]
    with patch.object(LongRope, "frequencies", autospec=True, side_effect=LongRope.frequencies) as computed:
        for length in (T, 2 * T, 7, 3 * T, T, 2 * T):
            with rotary.pinned_rows([length]):
                rotary(X, positions)
        assert computed.call_count == 2


def test_lengths_of_a_method_with_many_do_not_pile_up() -> None:
    rotary = RotaryEmbedding(DynamicNtk(DIM, 10000.0, 4.0, T)).eval()
    for length in range(T, T + 50):
        with rotary.pinned(length):
            rotary(X, torch.arange(7)[None])
    (held,) = rotary._cache.values()
    assert len(held) == 2


def test_rows_with_methods_of_their_own_take_their_own_lengths() -> None:
    rows, positions = RotaryRows([LONGROPE, Default(DIM, 500.0), LONGROPE]), torch.arange(7)[None]
    assert rows.length_dependent
    assert not RotaryRows([Default(DIM, 500.0)]).length_dependent
    with rows.pinned_rows([T, 4 * T, T + 1]):
        cos, _ = rows(X, positions)
    for found, length in ((cos[0], T), (cos[2], T + 1)):
        alone = RotaryEmbedding(LONGROPE)
        with alone.pinned(length):
            assert torch.equal(found, alone(X, positions)[0][0])
    with rows.pinned(T), rows.pinned_rows([T + 1] * 3):
        assert torch.equal(rows(X, positions)[0][2], cos[0])
    with pytest.raises(RopewalkError, match="3 methods for a batch of 2 rows"), rows.pinned_rows([T, T]):
        pass


def test_a_method_may_have_an_attention_factor_for_each_length() -> None:
    """As a method of another package may; LongRoPE has one."""

    class Louder(DynamicNtk):
        def frequencies(self, sequence_length=None):
            found = super().frequencies(sequence_length)
            return found._replace(attention_factor=float(sequence_length or 1))

    rotary, positions = RotaryEmbedding(Louder(DIM, 10000.0, 4.0, T)).eval(), torch.zeros(2, 1)
    with rotary.pinned_rows([T, 2 * T]):
        cos, _ = rotary(X, positions)
    assert cos[:, 0, 0].tolist() == [T, 2 * T]
