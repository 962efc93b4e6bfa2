"""Document: one text with its source; SourceSpec: where documents come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text as it was read.

    Attributes:
        text: the document, never empty.
        source: the name that mixtures and statistics group by ("arxiv", "python-docs").
        origin: file and line or row, for error messages ("corpus/a.jsonl:17").
    """

    text: str
    source: str
    origin: str


@dataclass(frozen=True)
class SourceSpec:
    """One place that documents come from.

    Attributes:
        path: a file, a folder, ``hf:owner/name[:config][@split]``, or ``embedded[:train|validation|all]``.
        name: the source name of every document; None takes the source field, else the file's or folder's
            stem.
        text_field: the field (JSONL, Parquet, Hugging Face) that holds the text.
        source_field: the field that names the source where a record has it; dots reach into nested records
            (``meta.redpajama_set_name``); None ignores such fields.
    """

    path: str
    name: str | None = None
    text_field: str = "text"
    source_field: str | None = "source"
