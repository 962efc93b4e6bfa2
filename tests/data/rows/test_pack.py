"""Rows on disk are the rows that packing made; they are found again for the same inputs and no others."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

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
)
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest
from tests.data.cases import Job, changed
from tests.data.rows.rows_cases import SETTINGS, prepare
from tests.data.tiny_tokenizer import make_tokenizer


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
    with pytest.raises(RopewalkError, match=r"contains no packed rows"):
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

    with pytest.raises(RopewalkError, match="changed during packing"):
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
    with pytest.raises(
        RopewalkError, match=r"the documents do not fill one row: .* but a row takes 1048576 tokens"
    ):
        prepare(corpus, tokenizer, PackingSettings(context=1 << 20))
    skipping = PackingSettings(context=4, packing="best_fit", long_documents="skip")
    with pytest.raises(
        RopewalkError, match=r"\(\d+ longer documents were skipped\); choose longer rows, or set"
    ):
        prepare(corpus, tokenizer, skipping)
    with pytest.raises(RopewalkError, match=r"; give more documents, or hold out fewer .* \(now \d+\)$"):
        prepare(corpus, tokenizer, validation=ValidationSettings(documents=1000))
    prepare(corpus, tokenizer)
    with pytest.raises(RopewalkError, match="contains packed rows; give the original documents"):
        prepare(tmp_path / "packed", tokenizer, cache_dir=tmp_path / "elsewhere")


def test_packed_statistics_count_what_training_sees(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = prepare(corpus, tokenizer)
    statistics = packed_statistics(rows)
    assert statistics.rows == len(rows)
    assert statistics.total.tokens == len(rows) * (SETTINGS.context - 1)
    assert statistics.documents_per_row == pytest.approx(
        sum(len(row.layout.segment_documents) for row in rows) / len(rows)
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


@pytest.mark.parametrize("store", [False, True])
def test_urls_are_refused_before_anything_is_written(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    monkeypatch.chdir(corpus.parent)
    before = sorted(corpus.parent.rglob("*"))
    url, rows = Path("s3://bucket/rows"), Path("rows")
    job = Job.of([SourceSpec(path=str(corpus))], tokenizer, SETTINGS)
    with pytest.raises(
        RopewalkError, match=r"^s3://bucket/rows is a URL, but rows and token shards .*; give a"
    ):
        job.pack(rows if store else url, tokens=url if store else None)
    assert sorted(corpus.parent.rglob("*")) == before


def test_chosen_tokens_are_in_the_rows(corpus: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<anchor>"]})
    end, anchor = tokenizer.convert_tokens_to_ids(["<end>", "<anchor>"])
    documents = list(tokenise(read_documents([SourceSpec(path=str(corpus))]), tokenizer))
    by_hand = [token for d in documents for token in [*d.input_ids.tolist(), end]]
    rows = prepare(corpus, tokenizer, changed(SETTINGS, eos_token="<end>", anchor_token="<anchor>"))
    room = SETTINGS.context - 1
    assert [row.input_ids.tolist() for row in rows] == [
        [anchor, *by_hand[index * room : (index + 1) * room]] for index in range(len(by_hand) // room)
    ]
    # Every document begins with the token that BOS is; the first token of a row is no anchor then.
    policies = PackingSettings(context=64, pattern="full", bos_token="<anchor>", eos_token="<end>")
    by_hand = [token for d in documents for token in [anchor, *d.input_ids.tolist(), end]]
    rows = prepare(corpus, tokenizer, policies)
    assert [token for row in rows for token in row.input_ids.tolist()] == by_hand[: 64 * len(rows)]
    (first, *_) = prepare(corpus, tokenizer, changed(policies, bos="row"))
    assert first.input_ids[0] == anchor != tokenizer.bos_token_id


def test_rows_without_chosen_tokens_have_the_digest_of_earlier_versions(
    corpus: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    manifest = prepare(corpus, tokenizer).manifest
    keys = ("format_version", "inputs", "settings", "mixing", "specs", "tokenizer", "validation")
    depends = {key: manifest[key] for key in keys}
    # The name and path of the tokenizer are no part of it.
    depends["tokenizer"] = {
        name: each for name, each in depends["tokenizer"].items() if name != "name_or_path"
    }
    depends["settings"] = {
        **{"bos": "auto", "eos": True, "tag": None, "long_documents": "split", "packing": "sequential"},
        **{"remainder": "drop", "interleave": None, "context": 64, "pattern": "anchor", "positions": "reset"},
    }
    assert manifest["digest"] == digest(depends)[:32]
    named = prepare(corpus, tokenizer, changed(SETTINGS, eos_token=tokenizer.eos_token))
    assert named.manifest["digest"] != manifest["digest"]
    assert [row.input_ids.tolist() for row in named] == [
        row.input_ids.tolist() for row in prepare(corpus, tokenizer)
    ]


def test_rows_that_the_disk_has_no_room_for_are_refused_before_they_are_written(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 4 * SETTINGS.context * len(prepare(corpus, tokenizer))
    free = [needed - 1]
    monkeypatch.setattr("ropewalk.io.files.shutil.disk_usage", lambda place: SimpleNamespace(free=free[0]))
    elsewhere = corpus.parent / "elsewhere"
    with pytest.raises(RopewalkError, match=r"the rows that are not written yet take .* MB, but the disk of"):
        prepare(corpus, tokenizer, cache_dir=elsewhere)
    assert not list(elsewhere.rglob("rows-*"))
    free[0] = needed
    assert len(prepare(corpus, tokenizer, cache_dir=elsewhere)) * SETTINGS.context * 4 == needed
