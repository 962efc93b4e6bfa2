"""No token is lost, repeated or moved; every row is full; the policies put exactly the tokens they name."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.pack import PackedRow, PackingCounts, PackingSettings, pack, row_from_arrays
from ropewalk.data.tokenise import SpecialTokens, TokenisedDocument
from ropewalk.errors import RopewalkError
from ropewalk.packing import IGNORED, PATTERNS, POSITIONS

BOS, EOS = 1, 2
SPECIAL = SpecialTokens(BOS, EOS, BOS)
contexts = st.integers(2, 24)
patterns = st.sampled_from(PATTERNS)
lengths = contexts.flatmap(
    lambda context: st.tuples(st.just(context), st.lists(st.integers(0, 10 * context), max_size=12))
)


def numbered(lengths: list[int]) -> list[TokenisedDocument]:
    """Documents whose tokens are all different, so that every one can be found again."""
    starts = np.cumsum([10, *lengths])
    return [
        TokenisedDocument(np.arange(start, start + length, dtype=np.int32), f"source {n}")
        for n, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


def packed(
    documents: list[TokenisedDocument], settings: PackingSettings, special: SpecialTokens = SPECIAL
) -> tuple[list[PackedRow], PackingCounts]:
    counts = PackingCounts()
    return list(pack(documents, settings, special, counts)), counts


@st.composite
def settings_for(draw: st.DrawFn, context: int) -> PackingSettings:
    pattern = draw(patterns)
    bos = draw(
        st.sampled_from(["auto", "row"] if pattern == "anchor" else ["auto", "row", "document", "none"])
    )
    return PackingSettings(context, pattern, draw(st.sampled_from(POSITIONS)), bos, draw(st.booleans()))


@given(st.data(), lengths)
def test_rows_are_the_stream_of_documents_cut_into_pieces(
    data: st.DataObject, sized: tuple[int, list[int]]
) -> None:
    context, sizes = sized
    settings = data.draw(settings_for(context))
    documents = numbered(sizes)
    rows, counts = packed(documents, settings)
    per_document = settings.bos_policy(SPECIAL) == "document"
    per_row = settings.bos_policy(SPECIAL) == "row"
    stream = [
        token
        for document in documents
        if len(document.input_ids)
        for token in [BOS] * per_document + document.input_ids.tolist() + [EOS] * settings.eos
    ]
    contents = []
    for row in rows:
        assert row.input_ids.dtype == np.int32
        assert row.input_ids.shape == (context,)
        assert settings.anchor_length + sum(row.segment_lengths) == context
        assert len(row.sources) == len(row.segment_lengths) == len(row.segment_documents)
        assert not per_row or row.input_ids[0] == BOS
        contents += row.input_ids[per_row:].tolist()
    assert contents == stream[: len(contents)]
    rest = len(stream) - len(contents)
    assert rest < context
    assert counts.remainder_tokens == rest + (per_row and rest > 0)
    assert counts.document_tokens == sum(sizes)
    assert counts.rows == len(rows)
    assert counts.row_tokens == context * len(rows)
    assert counts.eos_tokens == settings.eos * sum(size > 0 for size in sizes)
    assert counts.empty_documents == sizes.count(0)
    assert counts.document_tokens + counts.bos_tokens + counts.eos_tokens == (
        counts.row_tokens + counts.remainder_tokens
    )


@given(st.data(), lengths)
def test_segments_are_whole_documents_but_for_the_row_ends(
    data: st.DataObject, sized: tuple[int, list[int]]
) -> None:
    context, sizes = sized
    settings = data.draw(settings_for(context))
    documents = numbered(sizes)
    owner = {int(token): document.source for document in documents for token in document.input_ids}
    for row in packed(documents, settings)[0]:
        bounds = np.cumsum([settings.anchor_length, *row.segment_lengths])
        for source, start, end in zip(row.sources, bounds, bounds[1:], strict=False):
            piece = [int(token) for token in row.input_ids[start:end] if token > EOS]
            assert {owner[token] for token in piece} <= {source}
        assert len(set(row.sources)) == len(row.sources), "a document has one segment a row"


@given(st.data(), lengths)
def test_cut_documents_are_those_that_a_row_end_falls_into(
    data: st.DataObject, sized: tuple[int, list[int]]
) -> None:
    context, sizes = sized
    settings = data.draw(settings_for(context))
    policy = settings.bos_policy(SPECIAL)
    framed = [size + (policy == "document") + settings.eos for size in sizes if size]
    ends = np.cumsum(framed)
    room = context - (policy == "row")
    first, last = (ends - framed) // room, (ends - 1) // room
    assert packed(numbered(sizes), settings)[1].cut_documents == int((first != last).sum())


@given(st.data(), lengths, st.sampled_from(["truncate", "skip"]))
def test_long_documents_leave_as_the_policy_says(
    data: st.DataObject, sized: tuple[int, list[int]], policy: str
) -> None:
    context, sizes = sized
    settings = PackingSettings(**{**asdict(data.draw(settings_for(context))), "long_documents": policy})
    rows, counts = packed(numbered(sizes), settings)
    assert counts.document_tokens + counts.dropped_tokens == sum(sizes)
    assert counts.document_tokens + counts.bos_tokens + counts.eos_tokens == (
        counts.row_tokens + counts.remainder_tokens
    )
    extra = (settings.bos_policy(SPECIAL) == "document") + settings.eos
    room = context - (settings.bos_policy(SPECIAL) == "row")
    assert counts.long_documents == sum(size > 0 and size + extra > room for size in sizes)
    pieces = [source for row in rows for source in row.sources]
    assert all(pieces.count(source) <= 2 for source in pieces)


@given(st.data(), lengths)
def test_rows_become_training_rows(data: st.DataObject, sized: tuple[int, list[int]]) -> None:
    context, sizes = sized
    settings = data.draw(settings_for(context))
    for packed_row in packed(numbered(sizes), settings)[0]:
        row = row_from_arrays(
            packed_row.input_ids, packed_row.segment_lengths, packed_row.segment_documents, settings
        )
        assert row.layout.pattern == settings.pattern
        assert row.layout.anchor_length == settings.anchor_length
        assert row.input_ids.tolist() == packed_row.input_ids.tolist()
        targets = row.labels != IGNORED
        assert int(targets.sum()) == sum(length - 1 for length in packed_row.segment_lengths)


def test_a_row_of_the_anchor_pattern_by_hand() -> None:
    rows, counts = packed(numbered([3, 4, 2]), PackingSettings(8, "anchor", "reset"))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, EOS, 13, 14, 15]
    assert rows[0].segment_lengths == [4, 3]
    assert len(rows) == 1
    assert counts == PackingCounts(
        documents=3,
        document_tokens=9,
        bos_tokens=2,
        eos_tokens=3,
        rows=1,
        row_tokens=8,
        remainder_tokens=6,
        cut_documents=1,
    )


def test_a_continuation_has_no_second_bos() -> None:
    rows, _ = packed(numbered([9]), PackingSettings(4, "intra_document"))
    assert [row.input_ids.tolist() for row in rows] == [[BOS, 10, 11, 12], [13, 14, 15, 16]]


def test_row_bos_without_an_anchor_belongs_to_the_first_document() -> None:
    rows, _ = packed(numbered([1, 2]), PackingSettings(5, "full", bos="row", eos=False, positions="reset"))
    assert rows == []
    rows, _ = packed(numbered([1, 3]), PackingSettings(5, "full", bos="row", eos=False))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, 13]
    assert rows[0].segment_lengths == [2, 3]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_special_tokens_that_a_document_brings_are_not_added_again(pattern: str) -> None:
    document = TokenisedDocument(np.array([BOS, 10, 11, EOS], np.int32), "a")
    rows, counts = packed([document], PackingSettings(4, pattern))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, EOS]
    assert (counts.bos_tokens, counts.eos_tokens, counts.document_tokens) == (0, 0, 4)


def test_a_tokenizer_without_bos_gets_eos_as_anchor_and_no_document_bos() -> None:
    qwen = SpecialTokens(None, 7, 7)
    rows, _ = packed(numbered([2]), PackingSettings(4, "anchor"), qwen)
    assert rows[0].input_ids.tolist() == [7, 10, 11, 7]
    rows, _ = packed(numbered([2]), PackingSettings(3, "intra_document"), qwen)
    assert rows[0].input_ids.tolist() == [10, 11, 7]
    with pytest.raises(RopewalkError, match="no BOS token"):
        packed(numbered([2]), PackingSettings(4, "full", bos="document"), qwen)
    with pytest.raises(RopewalkError, match="no EOS token"):
        packed(numbered([2]), PackingSettings(4), SpecialTokens(1, None, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context must be 2 tokens or more, got 1"),
        ({"pattern": "causal"}, "unknown pattern 'causal'"),
        ({"positions": "fresh"}, "unknown positions 'fresh'"),
        ({"bos": "yes", "pattern": "full"}, "unknown bos 'yes'"),
        ({"long_documents": "cut"}, "unknown long_documents 'cut'"),
        ({"bos": "none"}, "bos must be auto or row, got none"),
        ({"bos": "document"}, "bos must be auto or row, got document"),
    ],
)
def test_contradictory_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        PackingSettings(**{"context": 8, **options})
