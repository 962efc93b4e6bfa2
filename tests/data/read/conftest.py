"""A folder with every format that a folder may hold."""

import gzip
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ropewalk.data.read import input_splits as module
from tests.data.read.split_cases import lines


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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPLIT_BYTES", 100)
