"""Every format gives the same documents; every fault is one sentence with the file and the place."""

import gzip
import sys
from pathlib import Path

import pytest
import zstandard

from ropewalk.data import ReadingCounts, SourceSpec, read_documents
from ropewalk.data.read.documents import Document
from ropewalk.data.read.input_splits import plan_input_splits, refuse_duplicates
from ropewalk.errors import RopewalkError
from tests.data.read.read_cases import jsonl, read, texts, write_parquet
from tests.data.tiny_tokenizer import TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL.gz", "a.jsonl.zst", "a.json", "a.ndjson", "a.parquet"])
def test_every_record_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, jsonl(TEXTS)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]))
    elif name.endswith(".zst"):
        frames = [zstandard.ZstdCompressor().compress(part) for part in (content[:50], content[50:])]
        path.write_bytes(b"".join(frames))
    elif name.endswith(".parquet"):
        write_parquet(path, {"id": [1] * 4, "text": TEXTS})
    else:
        path.write_bytes(content)
    documents = read(path)
    assert texts(documents) == TEXTS
    assert {document.source for document in documents} == {"a"}
    assert len({document.origin for document in documents}) == 4


def test_source_is_the_name_then_the_field_then_the_stem(tmp_path: Path) -> None:
    path = tmp_path / "web.2024.jsonl"
    path.write_bytes(
        jsonl(["one"], meta={"set": "C4"}) + jsonl(["two"], meta={"set": None}) + jsonl(["three"])
    )
    assert [d.source for d in read(path, source_field="meta.set")] == ["C4", "web.2024", "web.2024"]
    assert {d.source for d in read(path, source_field="meta.set", name="mine")} == {"mine"}
    assert {d.source for d in read(path, source_field=None)} == {"web.2024"}
    parquet = write_parquet(tmp_path / "w.parquet", {"body": [{"text": "x"}], "meta": [{"set": "B"}]})
    assert read(parquet, text_field="body.text", source_field="meta.set")[0].source == "B"


def test_blank_documents_are_counted_and_blank_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(["", " \n\t", "real"]) + b"\r\n   \n")
    counts = ReadingCounts()
    assert texts(read(path, counts)) == ["real"]
    assert counts == ReadingCounts(documents=1, empty_documents=2)


def test_sources_follow_each_other_and_files_are_opened_late(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    documents = read_documents(
        [SourceSpec(path=str(tmp_path / "a.txt")), SourceSpec(path=str(tmp_path / "none.txt"))]
    )
    assert next(documents).text == "a"
    with pytest.raises(RopewalkError, match=r"no file or folder .*none\.txt"):
        next(documents)
    with pytest.raises(RopewalkError, match="no file or folder ''"):
        read("")


def test_embedded_corpus_is_wired_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("ropewalk.data.read.embedded")
    module.embedded_documents = lambda split="train": iter([Document(split, "python-docs", "x")])
    monkeypatch.setitem(sys.modules, "ropewalk.data.read.embedded", module)
    assert read("embedded") == [Document("train", "python-docs", "x")]
    assert read("embedded:all", name="mine") == [Document("all", "mine", "x")]
    with pytest.raises(RopewalkError, match="choose one of train, validation, all"):
        read("embedded:test")


def truncated(compressed: bytes) -> bytes:
    return compressed[: len(compressed) * 2 // 3]


NOISE = "".join(chr(33 + (7 * n * n + n) % 90) for n in range(5000))
FAULTS = {
    "broken JSON line": ("a.jsonl", jsonl(["x"]) + b'{"text": "y"\n', r"a\.jsonl:2: broken JSON line"),
    "endless nesting": ("a.jsonl", b"[" * 200_000, r"a\.jsonl:1: broken JSON line"),
    "huge integer": ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", r":1: broken JSON line"),
    "a list": ("a.jsonl", b"[1]\n", "expected one JSON object per line, got a list"),
    "no text field": (
        "a.jsonl",
        b'{"body": "x", "url": 1}',
        "no text field 'text'; the fields are 'body', 'url'",
    ),
    "empty record": ("a.jsonl", b"{}", "no text field 'text'; the record is empty"),
    "null": ("a.jsonl", b'{"text": null}', r":1: the field 'text' must be a string, got null"),
    "number": ("a.jsonl", b'{"text": 3}', "must be a string, got a number"),
    "source list": ("a.jsonl", b'{"text": "x", "source": [{}]}', "'source' must be a name, got a list"),
    "surrogate": ("a.jsonl", b'{"text": "ab\\ud800"}', r"lone surrogate .* at character 2"),
    "not UTF-8 line": ("a.jsonl", jsonl(["x"]) + b"\xff", r"a\.jsonl is not UTF-8: byte 0xff at offset 23"),
    "not UTF-8 text": ("a.txt", b"x" * 9000 + b"\xe9", r"a\.txt is not UTF-8: byte 0xe9 at offset 9000"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), r"not UTF-8: byte 0xff at offset 0"),
    "cut gz": ("a.jsonl.gz", truncated(gzip.compress(jsonl([NOISE]))), "damaged or cut off"),
    "cut zst": ("a.jsonl.zst", truncated(zstandard.compress(jsonl([NOISE]))), "damaged or cut off"),
    "cut second frame": ("a.txt.zst", zstandard.compress(b"x") + zstandard.compress(b"y")[:-1], "cut off"),
    "no gz": ("a.jsonl.gz", b"plain", "damaged or cut off"),
    "no zst": ("a.jsonl.zst", b"plain text", "damaged or cut off"),
    "no parquet": ("a.parquet", b"plain", "cannot be read as Parquet"),
    "suffix": ("a.pdf", b"%PDF", r"unsupported suffix '\.pdf'"),
    "archive": ("a.tar.gz", b"x", r"unsupported suffix '\.tar\.gz'"),
    "no suffix": ("blob", b"\0", "has no suffix and is not UTF-8"),
    "empty file": ("a.jsonl", b"", r"no documents in .*a\.jsonl$"),
    "blank": ("a.txt", b" \n", r"no documents in .*\(1 empty documents skipped\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_one_sentence(tmp_path: Path, fault: str) -> None:
    name, content, message = FAULTS[fault]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RopewalkError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_what_is_given_twice_is_refused(tmp_path: Path) -> None:
    corpus, path = tmp_path / "corpus", tmp_path / "corpus" / "x.jsonl"
    corpus.mkdir()
    path.write_bytes(jsonl(["x"]))
    link, hard = tmp_path / "link.jsonl", tmp_path / "hard.jsonl"
    link.symlink_to(path)
    hard.hardlink_to(path)
    own = r"give each file or dataset once, and set weights \(--weights\) to repeat a source in packed rows"
    for specs, message in (
        ([path, path], rf"x\.jsonl is given twice; {own}"),
        ([corpus, path], rf"x\.jsonl is given twice; {own}"),
        ([path, corpus], rf"x\.jsonl is given twice; {own}"),
        ([path, link], rf"link\.jsonl is given twice \(it is the same file as .*x\.jsonl\); {own}"),
        ([corpus, hard], rf"hard\.jsonl is given twice \(it is the same file as .*x\.jsonl\); {own}"),
        (["hf:a/b", "hf:a/b@train"], rf"hf:a/b@train is given twice; {own}"),
        (["embedded:all", "embedded"], "embedded is given twice"),
        (["embedded:validation", "embedded:all"], "embedded:all is given twice"),
    ):
        with pytest.raises(RopewalkError, match=message):
            plan_input_splits([SourceSpec(path=str(each)) for each in specs])
        with pytest.raises(RopewalkError, match=message):
            list(read_documents([SourceSpec(path=str(each)) for each in specs]))
    refuse_duplicates(
        [SourceSpec(path="hf:a/b"), SourceSpec(path="hf:a/b@test"), SourceSpec(path="hf:a/b:c")]
    )
    refuse_duplicates([SourceSpec(path="embedded"), SourceSpec(path="embedded:validation")])
    assert (
        len(plan_input_splits([SourceSpec(path=str(path)), SourceSpec(path=str(path), text_field="n")])) == 2
    )


def test_files_without_a_document_may_be_there_twice(tmp_path: Path) -> None:
    (tmp_path / "lib.so.1").write_bytes(b"\x7fELF\0")
    (tmp_path / "lib.so").symlink_to(tmp_path / "lib.so.1")
    (tmp_path / "__init__.py").write_bytes(b"")
    (tmp_path / "empty.py").hardlink_to(tmp_path / "__init__.py")
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    (tmp_path / "b.tar.gz").hardlink_to(tmp_path / "a.tar.gz")
    refuse_duplicates([SourceSpec(path=str(tmp_path))])
    (tmp_path / "notes").write_bytes(b"text")
    (tmp_path / "same").symlink_to(tmp_path / "notes")
    with pytest.raises(RopewalkError, match=r"same is given twice \(it is the same file as .*notes\)"):
        refuse_duplicates([SourceSpec(path=str(tmp_path))])
