"""Counts by split are those of one stream, whatever the number of processes."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data.read import input_splits
from ropewalk.data.settings import SourceSpec
from ropewalk.data.statistics import DocumentCounts
from ropewalk.data.tokens import corpus
from ropewalk.data.tokens.count import count_splits
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError
from tests.data.read.read_cases import texts_and_tokens


@pytest.mark.parametrize("workers", [1, 2])
def test_counts_are_those_of_one_stream(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(input_splits, "SPLIT_BYTES", 1500)
    monkeypatch.setattr(corpus, "PROCESS_BYTES", 1)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", "two", "one")]
    (corpus_folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in ids))
    specs = [SourceSpec(path=str(corpus_folder)), SourceSpec(path="embedded:validation", max_documents=3)]
    calls: list[tuple[int, int]] = []
    counted = count_splits(specs, tokenizer, workers, lambda *totals: calls.append(totals))
    # A stream of its own, read undivided.
    stream = tokenise(texts_and_tokens(*specs), tokenizer)
    assert counted.statistics(64) == DocumentCounts(stream).statistics(64)
    assert list(counted.sources) == ["a", "b", "corpus", "python-source"]
    assert len(calls) > 10
    assert calls == sorted(calls)
    assert calls[-1] == (166, sum(counted.lengths))


def test_a_source_without_documents_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text(" ")
    (tmp_path / "blank" / "b.bin").write_bytes(b"\0")
    (tmp_path / "blank" / ".hidden").touch()
    (tmp_path / "good.txt").write_text("text")
    specs = [SourceSpec(path=str(tmp_path / name)) for name in ("good.txt", "blank")]
    message = (
        r"no documents in .*blank \(1 empty documents, 1 binary files, 1 hidden files or folders skipped\)"
    )
    with pytest.raises(RopewalkError, match=message):
        count_splits(specs, tokenizer, 1, lambda *_: None)


def test_an_error_of_a_split_is_the_command_s(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\nbroken\n')
    with pytest.raises(RopewalkError, match=r"bad\.jsonl:2"):
        count_splits([SourceSpec(path=str(tmp_path / "bad.jsonl"))], tokenizer, 1, lambda *_: None)
