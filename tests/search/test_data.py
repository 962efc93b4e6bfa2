"""Rows to search on and rows to judge by: exact, of both kinds, and of different documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.search.data import search_rows

BOS, EOS = 1, 2


def numbered(*lengths):
    """Documents each token of which tells whose it is."""
    return [np.full(length, 10 + number) for number, length in enumerate(lengths)]


def documents_in(rows):
    """Numbers of the documents in rows."""
    return {int(token) - 10 for row in rows.rows for token in row.input_ids if token not in (BOS, EOS)}


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(2, 24),
    st.integers(1, 5),
    st.integers(0, 5),
    st.sampled_from([(BOS, EOS), (BOS, None), (None, EOS), (None, None)]),
)
def test_rows_are_exact_and_have_nothing_in_common(lengths, length, count, held_out, ids):
    documents = numbered(*lengths)
    try:
        rows, judging = search_rows(documents, length, *ids, count, held_out)
    except RopewalkError:
        # Nothing is refused that would do: every document's tokens, but for what specials take and the last row.
        assert sum(lengths) < count * length
        return
    assert len(rows.rows) == count
    assert all(len(row.input_ids) == length for row in rows.rows)
    if ids[0] is not None:
        assert all(row.input_ids[0] == BOS for row in rows.rows)
    long = [number for number, size in enumerate(lengths) if size >= length - (ids[0] is not None)]
    if len(long) >= count:
        assert rows.kind == "documents"
        assert documents_in(rows) == set(long[:count])
        assert all(len(set(row.input_ids.tolist()) - {BOS}) == 1 for row in rows.rows)
    else:
        assert rows.kind == "packed"
    # What is searched on does not depend on what is held out.
    alone, nothing = search_rows(documents, length, *ids, count, 0)
    assert nothing is None
    for one, other in zip(rows.rows, alone.rows, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
    if judging is not None:
        assert 1 <= len(judging.rows) <= held_out
        assert all(len(row.input_ids) == length for row in judging.rows)
        assert documents_in(rows).isdisjoint(documents_in(judging))


def test_long_documents_have_a_row_each_and_others_are_held_out():
    rows, judging = search_rows(numbered(50, 5, 50, 50, 5, 50, 50), 20, BOS, EOS, 2, 2)
    assert (rows.kind, judging.kind) == ("documents", "documents")
    assert (documents_in(rows), documents_in(judging)) == ({0, 2}, {3, 5})


def test_of_few_long_documents_the_search_has_the_first_and_what_is_left_is_joined():
    # One document of ten rows is not five documents.
    rows, judging = search_rows(numbered(500, 50, 50, 30, 30, 30), 40, BOS, EOS, 3, 2)
    assert rows.kind == "documents"
    assert documents_in(rows) == {0, 1, 2}
    assert judging.kind == "packed"
    assert documents_in(judging) == {3, 4, 5}


def test_short_documents_are_joined_and_no_more_than_are_needed():
    rows, judging = search_rows(numbered(*[9] * 10), 20, BOS, EOS, 2, 2)
    assert (rows.kind, judging.kind) == ("packed", "packed")
    # With its BOS and EOS a document has 11 tokens: four fill 40.
    assert documents_in(rows) == {0, 1, 2, 3}
    assert documents_in(judging) == {4, 5, 6, 7}
    assert len(judging.rows) == 2


def test_where_the_text_is_used_up_nothing_is_held_out():
    rows, judging = search_rows(numbered(*[9] * 5), 20, BOS, EOS, 2, 2)
    assert len(rows.rows) == 2
    assert judging is None


def test_too_little_text_is_refused():
    with pytest.raises(
        RopewalkError, match=r"the text fills 1 row of 20 tokens, but the search needs 3 rows .*; give more"
    ):
        search_rows(numbered(9, 9, 9), 20, BOS, EOS, 3, 0)
    with pytest.raises(RopewalkError, match="too few for one row of 20"):
        search_rows(numbered(9), 20, BOS, EOS, 1, 0)
