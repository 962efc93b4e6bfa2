"""Spans of loss of documents: against byte positions counted without offsets, and the way into packed rows."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from ropewalk.attention.layout import IGNORED
from ropewalk.data import open_rows
from ropewalk.data.read.embedded import EMBEDDED
from ropewalk.data.read.readers import read_documents
from ropewalk.data.rows.pack import pack_rows
from ropewalk.data.run import preview, stats
from ropewalk.data.settings import PackConfig, PackingSettings, PreviewConfig, SourceSpec, StatsConfig
from ropewalk.data.tokens.chat import encode_spans, token_ids
from ropewalk.data.tokens.tokenise import backend_tokenizer, load_tokenizer
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.reporting.data import preview_lines
from tests.data.tiny_tokenizer import make_tokenizer

TOKENIZER = load_tokenizer(EMBEDDED)
BACKEND = backend_tokenizer(TOKENIZER)
RECORDS = [
    {"text": "The answer is 42. It is said twice: 42.", "loss_spans": [[14, 16], [36, 38]]},
    {"text": "größer — 二 🙂 end", "loss_spans": [[9, 12]]},
    {"text": "plain text is trained on whole", "source": "plain"},
]


def by_bytes(text, spans, ids):
    """Mask of targets: whether the bytes of a token meet those of a span, counted token by token."""
    edges = np.cumsum([0, *(len(BACKEND.id_to_token(each)) for each in ids)])
    assert edges[-1] == len(text.encode())
    within = np.zeros(edges[-1] + 1, bool)
    for start, stop in spans:
        within[len(text[:start].encode()) : len(text[:stop].encode())] = True
    return [bool(within[a:b].any()) for a, b in pairwise(edges)]


@st.composite
def spanned(draw):
    parts = st.sampled_from(["import ", "os", "\n", "é", "🙂", "二", " ", "return", "the ", "a", "…"])
    text = "".join(draw(st.lists(parts, min_size=1, max_size=12)))
    edges = sorted(draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=8)))
    # Some spans touch the next one.
    pairs = draw(st.sampled_from([list(pairwise(edges)), None]))
    return text, pairs or [(edges[at], edges[at + 1]) for at in range(0, len(edges) - 1, 2)]


@given(spanned())
def test_a_token_is_a_target_if_one_of_its_bytes_lies_in_a_span(case):
    text, spans = case
    stored = encode_spans(text, spans, BACKEND)
    ids = token_ids(stored).tolist()
    assert ids == BACKEND.encode(text, add_special_tokens=False).ids
    assert (stored >= 0).tolist() == by_bytes(text, spans, ids)


def test_a_token_that_a_span_cuts_is_a_target():
    text = "import os\n"
    ids = BACKEND.encode(text, add_special_tokens=False).ids
    # The first token is more than one character, of which the span has only the last.
    first = len(BACKEND.id_to_token(ids[0]))
    assert first > 1
    stored = encode_spans(text, [(first - 1, first)], BACKEND)
    assert (stored >= 0).tolist() == [True] + [False] * (len(ids) - 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "spans.jsonl", RECORDS * 20)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def config(folder, name="spans.jsonl", fields=None, **policies):
    fields = {"loss_spans_field": "loss_spans"} if fields is None else fields
    return PackConfig(
        sources=(SourceSpec(path=str(folder / name), **fields),),
        tokenizer=str(folder / "tokenizer"),
        rows=PackingSettings(
            context=128, **{"packing": "best_fit", "long_documents": "skip", "remainder": "pad", **policies}
        ),
        work={"workers": 1},
    )


def expected_targets(record, eos):
    """Bytes of the spans with one token a byte; EOS belongs to a document whose last token is trained."""
    text = record["text"].encode()
    spans = record.get("loss_spans", [[0, len(record["text"])]])
    bytes_of = [len(record["text"][:edge].encode()) for span in spans for edge in span]
    own = b"".join(text[a:b] for a, b in zip(bytes_of[::2], bytes_of[1::2], strict=True)).decode()
    return own + (eos if bytes_of[-1] == len(text) else "")


@pytest.mark.parametrize("pattern", ["anchor", "intra_document", "full"])
def test_packed_rows_train_the_spans_of_each_document(folder, pattern):
    pack_rows(config(folder, pattern=pattern), folder / "rows")
    rows, tokenizer = open_rows(folder / "rows"), make_tokenizer()
    alone = [expected_targets(each, "</s>") for each in RECORDS]
    seen = 0
    for index in range(len(rows)):
        packed, row = rows.packed(index), rows[index]
        assert packed.input_ids.min() >= 0
        trained = tokenizer.decode(row.labels[row.labels != IGNORED].tolist())
        # Without BOS before it, the first token of a document has nothing before it to be predicted from.
        numbers = [number % 3 for number in packed.numbers if number >= 0]
        whole = [alone[number][pattern == "anchor" and number == 2 :] for number in numbers]
        assert trained == "".join(whole)
        seen += len(numbers)
    assert seen == rows.manifest["counts"]["packing"]["documents"] == 60
    assert rows.manifest["counts"]["reading"]["span_documents"] == 40


def test_statistics_and_preview_show_the_spans(folder):
    result = pack_rows(config(folder), folder / "rows")
    report = stats(
        StatsConfig(sources=config(folder).sources, tokenizer=str(folder / "tokenizer")), RunContext()
    ).report
    assert report["trained_tokens"] == 20 * sum(len(expected_targets(each, "").encode()) for each in RECORDS)
    shown = preview(folder / "rows", PreviewConfig(rows=1))
    spans = [span for chunk in shown.rows[0].chunks for span in chunk.spans if not span.masked]
    assert {span.text for span in spans} >= {"42"}
    assert "⟦The answer is ⟧42⟦. It is said twice: ⟧42⟦.⟧" in "".join(
        line.plain for line in preview_lines(shown)
    )
    assert result.manifest["counts"]["reading"]["span_documents"] == 40


def test_tables_give_the_rows_of_json_lines(folder):
    whole = [{"loss_spans": None, "source": None, **each} for each in RECORDS * 20]
    parquet.write_table(pyarrow.Table.from_pylist(whole), folder / "spans.parquet")
    found = []
    for suffix in ("jsonl", "parquet"):
        rows = pack_rows(config(folder, f"spans.{suffix}"), folder / suffix)
        found.append([rows.packed(n) for n in range(len(rows))])
    for ours, theirs in zip(*found, strict=True):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist()
        assert ours.masked == theirs.masked


def test_training_around_the_spans_gives_the_rows_of_plain_text(folder):
    write(folder / "plain.jsonl", [{"text": each["text"]} for each in RECORDS * 20])
    around = {"loss_spans_field": "loss_spans", "train_around_spans": True}
    ours = pack_rows(config(folder, fields=around, packing="sequential"), folder / "ours")
    theirs = pack_rows(config(folder, "plain.jsonl", {}, packing="sequential"), folder / "theirs")
    for index in range(len(theirs)):
        assert ours.packed(index).input_ids.tolist() == theirs.packed(index).input_ids.tolist()
        assert ours.packed(index).masked == theirs.packed(index).masked
    assert "span_documents" not in ours.manifest["counts"]["reading"]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ("0-4", "must be a list of spans"),
        ([], "got an empty list; omit it"),
        ([3, 5], "must be two numbers"),
        ([[3, 5, 7]], "must be two numbers"),
        ([[0.5, 2]], "must be two numbers"),
        ([[True, 2]], "must be two numbers"),
        ([[-1, 2]], r"got \[-1, 2\] after character 0"),
        ([[2, 2]], "each with its start before its end"),
        ([[0, 5]], "within the 4 characters"),
        ([[2, 4], [0, 1]], r"got \[0, 1\] after character 4"),
        ([[0, 2], [1, 3]], r"got \[1, 3\] after character 2"),
    ],
)
def test_other_spans_are_refused_with_their_line(folder, spans, said):
    write(folder / "bad.jsonl", [RECORDS[0], {"text": "größ", "loss_spans": spans}])
    with pytest.raises(RopewalkError, match=rf"bad.jsonl:2: .*{said}"):
        pack_rows(config(folder, "bad.jsonl"), folder / "rows")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_field_of_spans_is_not_ignored_in_silence(folder, suffix):
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "spans.parquet")
    with pytest.raises(RopewalkError, match=rf"spans.{suffix}:(row 0|1): .*set loss_spans_field"):
        pack_rows(config(folder, f"spans.{suffix}", {}), folder / "rows")
    assert not (folder / "rows").exists()
    with pytest.raises(RopewalkError, match=r"no record of .* has a list of spans in the field 'spams'"):
        pack_rows(
            config(folder, f"spans.{suffix}", {"loss_spans_field": "spams"}),
            folder / "other",
        )


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"packing": "sequential"}, "packing sequential"),
        ({"long_documents": "split"}, "long_documents split"),
        ({"interleave": {}}, "interleave true"),
    ],
)
def test_policies_that_cut_documents_with_spans_are_refused(folder, policies, said):
    with pytest.raises(RopewalkError, match=f"{said} would cut documents with spans of loss"):
        pack_rows(config(folder, **policies), folder / "rows")
    assert not (folder / "rows").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_readers_that_do_not_train_take_the_texts(folder, suffix):
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), folder / "spans.parquet")
    texts = [each.text for each in read_documents([SourceSpec(path=str(folder / f"spans.{suffix}"))])]
    assert texts[:3] == [each["text"] for each in RECORDS]


def test_train_around_spans_needs_spans():
    with pytest.raises(ValueError, match="train_around_spans needs loss_spans_field"):
        SourceSpec(path="a", train_around_spans=True)


def test_sources_without_spans_are_written_as_before():
    assert SourceSpec(path="a").model_dump().keys().isdisjoint({"loss_spans_field", "train_around_spans"})
    assert SourceSpec(path="a", loss_spans_field="s").model_dump()["loss_spans_field"] == "s"
