"""A row taken apart: every token in one place, of the right kind, and nothing hidden unsaid."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import InterleaveSettings, PackedRow, PackingSettings
from ropewalk.data.row_preview import Chunk, RowPreview, Span, preview_row
from ropewalk.data.rows.assemble import assemble_rows, pack_documents
from ropewalk.data.rows.special_tokens import DocumentEnds
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError

BOS, EOS = 1, 2


def row_of(
    ids: list[int],
    segments: list[tuple[int, int]],
    numbers: list[int],
    masked: list[int],
) -> PackedRow:
    """Segments are (length, document)."""
    lengths, documents = ([each[n] for each in segments] for n in (0, 1))
    sources = ["" if number == -1 else f"source-{number}" for number in numbers]
    return PackedRow(np.array(ids, np.int32), lengths, documents, sources, numbers, masked)


def test_a_row_by_hand() -> None:
    """Anchor; document 7 with a tag of 2, cut into two chunks around document 3; two tokens of padding."""
    ids = [BOS, 50, 51, 10, 20, 21, EOS, 11, EOS, EOS, EOS]
    row = row_of(ids, [(3, 0), (3, 1), (2, 0), (2, 2)], [7, 3, -1], [1, 3, 9, 11])
    preview = preview_row(row, 1, {BOS, EOS})
    assert preview == RowPreview(
        anchor=Span("anchor", 0, 1, masked=True),
        chunks=(
            Chunk(0, 7, "source-7", 1, 4, 1, 2, False, (Span("text", 1, 3, True), Span("text", 3, 4, False))),
            Chunk(
                1, 3, "source-3", 4, 7, 1, 1, False, (Span("text", 4, 6, False), Span("special", 6, 7, False))
            ),
            Chunk(
                0, 7, "source-7", 7, 9, 2, 2, False, (Span("text", 7, 8, False), Span("special", 8, 9, False))
            ),
            Chunk(2, -1, "", 9, 11, 1, 1, False, (Span("padding", 9, 11, True),)),
        ),
    )
    assert [chunk.is_padding for chunk in preview.chunks] == [False, False, False, True]


def test_a_row_without_an_anchor_begins_with_its_first_document() -> None:
    preview = preview_row(row_of([BOS, 5], [(2, 0)], [4], []), 0, {BOS})
    assert preview.anchor is None
    assert preview.chunks[0].spans == (Span("special", 0, 1, False), Span("text", 1, 2, False))


@pytest.mark.parametrize(("length", "left_out"), [(6, 0), (7, 0), (8, 2), (100, 94)])
def test_the_middle_of_a_long_document_is_left_out_and_counted(length: int, left_out: int) -> None:
    row = row_of([9] * length, [(length, 0)], [0], [])
    (chunk,) = preview_row(row, 0, {BOS}, ends=3).chunks
    gaps = [span for span in chunk.spans if span.kind == "left_out"]
    assert sum(gap.stop - gap.start for gap in gaps) == left_out
    if left_out:
        assert chunk.spans == (
            Span("text", 0, 3, False),
            Span("left_out", 3, length - 3, False),
            Span("text", length - 3, length, False),
        )


@st.composite
def rows(draw: st.DrawFn) -> tuple[PackedRow, int]:
    anchor_length = draw(st.integers(0, 2))
    segments = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=6))
    total = anchor_length + sum(length for length, _ in segments)
    ids = draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    edges = sorted(draw(st.sets(st.integers(0, total), max_size=6)))
    numbers = draw(st.lists(st.integers(0, 9), min_size=4, max_size=4))
    return row_of(ids, segments, numbers, edges[: len(edges) // 2 * 2]), anchor_length


@given(rows(), st.none() | st.integers(1, 5))
def test_every_token_is_in_one_span_of_its_kind(drawn: tuple[PackedRow, int], ends: int | None) -> None:
    row, anchor_length = drawn
    preview = preview_row(row, anchor_length, {BOS, EOS}, ends)
    masked = {t for a, b in zip(row.masked[::2], row.masked[1::2], strict=True) for t in range(a, b)}
    at = anchor_length
    parts: dict[int, int] = {}
    for chunk, length, document in zip(
        preview.chunks, row.segment_lengths, row.segment_documents, strict=True
    ):
        assert (chunk.start, chunk.stop, chunk.document) == (at, at + length, document)
        assert (chunk.number, chunk.source) == (row.numbers[document], row.sources[document])
        parts[document] = parts.get(document, 0) + 1
        assert (chunk.part, chunk.parts) == (parts[document], row.segment_documents.count(document))
        for span in chunk.spans:
            assert span.start == at < span.stop
            at = span.stop
            tokens = range(span.start, span.stop)
            if span.kind == "left_out":
                assert ends is not None
                assert len(tokens) == length - 2 * ends > 1
                assert span.masked == (set(tokens) <= masked)
            else:
                assert {row.input_ids[t] in (BOS, EOS) for t in tokens} == {span.kind == "special"}
                assert {t in masked for t in tokens} == {span.masked}
        # Runs are as long as they can be.
        kinds = [(span.kind, span.masked) for span in chunk.spans]
        assert all(a != b for a, b in pairwise(kinds))
        assert at == chunk.stop
    assert at == len(row.input_ids)


@pytest.mark.parametrize(
    ("segments", "masked", "ends", "message"),
    [
        ([(3, 0)], [], 0, r"at each end of a document must be 1 or more, got 0"),
        ([(2, 0)], [], None, r"the row has 3 tokens, but its segments add up to 2"),
        ([(3, 0)], [1, 4], None, r"masked tokens 1 to 4 lie outside the row of 3 tokens"),
        ([(3, 0)], [2, 1], None, r"masked tokens 2 to 1 lie outside the row of 3 tokens"),
    ],
)
def test_contradictions_are_refused(
    segments: list[tuple[int, int]], masked: list[int], ends: int | None, message: str
) -> None:
    with pytest.raises(RopewalkError, match=message):
        preview_row(row_of([5, 6, 7], segments, [0], masked), 0, {BOS}, ends)


class Nines:
    """A corpus whose documents are of one token that is no special one."""

    def read_tokens(self, number: int, first: int, out: np.ndarray) -> None:
        out[:] = 9


@given(
    # Few documents and lengths, so that a document often comes twice in a row, and ends where a row does.
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.sampled_from(["anchor", "full"]),
    st.booleans(),
)
def test_a_document_goes_on_where_the_row_before_cut_it(
    order: list[int], lengths: list[int], pattern: str, shuffled: bool
) -> None:
    numbers = np.array(order, np.int64)
    ids = np.full(len(order), 9, np.int32)
    ends = DocumentEnds(np.array(lengths)[numbers], ids, ids, np.zeros(len(order), np.int32))
    chunks = InterleaveSettings(min_length=2, max_length=30) if shuffled else None
    settings = PackingSettings(context=8, pattern=pattern, remainder="pad", interleave=chunks)
    packed = pack_documents(numbers, ends, ["web"], settings, SpecialTokens(BOS, EOS, BOS))
    before = None
    for number, row in enumerate(assemble_rows(packed, Nines(), 0, packed.num_rows)):
        preview = preview_row(row, settings.anchor_length, {BOS, EOS}, before=before, eos=EOS)
        first, last = packed.plan.row(number), packed.plan.row(max(0, number - 1))
        cut = (first.items[0], first.starts[0]) == (last.items[-1], last.starts[-1] + last.lengths[-1])
        told = [chunk for chunk in preview.chunks if chunk.continues]
        assert [(chunk.document, chunk.part) for chunk in told] == [(0, 1)] * int(cut)
        before = row


def test_without_an_eos_the_same_document_is_taken_to_go_on() -> None:
    first = row_of([5, 6, 7], [(1, 0), (2, 1)], [4, 7], [])
    for number, goes_on in ((7, True), (4, False)):
        row = row_of([8, 9, 9], [(3, 0)], [number], [])
        assert preview_row(row, 0, {BOS, EOS}, before=first).chunks[0].continues == goes_on
        assert not preview_row(row, 0, {BOS, EOS}).chunks[0].continues
