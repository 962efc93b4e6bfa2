"""Small files of documents, and what is read from them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from ropewalk.data import ReadingCounts, SourceSpec, read_documents
from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.read.input_splits import source_splits
from ropewalk.data.read.readers import documents_in


def jsonl(texts: list[str], **fields: object) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text, **fields}).encode() + b"\n" for text in texts)


def read(path: object, counts: ReadingCounts | None = None, **fields: object) -> list[Document]:
    return list(read_documents([SourceSpec(path=str(path), **fields)], counts))


def texts_and_tokens(*specs: SourceSpec) -> Iterator[Document | TokenisedDocument]:
    for spec in specs:
        for split in source_splits(spec, math.inf):
            yield from documents_in(split, ReadingCounts())


def texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


def write_parquet(path: Path, columns: dict[str, list], row_group_size: int = 2) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path
