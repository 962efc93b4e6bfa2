"""PackedLayout: the contract, its derived values, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import PackedLayout, RopewalkError
from ropewalk.attention.layout import IGNORED, PATTERNS, cached_per_layout, next_token_labels

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def visible_by_the_rule(layout: PackedLayout, i: int, j: int) -> bool:
    """The one-line rule of the contract, token by token."""
    documents = layout.document_ids.tolist()
    same = documents[i] == documents[j]
    anchor = layout.pattern == "anchor" and j < layout.anchor_length
    return j <= i and (layout.pattern == "full" or same or anchor)


@given(lengths, st.sampled_from(PATTERNS), st.integers(0, 3))
def test_dense_mask_is_the_rule_token_by_token(lengths, pattern, anchor):
    layout = PackedLayout.from_lengths(lengths, pattern, anchor)
    mask = layout.dense_mask()
    total = range(layout.total_length)
    assert all(bool(mask[i, j]) == visible_by_the_rule(layout, i, j) for i in total for j in total)


@given(lengths, st.integers(0, 3))
def test_lengths_are_given_without_the_anchor(lengths, anchor):
    layout = PackedLayout.from_lengths(lengths, "anchor", anchor)
    assert layout.total_length == anchor + sum(lengths)
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.cu_seqlens[0] == anchor
    assert layout.cu_seqlens.diff().tolist() == lengths
    assert layout.document_ids[:anchor].tolist() == [-1] * anchor
    assert layout.document_lengths.tolist() == lengths


@given(lengths, st.sampled_from(PATTERNS), st.integers(0, 2))
def test_continuous_positions_count_the_row(lengths, pattern, anchor):
    layout = PackedLayout.from_lengths(lengths, pattern, anchor)
    assert layout.position_ids.tolist() == list(range(layout.total_length))


def test_reset_positions_restart_behind_the_anchor():
    layout = PackedLayout.from_lengths([3, 2], "anchor", 1, "reset")
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 1, 2]
    layout = PackedLayout.from_lengths([3, 2], "intra_document", 0, "reset")
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 1]


def test_an_interleaved_document_keeps_its_order_and_its_positions():
    layout = PackedLayout.from_segments([2, 3, 1], [0, 1, 0], "intra_document", 0, "reset")
    assert layout.is_interleaved
    assert layout.document_ids.tolist() == [0, 0, 1, 1, 1, 0]
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 2]
    assert layout.document_order.tolist() == [0, 1, 5, 2, 3, 4]
    assert layout.document_lengths.tolist() == [3, 3]


def test_labels_never_cross_into_another_document():
    layout = PackedLayout.from_lengths([3, 1, 2], "anchor", 1)
    ids = torch.tensor([1, 10, 11, 12, 20, 30, 31])
    assert next_token_labels(ids, layout).tolist() == [IGNORED, 11, 12, IGNORED, IGNORED, 31, IGNORED]


def test_labels_of_an_interleaved_document_go_on_in_its_next_segment():
    layout = PackedLayout.from_segments([2, 1, 2], [0, 1, 0], "intra_document", 0)
    ids = torch.tensor([10, 11, 20, 12, 13])
    assert next_token_labels(ids, layout).tolist() == [11, 12, IGNORED, 13, IGNORED]


def test_masked_tokens_are_no_targets():
    layout = PackedLayout.from_lengths([4], "full", 0)
    ids = torch.tensor([10, 11, 12, 13])
    trained = torch.tensor([True, False, True, True])
    assert next_token_labels(ids, layout, trained).tolist() == [IGNORED, 12, 13, IGNORED]


@given(lengths, st.integers(0, 2))
def test_every_token_but_the_first_of_a_document_is_a_target_once(lengths, anchor):
    layout = PackedLayout.from_lengths(lengths, "anchor", anchor)
    ids = torch.arange(100, 100 + layout.total_length)
    labels = next_token_labels(ids, layout)
    firsts = set(ids[layout.cu_seqlens[:-1].long()].tolist()) | set(ids[:anchor].tolist())
    targets = labels[labels != IGNORED].tolist()
    assert sorted(targets) == sorted(set(ids.tolist()) - firsts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": []}, "at least one document"),
        ({"lengths": [3, 0]}, "at least 1 token, got 0"),
        ({"pattern": "causal"}, "unknown pattern 'causal'"),
        ({"anchor_length": -1}, "anchor_length must be 0 or more, got -1"),
        ({"positions": "random"}, "unknown positions 'random'"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"lengths": [3, 2], "pattern": "anchor", "anchor_length": 1, "positions": "continuous"}
    with pytest.raises(RopewalkError, match=message):
        PackedLayout.from_lengths(**{**arguments, **change})


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            (int32(0, 3, 3), int32(0, 1), torch.arange(3), 0, "full"),
            "strictly increasing, because every segment needs a token, got 3 after 3",
        ),
        (
            (int32(0, 3), int32(0), torch.arange(3), 1, "full"),
            r"cu_seqlens\[0\] must equal anchor_length 1, got 0",
        ),
        ((int32(0, 3), int32(0), torch.arange(4), 0, "full"), "ends at 3 but position_ids has 4"),
        ((int32(0, 3), int32(0, 1), torch.arange(3), 0, "full"), "segment_documents must have one fewer"),
        ((torch.tensor([0, 3]), int32(0), torch.arange(3), 0, "full"), "cu_seqlens must be a 1-dimensional"),
        ((int32(0, 3), int32(0), torch.tensor(3), 0, "full"), "position_ids must be a 1-dimensional"),
        (
            (int32(0, 3), int32(-1), torch.arange(3), 0, "full"),
            "every entry of segment_documents must be 0 or more",
        ),
    ],
)
def test_contradicting_fields_are_refused(fields, message):
    with pytest.raises(RopewalkError, match=message):
        PackedLayout(*fields)


def test_what_is_kept_belongs_to_all_rows_of_a_batch_and_to_every_argument():
    calls = []

    @cached_per_layout
    def plan(layouts, engine):
        calls.append((len(layouts), engine))
        return object()

    a, b, c = (PackedLayout.from_lengths([n]) for n in (3, 4, 5))
    first = plan((a, b), "sdpa")
    assert plan((a, b), "sdpa") is first
    others = [
        plan((a, c), "sdpa"),
        plan((a,), "sdpa"),
        plan((b, a), "sdpa"),
        plan((a, b), "flex"),
    ]
    assert len({id(each) for each in (first, *others)}) == 5
    assert calls == [(2, "sdpa"), (2, "sdpa"), (1, "sdpa"), (2, "sdpa"), (2, "flex")]


@pytest.mark.parametrize("tokens", [2, 21, 50, 51, 52, 120])
@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
def test_first_tokens_see_what_they_see_in_the_row(tokens, pattern):
    layout = PackedLayout.from_segments([20, 30, 40, 30], [0, 1, 0, 2], pattern)
    found = layout.first(tokens)
    assert torch.equal(found.dense_mask(), layout.dense_mask()[:tokens, :tokens])
    assert torch.equal(found.position_ids, layout.position_ids[:tokens])
