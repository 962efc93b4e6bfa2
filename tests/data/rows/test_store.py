"""Rows on disk are the rows that packing made; they are found again for the same inputs and no others."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ropewalk.data import (
    InterleaveSettings,
    MixtureSettings,
    PackedRows,
    PackingSettings,
    SourceSpec,
    ValidationSettings,
    open_rows,
    packed_statistics,
    read_documents,
    tokenizer_identity,
)
from ropewalk.data.rows.manifest import imbalance, token_account
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError
from tests.data.cases import Job, changed
from tests.data.tiny_tokenizer import make_tokenizer

SETTINGS = PackingSettings(context=64, pattern="anchor", positions="reset")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, length in enumerate(random.integers(1, 300, 60)):
            record = {"text": f"[{number}] ".ljust(length, "ab"[number % 2]), "source": "ab"[number % 2]}
            file.write(json.dumps(record) + "\n")
    return path


def prepare(
    corpus: Path, tokenizer: object, settings: PackingSettings = SETTINGS, **options: object
) -> PackedRows:
    options.setdefault("cache_dir", corpus.parent / "packed")
    cache, runs = options.pop("cache_dir"), {"workers", "progress"}
    run = {name: options.pop(name) for name in runs & options.keys()}
    return Job.of([SourceSpec(path=str(corpus))], tokenizer, settings, **options).prepare(cache, **run)


def folders(corpus: Path) -> list[str]:
    """The folders of complete rows."""
    return sorted(path.parent.name for path in (corpus.parent / "packed").glob("*/manifest.json"))


@pytest.mark.parametrize("workers", [1, 2])
def test_stored_rows_are_the_packed_rows(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, workers: int
) -> None:
    rows = prepare(corpus, tokenizer, workers=workers)
    documents = list(tokenise(read_documents([SourceSpec(path=str(corpus))]), tokenizer))
    # The pattern anchor by hand: one BOS a row, and the documents with their EOS in a stream.
    stream = [token for d in documents for token in [*d.input_ids.tolist(), tokenizer.eos_token_id]]
    room = SETTINGS.context - 1
    assert len(rows) == len(stream) // room == len(list(rows))
    owners = [d.source for d in documents for _ in range(len(d.input_ids) + 1)]
    for index, row in enumerate(rows):
        here = slice(index * room, (index + 1) * room)
        assert row.input_ids.tolist() == [tokenizer.bos_token_id, *stream[here]]
        sources = rows.sources(index)
        assert [sources[d] for d in row.layout.document_ids.tolist()[1:]] == owners[here]
    assert torch.equal(rows[-1].input_ids, rows[len(rows) - 1].input_ids)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_manifest_tells_how_the_rows_came_to_be(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = prepare(corpus, tokenizer, validation=ValidationSettings(documents=4))
    manifest = json.loads((rows.folder / "manifest.json").read_text())
    packing = manifest["counts"]["packing"]
    assert packing["rows"] == len(rows)
    assert imbalance(token_account(manifest["counts"])) == (0, 0)
    assert sum(source["tokens"] for source in manifest["sources"].values()) == packing["document_tokens"]
    assert sum(source["documents"] for source in manifest["sources"].values()) == 56
    assert manifest["tokenizer"]["bos_token_id"] == tokenizer.bos_token_id
    assert manifest["counts"]["reading"]["documents"] == 60


def test_validation_documents_are_stored_and_never_trained_on(
    corpus: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = {document.text for document in read_documents([SourceSpec(path=str(corpus))])}
    rows = prepare(corpus, tokenizer, validation=ValidationSettings(documents=5))
    held_out = [tokenizer.decode(document.input_ids) for document in rows.validation]
    assert len(rows.validation) == len(set(held_out)) == 5
    assert set(held_out) <= texts
    assert {document.source for document in rows.validation} <= {"a", "b"}
    trained = "".join(tokenizer.decode(row.input_ids, skip_special_tokens=True) for row in rows)
    seen = {text for text in texts if f"{text.split()[0]} " in trained}
    assert not seen & set(held_out)
    # The last incomplete row may keep a document or two from being seen at all.
    assert len(seen) >= 60 - 5 - 64 // 4
    again = prepare(
        corpus, tokenizer, PackingSettings(context=32), validation=ValidationSettings(documents=5)
    )
    assert [tokenizer.decode(document.input_ids) for document in again.validation] == held_out
    assert len(prepare(corpus, tokenizer).validation) == 0


def test_the_same_call_finds_the_rows_again(corpus: Path, tokenizer_folder: str) -> None:
    calls: list[int] = []
    progress = {"progress": lambda documents, tokens: calls.append(tokens)}
    first = prepare(corpus, tokenizer_folder, **progress)
    assert calls
    calls.clear()
    second = prepare(corpus, tokenizer_folder, workers=2, **progress)
    assert not calls
    assert second.folder == first.folder
    assert folders(corpus) == [first.folder.name]


def test_anything_that_matters_makes_other_rows(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    calls = [prepare(corpus, tokenizer)]
    for change in (
        {"context": 65},
        {"pattern": "intra_document"},
        {"positions": "continuous"},
        {"eos": False},
        {"long_documents": "truncate"},
        {"tag": "{source}"},
        {"packing": "best_fit"},
        {"remainder": "pad"},
        {"interleave": InterleaveSettings(min_length=4, max_length=50)},
    ):
        calls.append(prepare(corpus, tokenizer, changed(SETTINGS, **change)))
    calls.append(prepare(corpus, tokenizer, validation=ValidationSettings(fraction=0.1)))
    cache = corpus.parent / "packed"
    calls.append(Job.of([SourceSpec(path=str(corpus), name="x")], tokenizer, SETTINGS).prepare(cache))
    calls.append(Job.of([SourceSpec(path=str(corpus), max_documents=50)], tokenizer, SETTINGS).prepare(cache))
    mixture = MixtureSettings(weights={"a": 2})
    calls.append(Job.of([SourceSpec(path=str(corpus))], tokenizer, SETTINGS, mixture=mixture).prepare(cache))
    content, stamp = corpus.read_text(), corpus.stat()
    corpus.write_text(content.replace("aaaa", "abab", 1))
    os.utime(corpus, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    calls.append(prepare(corpus, tokenizer))
    assert len({rows.folder for rows in calls}) == len(calls) == len(folders(corpus))


def test_a_large_file_is_known_by_size_and_time(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ropewalk.data.read.identity.HASHED_BYTES", 10)
    first = prepare(corpus, tokenizer)
    assert prepare(corpus, tokenizer).folder == first.folder
    os.utime(corpus, ns=(1, 1))
    assert prepare(corpus, tokenizer).folder != first.folder


def test_an_interrupted_run_is_taken_up(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def interrupt(documents: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tokenizer, progress=interrupt)
    assert folders(corpus) == []
    with pytest.raises(RopewalkError, match=r"holds no packed rows"):
        open_rows(corpus.parent / "packed")
    rows = prepare(corpus, tokenizer)
    assert open_rows(corpus.parent / "packed").folder == rows.folder


def test_two_runs_at_once_end_with_one_folder(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    inner: list[PackedRows] = []

    def race(documents: int, tokens: int) -> None:
        if not inner:
            inner.append(prepare(corpus, tokenizer))

    assert prepare(corpus, tokenizer, progress=race).folder == inner[0].folder
    assert folders(corpus) == [inner[0].folder.name]


def test_a_file_that_grows_meanwhile_is_refused(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def grow(documents: int, tokens: int) -> None:
        with corpus.open("a") as file:
            file.write('{"text": "more"}\n')

    with pytest.raises(RopewalkError, match="changed while it was being packed"):
        prepare(corpus, tokenizer, progress=grow)
    assert folders(corpus) == []


def test_a_full_disk_is_told_by_path(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RopewalkError, match=r"^cannot write .*: File too large$"):
            prepare(corpus, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folders(corpus) == []


def test_impossible_places_and_corpora_are_refused(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=r"cannot write .*corpus\.jsonl"):
        prepare(corpus, tokenizer, cache_dir=corpus / "below")
    with pytest.raises(RopewalkError, match="inside the source"):
        prepare(tmp_path, tokenizer, cache_dir=tmp_path / "packed")
    with pytest.raises(RopewalkError, match=r"not one row is full: .* and a row takes 1048576"):
        prepare(corpus, tokenizer, PackingSettings(context=1 << 20))
    prepare(corpus, tokenizer)
    with pytest.raises(RopewalkError, match="packed already"):
        prepare(tmp_path / "packed", tokenizer, cache_dir=tmp_path / "elsewhere")


def test_damaged_folders_are_told(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = prepare(corpus, tokenizer)
    table, path = rows.folder / "rows-00000.arrow", rows.folder / "manifest.json"
    content, manifest = table.read_bytes(), json.loads(path.read_text())
    del rows
    for damaged in (content[: len(content) // 2], content[:10], b""):
        table.unlink()
        table.write_bytes(damaged)
        with pytest.raises(RopewalkError, match=r"rows-00000\.arrow has \d+ bytes where its manifest says"):
            prepare(corpus, tokenizer)
    table.unlink()
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is missing"):
        prepare(corpus, tokenizer)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    table.write_bytes(flipped)
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is damaged: its digest"):
        open_rows(table.parent, verify=True)
    table.unlink()
    table.write_bytes(content)
    open_rows(table.parent, verify=True)
    for change, message in (
        ({"format_version": 99}, "format version 99"),
        ({"counts": {}}, "is damaged"),
        ({"settings": {"colour": 1}}, "is damaged"),
    ):
        path.write_text(json.dumps(manifest | change))
        with pytest.raises(RopewalkError, match=message):
            open_rows(table.parent)
    with pytest.raises(RopewalkError, match="holds no packed rows"):
        open_rows(tmp_path / "nowhere")


def test_rows_of_another_tokenizer_or_setting_are_refused(
    corpus: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = prepare(corpus, tokenizer)
    open_rows(rows.folder, tokenizer=tokenizer_identity(tokenizer), settings=SETTINGS)
    other = tokenizer_identity(make_tokenizer(bos="<begin>"))
    with pytest.raises(RopewalkError, match=r"packed with another tokenizer .*sha256"):
        open_rows(rows.folder, tokenizer=other)
    with pytest.raises(RopewalkError, match=r"was packed with positions reset, not continuous"):
        open_rows(rows.folder, settings=changed(SETTINGS, positions="continuous"))


def test_packed_statistics_count_what_training_sees(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = prepare(corpus, tokenizer)
    statistics = packed_statistics(rows)
    assert statistics.rows == len(rows)
    assert statistics.total.tokens == len(rows) * (SETTINGS.context - 1)
    assert statistics.documents_per_row == pytest.approx(
        sum(row.layout.num_segments for row in rows) / len(rows)
    )
    assert set(statistics.sources) == {"a", "b"}


def test_nothing_is_left_in_the_cache_of_datasets(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = sorted(cache.rglob("*")) if cache.exists() else []
    folder = tmp_path / "dataset"
    folder.mkdir()
    corpus.rename(folder / "train.jsonl")
    specs = [SourceSpec(path=f"hf:{folder}")]
    rows = Job.of(specs, tokenizer, SETTINGS).prepare(tmp_path / "packed")
    assert Job.of(specs, tokenizer, SETTINGS).prepare(tmp_path / "packed").folder == rows.folder
    assert (sorted(cache.rglob("*")) if cache.exists() else []) == before
    assert capfd.readouterr() == ("", "")


def test_real_stories(shared: Path, tmp_path: Path) -> None:
    specs = [SourceSpec(path=str(shared / "text" / "stories.jsonl"))]
    tokenizer = str(shared / "models" / "stories260k")
    rows = Job.of(
        specs, tokenizer, PackingSettings(context=2048), validation=ValidationSettings(documents=20)
    ).prepare(tmp_path)
    assert len(rows.validation) == 20
    assert {int(row.input_ids[0]) for row in rows} == {1}
    assert all(int((row.input_ids == 1).sum()) == 1 for row in rows)
