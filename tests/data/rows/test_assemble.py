"""No token is lost, repeated or moved; every row is full; the policies put exactly the tokens they name."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import IGNORED, PATTERNS, POSITIONS
from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.rows.assemble import PADDING, PackedRow, assemble_rows, pack_documents
from ropewalk.data.rows.special_tokens import DocumentEnds, PackingCounts
from ropewalk.data.rows.training_rows import training_row
from ropewalk.data.settings import InterleaveSettings, PackingSettings
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import choices_in
from tests.data.cases import changed, refusal

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


class InMemory:
    """Documents as the corpus hands them out."""

    def __init__(self, documents: list[TokenisedDocument]) -> None:
        self._documents = documents
        self.sources = list(dict.fromkeys(document.source for document in documents))
        ids = [document.input_ids for document in documents]
        self.ends = DocumentEnds(
            np.array([len(each) for each in ids], np.int64),
            np.array([each[0] if len(each) else -1 for each in ids], np.int32),
            np.array([each[-1] if len(each) else -1 for each in ids], np.int32),
            np.array([self.sources.index(document.source) for document in documents], np.int32),
        )

    def read_tokens(self, number: int, first: int, out: np.ndarray) -> None:
        out[:] = self._documents[number].input_ids[first : first + len(out)]


def packed(
    documents: list[TokenisedDocument],
    settings: PackingSettings,
    special: SpecialTokens = SPECIAL,
    tags: list[np.ndarray] | None = None,
) -> tuple[list[PackedRow], PackingCounts]:
    corpus = InMemory(documents)
    plan = pack_documents(np.arange(len(documents)), corpus.ends, corpus.sources, settings, special, tags)
    rows = assemble_rows(plan, corpus, 0, plan.num_rows)
    for number in range(plan.num_rows):
        (alone,) = assemble_rows(plan, corpus, number, number + 1)
        assert alone.input_ids.tolist() == rows[number].input_ids.tolist(), "a row is the same by itself"
        assert alone.masked == rows[number].masked
    counts = plan.counts(corpus.ends)
    added = counts.bos_tokens + counts.eos_tokens + counts.tag_tokens + counts.padding_tokens
    assert counts.document_tokens + added == counts.row_tokens + counts.remainder_tokens
    assert counts.tokens_in == counts.document_tokens + counts.dropped_tokens + counts.own_bos_tokens
    return rows, counts


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


def test_a_row_of_the_anchor_pattern_by_hand() -> None:
    rows, counts = packed(
        numbered([3, 4, 2]), PackingSettings(context=8, pattern="anchor", positions="reset")
    )
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, EOS, 13, 14, 15]
    assert rows[0].segment_lengths == [4, 3]
    assert len(rows) == 1
    assert counts == PackingCounts(
        documents=3,
        tokens_in=9,
        document_tokens=9,
        bos_tokens=1,
        eos_tokens=3,
        tag_tokens=0,
        own_bos_tokens=0,
        padding_tokens=0,
        rows=1,
        row_tokens=8,
        remainder_tokens=5,
        remainder_documents=2,
        cut_documents=1,
        empty_documents=0,
        long_documents=0,
        dropped_tokens=0,
    )


def test_a_continuation_has_no_second_bos() -> None:
    rows, _ = packed(numbered([9]), PackingSettings(context=4, pattern="intra_document"))
    assert [row.input_ids.tolist() for row in rows] == [[BOS, 10, 11, 12], [13, 14, 15, 16]]


def test_row_bos_without_an_anchor_belongs_to_the_first_document() -> None:
    rows, _ = packed(
        numbered([1, 2]), PackingSettings(context=5, pattern="full", bos="row", eos=False, positions="reset")
    )
    assert rows == []
    rows, _ = packed(numbered([1, 3]), PackingSettings(context=5, pattern="full", bos="row", eos=False))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, 13]
    assert rows[0].segment_lengths == [2, 3]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_special_tokens_that_a_document_brings_are_not_added_again(pattern: str) -> None:
    document = TokenisedDocument(np.array([BOS, 10, 11, EOS], np.int32), "a")
    rows, counts = packed([document], PackingSettings(context=4, pattern=pattern))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, EOS]
    assert (counts.bos_tokens, counts.own_bos_tokens, counts.eos_tokens, counts.document_tokens) == (
        1,
        1,
        0,
        3,
    )


def test_a_tokenizer_without_bos_gets_eos_as_anchor_and_no_document_bos() -> None:
    qwen = SpecialTokens(None, 7, 7)
    rows, _ = packed(numbered([2]), PackingSettings(context=4, pattern="anchor"), qwen)
    assert rows[0].input_ids.tolist() == [7, 10, 11, 7]
    rows, _ = packed(numbered([2]), PackingSettings(context=3, pattern="intra_document"), qwen)
    assert rows[0].input_ids.tolist() == [10, 11, 7]
    with pytest.raises(RopewalkError, match="no BOS token"):
        packed(numbered([2]), PackingSettings(context=4, pattern="full", bos="document"), qwen)
    for pattern in ("full", "intra_document"):
        with pytest.raises(RopewalkError, match="no BOS token to begin rows with"):
            packed(numbered([2]), PackingSettings(context=4, pattern=pattern, bos="row"), qwen)
    with pytest.raises(RopewalkError, match="no EOS token"):
        packed(numbered([2]), PackingSettings(context=4), SpecialTokens(1, None, 1))


def test_a_tag_stands_between_bos_and_text_and_is_no_target() -> None:
    tags = [np.array([5, 6], np.int32), np.array([7], np.int32)]
    settings = PackingSettings(context=13, pattern="intra_document", tag="{source}")
    rows, counts = packed(numbered([3, 2]), settings, tags=tags)
    (row,) = packed(numbered([3, 2]), changed(settings, context=12), tags=tags)[0]
    assert row.input_ids.tolist() == [BOS, 5, 6, 10, 11, 12, EOS, BOS, 7, 13, 14, EOS]
    assert row.masked == [1, 3, 8, 9]
    labels = training_row(row, changed(settings, context=12)).labels.tolist()
    assert labels == [IGNORED, IGNORED, 10, 11, 12, EOS, IGNORED, IGNORED, 13, 14, EOS, IGNORED]
    assert rows == []
    assert counts.tag_tokens == 3


def test_a_tag_that_a_row_end_cuts_is_masked_in_both_rows() -> None:
    tags = [np.array([5, 6, 7], np.int32)] * 2
    settings = PackingSettings(context=4, pattern="intra_document", bos="none", eos=False, tag="{source}")
    rows, _ = packed(numbered([2, 3]), settings, tags=tags)
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 7, 10], [11, 5, 6, 7]]
    assert [row.masked for row in rows] == [[0, 3], [1, 4]]
    rows, _ = packed(numbered([4, 4]), settings, tags=tags)
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 7, 10], [11, 12, 13, 5], [6, 7, 14, 15]]
    assert [row.masked for row in rows] == [[0, 3], [3, 4], [0, 2]]


def test_padding_is_a_document_of_its_own_without_targets() -> None:
    settings = PackingSettings(context=8, pattern="anchor", remainder="pad")
    rows, counts = packed(numbered([3, 2]), settings)
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, EOS, 13, 14, EOS]
    (row,) = packed(numbered([3]), settings)[0]
    assert row.input_ids.tolist() == [BOS, 10, 11, 12, EOS, EOS, EOS, EOS]
    assert (row.segment_lengths, row.sources, row.numbers) == ([4, 3], ["source 0", ""], [0, PADDING])
    assert row.masked == [5, 8]
    assert training_row(row, settings).labels.tolist() == [IGNORED, 11, 12, EOS] + [IGNORED] * 4
    assert counts.padding_tokens == 0


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


def test_interleaving_a_row_whose_bos_is_no_anchor_is_refused() -> None:
    refused = refusal(PackingSettings, context=8, pattern="full", bos="row", interleave=True)
    assert "interleaving would move it" in refused


@pytest.mark.parametrize(
    "tag",
    [
        "{name}: ",
        "{source",
        "{}",
        "",
        "{source.x}",
        "{0}",
        "{source:d}",
        "{source:{x}}",
        "{source!z}",
        "{source!r}",
    ],
)
def test_a_tag_that_is_no_template_is_refused(tag: str) -> None:
    assert refusal(PackingSettings, context=8, tag=tag).startswith("tag: the tag ")


def test_settings_survive_json() -> None:
    settings = PackingSettings(
        context=8,
        tag="{source}: ",
        interleave=InterleaveSettings(min_length=2, max_length=5, parts=(2,), cut_points=(0.1, 0.5), seed=7),
    )
    assert PackingSettings(**json.loads(json.dumps(settings.model_dump()))) == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context must be 2 or more, got 1"),
        ({"pattern": "causal"}, "unknown pattern 'causal'"),
        ({"positions": "fresh"}, "unknown positions 'fresh'"),
        ({"bos": "yes", "pattern": "full"}, "unknown bos 'yes'"),
        ({"long_documents": "cut"}, "unknown long_documents 'cut'"),
        ({"bos": "none"}, "bos must be auto or row, got none"),
        ({"bos": "document"}, "bos must be auto or row, got document"),
    ],
)
def test_contradictory_settings_are_refused(options: dict, message: str) -> None:
    assert message in refusal(PackingSettings, **{"context": 8, **options})


def test_choices_are_those_of_the_layout() -> None:
    fields = PackingSettings.model_fields
    assert choices_in(fields["pattern"].annotation) == [*PATTERNS]
    assert choices_in(fields["positions"].annotation) == [*POSITIONS]
