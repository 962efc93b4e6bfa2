"""Folders of several formats, to be cut into input splits."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ropewalk.data.read import input_splits as module
from ropewalk.data.read.documents import Document
from ropewalk.data.read.input_splits import InputSplit, read_input_split


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_BYTES", 100)


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def texts(split: InputSplit) -> list[str]:
    return [d.text for r in read_input_split(split) for d in r.documents if isinstance(d, Document)]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with every kind of file, some larger than 100 bytes."""
    corpus = tmp_path / "mixed"
    for name, content in {
        "a.txt": b"first",
        "b.md": b"second" * 20,
        "c.jsonl": lines([f"row {n}" for n in range(20)]) + b"\n" + lines(["last"])[:-1],
        "d.txt": b" ",
        "e.bin": b"\0\1",
        "f.json": b'{"size": 1}',
        "g.json": lines(["json row 1", "json row 2"]),
        "h.json": lines([f"long json row {n}" for n in range(12)]),
        "i.jsonl.gz": gzip.compress(lines([f"packed {n}" for n in range(30)])),
        "j.tar.gz": b"never opened",
        "l.jsonl": b'{"input_ids": [1, 2, 3], "source": [{"start": 0, "end": 1}, {"start": 1, "end": 3}]}\n',
        "sub/m.py": b"print()",
        "sub/n.txt": b"end",
    }.items():
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_bytes(content)
    rows = pyarrow.table({"text": [f"table {n}" for n in range(13)], "n": list(range(13))})
    pyarrow.parquet.write_table(rows, corpus / "k.parquet", row_group_size=3)
    return corpus
