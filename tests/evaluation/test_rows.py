"""Rows hold the documents' tokens in order, with BOS where it belongs and no target across documents."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import IGNORED
from ropewalk.data import TokenisedDocument
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import evaluation_rows, take_documents

BOS, EOS = 1, 2


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """Documents whose tokens count up over all of them, from 10 on."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end, dtype=np.int32) + 10 for n, end in zip(lengths, ends, strict=True)]


def test_long_documents_fill_a_row_each() -> None:
    found = evaluation_rows(documents_of([3, 9, 7, 20]), 8, BOS, None, limit=3)
    assert found.kind == "documents"
    assert [row.input_ids.tolist() for row in found.rows] == [
        [1, *range(13, 20)],
        [1, *range(22, 29)],
        [1, *range(29, 36)],
    ]
    for row in found.rows:
        assert row.layout.pattern == "full"
        assert row.layout.position_ids.tolist() == list(range(8))
        assert row.labels.tolist() == [*row.input_ids[1:].tolist(), IGNORED]


def test_short_documents_are_packed_and_every_row_begins_with_bos() -> None:
    found = evaluation_rows(documents_of([3, 9, 7, 20]), 8, BOS, None, limit=4)
    assert found.kind == "packed"
    assert [row.input_ids.tolist() for row in found.rows] == [
        [1, 10, 11, 12, 1, 13, 14, 15],
        [1, 16, 17, 18, 19, 1, 22, 23],
        [1, 24, 25, 26, 27, 28, 1, 29],
        [1, 30, 31, 32, 33, 34, 35, 1],
    ]
    first, last = found.rows[0], found.rows[-1]
    assert first.labels.tolist() == [10, 11, 12, IGNORED, 13, 14, 15, IGNORED]
    assert last.labels.tolist() == [30, 31, 32, 33, 34, 35, IGNORED, IGNORED]
    assert first.layout.document_ids.tolist() == [0] * 4 + [1] * 4
    assert found.documents == (0, 1, 2, 3)


def test_a_long_document_does_not_fill_the_rows_that_others_could() -> None:
    book, *others = documents_of([1000, 6, 6, 6])
    found = evaluation_rows([book, *others], 8, None, None, limit=5)
    assert found.documents == (0, 1, 2, 3)
    text = torch.cat([row.input_ids for row in found.rows]).tolist()
    # A row of the book, the others whole, and only then the book's next part.
    assert text == [*book[:8], *chain(*others), *book[8:22]]


def test_rows_of_single_documents_name_them() -> None:
    assert evaluation_rows(documents_of([3, 9, 7, 20]), 8, BOS, None, limit=2).documents == (1, 2)


def test_eos_ends_documents_where_it_is_asked_for() -> None:
    found = evaluation_rows(documents_of([2, 2, 2]), 3, None, EOS, limit=5)
    assert [row.input_ids.tolist() for row in found.rows] == [[10, 11, 2], [12, 13, 2], [14, 15, 2]]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(2, 20),
    st.booleans(),
    st.integers(1, 5),
)
def test_packed_rows_hold_every_token_once(lengths: list[int], length: int, bos: bool, limit: int) -> None:
    documents = documents_of(lengths)
    try:
        found = evaluation_rows(documents, length, BOS if bos else None, None, limit)
    except RopewalkError:
        # Each document and each row adds at most a BOS, so text for a whole row is never refused.
        assert sum(lengths) < length
        return
    assert 1 <= len(found.rows) <= limit
    for row in found.rows:
        assert row.layout.total_length == length
        assert not bos or row.input_ids[0] == BOS
        targets = row.labels[row.labels != IGNORED]
        assert torch.equal(targets, row.input_ids[1:][row.labels[:-1] != IGNORED])
        assert not (targets == BOS).any()
    if found.kind == "packed":
        text = torch.cat([row.input_ids for row in found.rows])
        text = text[text != BOS].tolist()
        assert len(set(text)) == len(text)
        read = {number for number, ids in enumerate(documents) if {*ids.tolist()} & {*text}}
        assert read == {*found.documents}
        # No second part of a document comes before the first parts of all of them.
        firsts = {token for ids in documents for token in ids[: length - bos].tolist()}
        assert [token in firsts for token in text] == sorted(
            [token in firsts for token in text], reverse=True
        )


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(
        RopewalkError, match=r"the text has 5 tokens in 2 documents, which is too few .* of 64 tokens"
    ):
        evaluation_rows(documents_of([2, 3]), 64, BOS, None, limit=4)
    with pytest.raises(RopewalkError, match="2 tokens or more, got 1"):
        evaluation_rows(documents_of([5]), 1, BOS, None, limit=4)
    with pytest.raises(RopewalkError, match="1 or more, got 0"):
        evaluation_rows(documents_of([5]), 4, BOS, None, limit=0)


def test_no_more_text_is_read_than_rows_can_use() -> None:
    read: list[int] = []

    def stream(lengths: list[int]) -> Iterator[TokenisedDocument]:
        for document in documents_of(lengths):
            read.append(len(document))
            yield TokenisedDocument(document, "books")

    assert len(take_documents(stream([2, 50, 50, 50]), length=40, limit=2)) == 3
    assert len(read) == 3
    read.clear()
    # Eight times two rows of ten tokens.
    assert len(take_documents(stream([5] * 100), length=10, limit=2)) == 32
    assert len(take_documents(stream([5] * 4), length=10, limit=2)) == 4


def test_long_documents_give_a_row_each_whatever_other_lengths_are_asked() -> None:
    books = [TokenisedDocument(np.full(3000, number, np.int32), "books") for number in range(30)]
    for longest in (128, 4096):
        taken = take_documents(iter(books), longest, 16)
        found = evaluation_rows(taken, 128, None, None, 16)
        assert found.kind == "documents"
        assert [int(row.input_ids[0]) for row in found.rows] == list(range(16))
