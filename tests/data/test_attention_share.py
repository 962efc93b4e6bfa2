"""Pairs that patterns compute: closed forms against the masks that define the patterns."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PATTERNS, PackedLayout
from ropewalk.data.attention_share import (
    cut,
    ideal_speedup,
    share_of_documents,
    share_of_rows,
    skipped,
    visible_pairs,
)
from ropewalk.errors import RopewalkError
from ropewalk.testing import random_layout


def mask_sum(lengths: list[int], pattern: str, anchor_length: int, documents: list[int] | None = None) -> int:
    documents = list(range(len(lengths))) if documents is None else documents
    layout = PackedLayout.from_segments(lengths, documents, pattern, anchor_length)
    return int(layout.dense_mask().sum())


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from(PATTERNS), st.integers(0, 3))
def test_pairs_of_a_row_are_those_of_its_mask(lengths: list[int], pattern: str, anchor_length: int) -> None:
    assert visible_pairs(lengths, pattern, anchor_length) == mask_sum(lengths, pattern, anchor_length)


@given(st.integers(0, 2**32), st.integers(4, 40))
def test_chunks_of_one_document_count_as_the_document(seed: int, total: int) -> None:
    layout = random_layout(total, random.Random(seed), interleaved=True)
    pairs = visible_pairs(layout.document_lengths.numpy(), layout.pattern, layout.anchor_length)
    assert pairs == int(layout.dense_mask().sum())


def rows_by_hand(lengths: list[int], room: int) -> list[list[int]]:
    """Token by token: the document of each, room tokens a row, then the lengths of the runs."""
    tokens = [document for document, length in enumerate(lengths) for _ in range(length)]
    rows = [tokens[start : start + room] for start in range(0, len(tokens), room)]
    if len(rows) > 1 and len(rows[-1]) < room:
        rows.pop()
    return [[row.count(document) for document in sorted(set(row))] for row in rows]


LENGTHS = st.lists(st.integers(0, 30), max_size=8)


@given(LENGTHS, st.integers(1, 12))
def test_documents_are_cut_where_rows_end(lengths: list[int], room: int) -> None:
    pieces, rows = cut(np.array(lengths, np.int64), room)
    expected = rows_by_hand(lengths, room)
    assert pieces.tolist() == [piece for row in expected for piece in row]
    assert rows == len(expected)


@given(LENGTHS, st.integers(2, 12))
def test_share_of_documents_is_that_of_the_masks_of_their_rows(lengths: list[int], row_length: int) -> None:
    shares = share_of_documents(np.array(lengths, np.int64), row_length)
    assert set(shares) == set(PATTERNS)
    for pattern, share in shares.items():
        anchor_length = int(pattern == "anchor")
        rows = rows_by_hand(lengths, row_length - anchor_length)
        if not rows:
            assert math.isnan(share)
            continue
        part = sum(mask_sum(row, pattern, anchor_length) for row in rows)
        whole = sum(mask_sum(row, "full", anchor_length) for row in rows)
        # The same two integers divided: not one bit may differ.
        assert share == part / whole


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), max_size=4), st.integers(0, 1), st.data()
)
def test_share_of_rows_is_that_of_their_masks(
    rows: list[list[int]], anchor_length: int, data: st.DataObject
) -> None:
    firsts = [data.draw(st.integers(0, len(row) - 1)) for row in rows]
    described = [(np.array(row, np.int64), first) for row, first in zip(rows, firsts, strict=True)]
    shares = share_of_rows(described, anchor_length)
    pairs = dict.fromkeys(PATTERNS, 0)
    for row, first in zip(rows, firsts, strict=True):
        segments = [first, *(n for n in range(len(row)) if n != first)]
        lengths = [row[n] for n in segments]
        for pattern in PATTERNS:
            if pattern == "anchor" and anchor_length == 0:
                # The first token is taken for the anchor, out of the document that it begins.
                rest = [lengths[0] - 1, *lengths[1:]]
                kept = [n for n in rest if n]
                pairs[pattern] += mask_sum(kept, pattern, 1) if kept else 1
            else:
                pairs[pattern] += mask_sum(lengths, pattern, anchor_length)
    for pattern in PATTERNS:
        if not rows:
            assert math.isnan(shares[pattern])
        else:
            assert shares[pattern] == pairs[pattern] / pairs["full"]


def test_a_book_fills_its_rows_alone() -> None:
    assert share_of_documents(np.array([1000]), 100) == {"full": 1.0, "intra_document": 1.0, "anchor": 1.0}


def test_a_row_of_equal_documents_computes_one_of_them_each() -> None:
    shares = share_of_documents(np.full(40, 25), 100)
    assert shares["intra_document"] == 4 * (25 * 26 / 2) / (100 * 101 / 2)


def test_sums_beyond_64_bits_are_exact() -> None:
    length, rows = 2**31, 40
    lengths = np.full(rows, length, np.int64)
    whole = rows * (length * (length + 1) // 2)
    assert whole > 2**64
    assert visible_pairs(lengths, "intra_document") == whole
    assert share_of_documents(lengths, length)["intra_document"] == 1.0


def test_skipped_and_speedup_follow_from_the_share() -> None:
    shares = {"full": 1.0, "intra_document": 0.25, "anchor": math.nan}
    assert skipped(shares)["intra_document"] == 0.75
    assert ideal_speedup(shares)["intra_document"] == 4.0
    assert skipped(shares)["full"] == 0.0
    assert math.isnan(ideal_speedup(shares)["anchor"])


def test_a_row_of_one_token_is_refused() -> None:
    with pytest.raises(RopewalkError, match=r"a row must have 2 tokens or more, got 1"):
        share_of_documents(np.array([5]), 1)
