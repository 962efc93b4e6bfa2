"""No token is lost, repeated or moved; every row is full; the policies put exactly the tokens they name."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import IGNORED, PATTERNS, POSITIONS
from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.rows.assemble import PADDING
from ropewalk.data.rows.training_rows import training_row
from ropewalk.data.settings import InterleaveSettings, PackingSettings
from tests.data.cases import changed
from tests.data.rows.assemble_cases import BOS, EOS, SPECIAL, lengths, numbered, packed

patterns = st.sampled_from(PATTERNS)


@st.composite
def settings_for(draw: st.DrawFn, context: int) -> PackingSettings:
    pattern = draw(patterns)
    bos = draw(
        st.sampled_from(["auto", "row"] if pattern == "anchor" else ["auto", "row", "document", "none"])
    )
    return PackingSettings(
        context=context,
        pattern=pattern,
        positions=draw(st.sampled_from(POSITIONS)),
        bos=bos,
        eos=draw(st.booleans()),
    )


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
    assert counts.remainder_tokens == rest
    assert counts.document_tokens == sum(sizes)
    assert counts.rows == len(rows)
    assert counts.row_tokens == context * len(rows)
    assert counts.eos_tokens == settings.eos * sum(size > 0 for size in sizes)
    assert counts.empty_documents == sizes.count(0)


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
    settings = changed(data.draw(settings_for(context)), long_documents=policy)
    rows, counts = packed(numbered(sizes), settings)
    assert counts.document_tokens + counts.dropped_tokens == sum(sizes)
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
        row = training_row(packed_row, settings)
        assert row.layout.pattern == settings.pattern
        assert row.layout.anchor_length == settings.anchor_length
        assert row.input_ids.tolist() == packed_row.input_ids.tolist()
        targets = row.labels != IGNORED
        assert int(targets.sum()) == sum(length - 1 for length in packed_row.segment_lengths)


@given(st.data(), lengths, st.sampled_from(["split", "truncate", "skip"]))
def test_every_option_accounts_for_every_token(
    data: st.DataObject, sized: tuple[int, list[int]], policy: str
) -> None:
    context, sizes = sized
    settings = data.draw(settings_for(context))
    interleaved = None
    if settings.bos != "row" or settings.pattern == "anchor":
        interleaved = data.draw(
            st.sampled_from(
                [None, InterleaveSettings(min_length=2, max_length=context, parts=(2, 3), seed=3)]
            )
        )
    tag_length = data.draw(st.integers(0, 3)) if context > 6 else 0
    settings = changed(
        settings,
        long_documents=policy,
        packing=data.draw(st.sampled_from(["sequential", "best_fit"])),
        remainder=data.draw(st.sampled_from(["drop", "pad"])),
        interleave=interleaved,
        tag="{source}" if tag_length else None,
    )
    framed_like = data.draw(st.booleans())
    documents = numbered(sizes)
    if framed_like:
        documents = [
            TokenisedDocument(np.array([BOS, *d.input_ids, EOS], np.int32), d.source) for d in documents
        ]
    tag = [np.array([3, 4, 5][:tag_length], np.int32)] * len(sizes) if tag_length else None
    rows, counts = packed(documents, settings, tags=tag)
    owner = {int(token): n for n, d in enumerate(numbered(sizes)) for token in d.input_ids}
    found: dict[int, list[int]] = {}
    for row in rows:
        assert len(row.input_ids) == context == settings.anchor_length + sum(row.segment_lengths)
        training = training_row(row, settings)
        ids = training.layout.document_ids.tolist()
        masked = [n for a, b in zip(row.masked[::2], row.masked[1::2], strict=True) for n in range(a, b)]
        order = training.layout.document_order.tolist()
        for place in order:
            token, document = int(row.input_ids[place]), ids[place]
            if document < 0:
                assert token == BOS
            elif row.numbers[document] == PADDING:
                assert place in masked
                assert place >= context - row.segment_lengths[-1]
            elif token > 5:
                assert owner[token] == row.numbers[document]
                assert place not in masked
                found.setdefault(owner[token], []).append(token)
            else:
                assert (token in (3, 4, 5)) == (place in masked)
        assert not {int(t) for t in training.labels} & {3, 4, 5}, "a tag is never a target"
    for tokens in found.values():
        # Best-fit may put a document's tail into a row before its beginning.
        in_order = tokens if settings.packing == "sequential" else sorted(tokens)
        assert in_order == list(dict.fromkeys(sorted(tokens))), "in the document's order, none twice"
    if policy == "split" and settings.remainder == "pad":
        assert sum(map(len, found.values())) == sum(sizes), "nothing is left out"
        assert counts.remainder_tokens == 0


def test_rows_cut_out_of_a_plan_are_shuffled_as_in_the_whole() -> None:
    """``packed`` compares each row with the one that it cuts out of the plan."""
    settings = PackingSettings(
        context=64, pattern="intra_document", interleave=InterleaveSettings(min_length=8, max_length=64)
    )
    rows, _ = packed(numbered([20, 17, 30, 25] * 6), settings)
    assert len(rows) > 5


def test_what_a_chat_leaves_out_of_the_loss_is_masked_beside_the_tag_and_the_padding() -> None:
    settings = PackingSettings(
        context=12, pattern="intra_document", bos="none", packing="best_fit", remainder="pad", tag="{source}"
    )
    # A chat's tokens outside the assistant's turns are stored as ~id.
    chat = TokenisedDocument(np.array([10, ~11, ~12, 13], np.int32), "chats")
    (row,), _ = packed([chat], settings, tags=[np.array([3, 4], np.int32)])
    assert row.input_ids.tolist() == [3, 4, 10, 11, 12, 13, EOS, *[EOS] * 5]
    assert list(zip(row.masked[::2], row.masked[1::2], strict=True)) == [(0, 2), (3, 5), (7, 12)]
