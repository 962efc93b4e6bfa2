"""Rows of short and of long documents: no document is in both or in neither."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data import (
    PackedRows,
    PackingSettings,
    PreviewConfig,
    SourceSpec,
    StatsConfig,
    preview,
    read_documents,
    stats,
)
from ropewalk.data.rows.kinds import long_kind, short_kind, short_rows_of
from ropewalk.data.rows.manifest import token_account
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from tests.data.cases import changed, refusal
from tests.data.rows.rows_cases import imbalance, prepare

LENGTH = 100
ROWS = PackingSettings(context=256, pattern="anchor", remainder="pad")


def kinds(corpus: Path, tokenizer: PreTrainedTokenizerFast, rows: PackingSettings = ROWS, bos="auto"):
    """The folder of long and that of short documents."""
    return tuple(
        prepare(corpus, tokenizer, settings)
        for settings in (long_kind(rows, LENGTH), short_kind(rows, LENGTH, bos))
    )


def numbers(rows: PackedRows) -> set[int]:
    return {number for i in range(len(rows)) for number in rows.packed(i).numbers if number >= 0}


@pytest.mark.parametrize("pattern", ["anchor", "full"])
@pytest.mark.parametrize("bos", ["auto", "none", "row"])
@pytest.mark.parametrize("tag", [None, "from {source}: "])
@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
def test_the_kinds_divide_the_documents(corpus, tokenizer, pattern, bos, tag, packing) -> None:
    own = "auto" if pattern == "anchor" else bos
    rows = changed(ROWS, pattern=pattern, bos=own, tag=tag, packing=packing)
    long, short = kinds(corpus, tokenizer, rows, bos)
    documents = list(tokenise(read_documents([SourceSpec(path=str(corpus))]), tokenizer))
    # By hand: the ids, the tag, and one BOS and one EOS.
    tags = {
        name: 0
        if tag is None
        else len(tokenizer(tag.format(source=name), add_special_tokens=False)["input_ids"])
        for name in ("a", "b")
    }
    lengths = [len(each.input_ids) + tags[each.source] + 2 for each in documents]
    assert numbers(short) == {n for n, length in enumerate(lengths) if length <= LENGTH}
    assert numbers(long) == {n for n, length in enumerate(lengths) if length > LENGTH}
    for row in short:
        assert row.layout.pattern == "intra_document"
        assert row.layout.rope_length <= LENGTH
    assert all(row.layout.rope_length == 256 for row in long)
    for folder in (long, short):
        assert imbalance(token_account(folder.manifest["counts"])) == (0, 0)


def test_padding_does_not_decide_the_length_of_a_row(tmp_path, tokenizer) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"text": "abc " * 9, "source": "a"}))
    (row,) = prepare(few, tokenizer, short_kind(ROWS, LENGTH, "auto"))
    assert row.padding > LENGTH >= row.layout.rope_length == 256 - row.padding


def test_both_hold_out_the_same_documents(corpus, tokenizer) -> None:
    held = {"validation": {"documents": 7}}
    long, short = (
        prepare(corpus, tokenizer, settings, **held)
        for settings in (long_kind(ROWS, LENGTH), short_kind(ROWS, LENGTH, "auto"))
    )
    ids = [[each.input_ids.tolist() for each in folder.validation] for folder in (long, short)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 7


def test_a_folder_tells_its_kind(corpus, tokenizer, tokenizer_folder) -> None:
    long, short = kinds(corpus, tokenizer)
    context = RunContext()
    found = preview(short.folder, PreviewConfig(tokenizer=tokenizer_folder, rows=1)).to_json()
    assert found["kind"] == "documents of at most 100 tokens"
    report = stats(StatsConfig(sources=[SourceSpec(path=str(long.folder))]), context).report
    assert report["kind"] == "documents of more than 100 tokens"
    # Of the packed documents, not of all that were read.
    assert report["documents"] == len(numbers(long)) < report["corpus"]["documents"]


def test_rows_of_all_documents_are_as_before(corpus, tokenizer) -> None:
    """Their settings, and so their digests, do not have the new keys."""
    rows = prepare(corpus, tokenizer, ROWS)
    assert not {"documents_up_to", "documents_above"} & rows.manifest["settings"].keys()
    assert rows.settings.kind is None
    assert long_kind(ROWS, 7).model_dump()["documents_above"] == 7


def test_a_kind_without_documents_is_refused_with_numbers(corpus, tokenizer) -> None:
    with pytest.raises(
        RopewalkError, match=r"no documents of more than 999 tokens.*the 60 documents have \d+ to 301"
    ):
        prepare(corpus, tokenizer, long_kind(ROWS, 999))
    few = changed(short_kind(ROWS, 12, "auto"), remainder="drop")
    with pytest.raises(
        RopewalkError, match=r"\d+ training tokens in \d+ documents of at most 12 tokens, but a row"
    ):
        prepare(corpus, tokenizer, few)
    said = refusal(PackingSettings, context=64, documents_up_to=9, documents_above=9)
    assert "documents_above 9 and documents_up_to 9 leave no document" in said


def test_the_share_is_the_decimal_number_that_is_written() -> None:
    assert short_rows_of(0.29, 100) == 29
    assert int(0.29 * 100) == 28
