"""Documents are drawn by seed, and sources and files take turns, whatever the order of files and lines."""

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ropewalk.data import SourceSpec, TokenisedDocument
from ropewalk.data.read import draw
from ropewalk.data.read.draw import draw_documents, drawn
from ropewalk.errors import RopewalkError


def write(path: Path, texts: list[str], **fields: str) -> SourceSpec:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, **fields}) + "\n" for text in texts))
    return SourceSpec(path=str(path))


def corpus(folder: Path) -> SourceSpec:
    """A folder whose first file is one book of a hundred chapters."""
    write(folder / "a.jsonl", [f"chapter {number}" for number in range(100)])
    write(folder / "b.jsonl", [f"page {number}" for number in range(20)])
    for number in range(20):
        (folder / f"c{number}.txt").write_text(f"note {number}")
    return SourceSpec(path=str(folder))


def kinds(specs: list[SourceSpec], count: int, seed: int = 0) -> Counter[str]:
    return Counter(each.text.split()[0] for each in islice(draw_documents(specs, seed), count))


def test_the_files_of_a_folder_take_turns(tmp_path: Path) -> None:
    spec = corpus(tmp_path / "corpus")
    # Twenty text files are files like any other: each gets a turn before another chapter of the book.
    assert kinds([spec], 22) == {"chapter": 1, "page": 1, "note": 20}
    assert kinds([spec], 42) == {"chapter": 11, "page": 11, "note": 20}
    assert sum(kinds([spec], 1000).values()) == 140
    names = Counter(each.source for each in draw_documents([spec], 0))
    assert names["corpus/a.jsonl"] == 100
    assert names["corpus/c7.txt"] == 1


def test_sources_take_turns_before_their_files_do(tmp_path: Path) -> None:
    many, one = corpus(tmp_path / "corpus"), write(tmp_path / "web.jsonl", [f"web {n}" for n in range(30)])
    assert kinds([many, one], 60)["web"] == 30
    named = SourceSpec(path=many.path, name="books")
    assert {each.source for each in draw_documents([named, one], 0)} == {"books", "web"}


def test_names_in_the_records_are_sources(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    lines = [{"text": f"{name} {n}", "source": name} for name in ("book", "code", "web") for n in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert kinds([SourceSpec(path=str(path))], 30) == {"book": 10, "code": 10, "web": 10}


def test_the_seed_and_the_texts_decide_and_not_the_order(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(200)]
    ordered = write(tmp_path / "one" / "texts.jsonl", texts)
    random.Random(0).shuffle(texts)
    shuffled = write(tmp_path / "two" / "texts.jsonl", texts)
    drawn_texts = [
        [each.text for each in draw_documents([spec], seed)]
        for spec in (ordered, shuffled)
        for seed in (0, 1)
    ]
    assert drawn_texts[0] == drawn_texts[2] != drawn_texts[1] == drawn_texts[3]
    assert sorted(drawn_texts[0]) == sorted(texts)
    # Of 10 documents drawn from 200, 0.5 are expected among the first ten of the file, and more than 5 in 1e-7 cases.
    assert len({*drawn_texts[0][:10]} & {f"text {number}" for number in range(10)}) <= 5


def test_large_sources_are_drawn_in_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = corpus(tmp_path / "corpus")
    whole = [each.text for each in draw_documents([spec], 0)]
    monkeypatch.setattr(draw, "POOL_CHARACTERS", 300)
    monkeypatch.setattr(draw, "OPEN_SPLITS", 2)
    pooled = [each.text for each in draw_documents([spec], 0)]
    assert sorted(pooled) == sorted(whole)
    assert pooled != whole
    # A part of the stream is its beginning, so that more documents can be read later.
    assert [each.text for each in islice(draw_documents([spec], 0), 50)] == pooled[:50]


def test_token_ids_are_drawn_by_their_content() -> None:
    documents = [TokenisedDocument(np.arange(n, n + 5, dtype=np.int32), "ab"[n >= 30]) for n in range(40)]
    found = drawn(documents, 0)
    assert [each.source for each in found[:6]] in (["a", "b"] * 3, ["b", "a"] * 3)
    again = drawn(reversed(documents), 0)
    assert [each.input_ids[0] for each in found] == [each.input_ids[0] for each in again]
    assert [each.input_ids[0] for each in found] != [each.input_ids[0] for each in drawn(documents, 1)]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match="no documents: give at least one file"):
        next(draw_documents([], 0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    good = write(tmp_path / "good.jsonl", ["text"])
    for name, sentence in (
        ("empty", "no documents in .*empty"),
        ("blank.jsonl", r"no documents in .*blank.jsonl \(1 empty documents skipped\)"),
        ("ids.jsonl", "contains token ids, but this command needs text"),
        ("missing", "missing"),
    ):
        with pytest.raises(RopewalkError, match=sentence):
            list(draw_documents([good, SourceSpec(path=str(tmp_path / name))], 0))
