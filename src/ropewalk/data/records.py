"""Records with named fields to documents: JSON lines, Parquet, Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropewalk.data.documents import Document, SourceSpec
from ropewalk.data.files import decode, open_bytes
from ropewalk.errors import RopewalkError

_MISSING = object()
_PARQUET_BATCH = 256


def document_from_record(record: Mapping[str, Any], spec: SourceSpec, stem: str, origin: str) -> Document:
    """The document in one record; its text may be blank.

    Args:
        record: field names to values.
        spec: which fields to read.
        stem: the source name where neither the spec nor the record gives one.
        origin: file and line or row.

    Raises:
        RopewalkError: if the text field is missing (the message names those there are) or not a string, if
            the text holds a character that no UTF-8 can, or if the source field is not a name.
    """
    text = _field(record, spec.text_field)
    if text is _MISSING:
        raise RopewalkError(
            f"{origin}: no text field {spec.text_field!r}; the fields are {', '.join(map(str, record))}"
            if record
            else f"{origin}: no text field {spec.text_field!r}; the record is empty"
        )
    if not isinstance(text, str):
        raise RopewalkError(f"{origin}: the field {spec.text_field!r} must be a string, got {_kind(text)}")
    check_characters(text, origin)
    return Document(text, spec.name or _source(record, spec, origin) or stem, origin)


def check_characters(text: str, origin: str) -> None:
    r"""Refuse a lone surrogate (JSON's ``"\ud800"``): no tokenizer takes it.

    Raises:
        RopewalkError: with the origin and the character's position.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RopewalkError(
            f"{origin}: the text holds a lone surrogate {text[error.start]!r} at character {error.start}"
        ) from error


def read_json_lines(path: Path, spec: SourceSpec, stem: str) -> Iterator[Document]:
    """Documents of a JSON lines file, plain or compressed; blank lines are passed over."""
    with open_bytes(path) as stream:
        offset = 0
        for number, line in enumerate(stream, 1):
            text = decode(line, path, offset)
            offset += len(line)
            if not text or text.isspace():
                continue
            origin = f"{path}:{number}"
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                # ValueError, not only JSONDecodeError: an integer of 5000 digits raises the former.
                raise RopewalkError(f"{origin}: broken JSON line: {error}") from error
            if not isinstance(record, dict):
                raise RopewalkError(f"{origin}: expected one JSON object a line, got {_kind(record)}")
            yield document_from_record(record, spec, stem, origin)


def first_line_is_record(path: Path, spec: SourceSpec) -> bool:
    """Whether a ``.json`` file is really JSON lines: its first line is an object with the text field."""
    with open_bytes(path) as stream:
        line = stream.readline()
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(_field(record, spec.text_field), str)


def read_parquet(path: Path, spec: SourceSpec, stem: str) -> Iterator[Document]:
    """Documents of a Parquet file, a few hundred rows of one row group in memory at a time."""
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            text = _column(spec.text_field, names)
            if text is None:
                raise RopewalkError(
                    f"{path}: no text field {spec.text_field!r}; the fields are {', '.join(names)}"
                )
            source = None if spec.name or not spec.source_field else _column(spec.source_field, names)
            wanted = sorted({text, source or text})
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_PARQUET_BATCH, row_groups=[group], columns=wanted):
                    for record in batch.to_pylist():
                        yield document_from_record(record, spec, stem, f"{path}:row {row}")
                        row += 1
    except RopewalkError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"{path} cannot be read as Parquet near row {row}: {error}") from error


def read_hugging_face(
    repository: str, spec: SourceSpec, config: str | None, split: str
) -> Iterator[Document]:
    """Documents of a Hugging Face dataset, streamed; no code of the dataset's repository is run.

    Args:
        repository: ``owner/name``, or a local folder that ``datasets`` can load.
        spec: which fields to read.
        config: the dataset's configuration, where it has several.
        split: its split.

    Raises:
        RopewalkError: if the dataset, configuration or split is not there or the hub cannot be reached.
    """
    import datasets

    stem = repository.rstrip("/").rsplit("/", 1)[-1]
    # Streaming stores no data, but datasets leaves lock files where its cache would be.
    with TemporaryDirectory(prefix="ropewalk-") as cache:
        with _hugging_face_failures(f"cannot load {spec.path}"):
            stream = datasets.load_dataset(repository, config, split=split, streaming=True, cache_dir=cache)
            records = iter(stream)
        row = 0
        while True:
            with _hugging_face_failures(f"{spec.path}: reading failed at row {row}"):
                record = next(records, None)
            if record is None:
                return
            yield document_from_record(record, spec, stem, f"{spec.path}:row {row}")
            row += 1


def hugging_face_identity(repository: str, config: str | None) -> str:
    """A digest of a dataset's files and configuration, as ``datasets`` keys its own cache.

    Raises:
        RopewalkError: as read_hugging_face.
    """
    import datasets

    with (
        TemporaryDirectory(prefix="ropewalk-") as cache,
        _hugging_face_failures(f"cannot load hf:{repository}"),
    ):
        return str(datasets.load_dataset_builder(repository, config, cache_dir=cache).hash)


@contextmanager
def _hugging_face_failures(what: str) -> Iterator[None]:
    import datasets
    import pyarrow

    failures = (
        datasets.exceptions.DatasetsError,
        OSError,
        ValueError,
        RuntimeError,
        pyarrow.ArrowException,
    )
    try:
        yield
    except failures as error:
        lines = str(error).strip().splitlines()
        raise RopewalkError(f"{what}: {lines[0] if lines else type(error).__name__}") from error


def _field(record: Mapping[str, Any], name: str) -> Any:
    """A field by its name, or by a dotted path into nested records, or _MISSING."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _source(record: Mapping[str, Any], spec: SourceSpec, origin: str) -> str | None:
    value = None if spec.source_field is None else _field(record, spec.source_field)
    if value is None or value is _MISSING:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RopewalkError(
            f"{origin}: the source field {spec.source_field!r} must be a name, got {_kind(value)}; "
            "name another source field, or none"
        )
    return str(value).strip()


def _column(field: str, names: list[str]) -> str | None:
    """The column to read for a field: the top-level one, so that nested records come back nested."""
    return next((name for name in (field, field.split(".")[0]) if name in names), None)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)
