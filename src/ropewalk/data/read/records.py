"""Read documents from records with named fields, in JSON Lines, Parquet and Arrow files."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.read.documents import Document, Record, TokenisedDocument
from ropewalk.data.read.files import (
    ARROW,
    LONGEST_DOCUMENT,
    SNIFFED_BYTES,
    decode,
    open_bytes,
    split_suffix,
    too_long,
)
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from ropewalk.io.files import json_fault, parse_json

LOSS_SPANS = "loss_spans"
"""Usual name of the field that holds spans of loss; where it is not set, training refuses a record with it."""

_MISSING = object()
_ROLE = re.compile("[a-z][a-z_]{0,31}")
_BLANK = Record(())
_PIECE = 1 << 20
_SNIFFED_LINES = 8
_TABLE_ROWS = 256
_TABLE_BYTES = 1 << 24
_ARROW_FILE = b"ARROW1"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"


def _no_text_field(origin: str | Path, spec: SourceSpec, names: Iterable[str]) -> NoTextFieldError:
    # Quoted by repr, because a damaged schema may contain line breaks, but an error message must be one line.
    fields = ", ".join(map(repr, names))
    rest = f"the fields are {fields}; set text_field (--text-field) to the field that holds the text"
    return NoTextFieldError(
        f"{origin}: no text field {spec.text_field!r}; {rest if fields else 'the record is empty'}"
    )


class NoTextFieldError(RopewalkError):
    """A record or table without the text field. The message lists the fields that there are."""


def record_documents(
    record: Mapping[str, Any], spec: SourceSpec, stem: str, origin: str, padded: bool = False
) -> tuple[Document | TokenisedDocument, ...]:
    """Extract the documents of one record.

    A record with the text field is one text, whatever its other fields. A record without it but with ``input_ids`` is
    tokenised: one document, or one for each span of a list of boundaries in ``source`` or the source field (see
    :func:`token_documents`).

    Args:
        record: values by field name.
        spec: the fields to read.
        stem: source name if neither the spec nor the record gives one.
        origin: file and line or row, for messages.
        padded: whether the record is a row of a table, in which objects have a null for each field that only other
            objects of the column have.

    Returns:
        At least one document; a text may be blank, and a tokenised document empty.

    Raises:
        RopewalkError: if there is neither a text nor ``input_ids`` (the message lists the existing fields), the text is
            not a string, is too long or contains a lone surrogate, the source field is not a name, the spans of loss
            are not ranges of the text, or the ids or their boundaries are invalid.
    """
    text = _field(record, spec.text_field)
    # A table has a null where only its other records have a text.
    if text is _MISSING or (text is None and spec.messages_field):
        if spec.messages_field and _field(record, spec.messages_field) is not _MISSING:
            content = _conversation(record, spec.messages_field, origin, padded)
            source = spec.name or _source(record, spec, origin) or stem
            fields = [_field(record, spec.messages_field), record.get("tools")]
            lost = _possible_nulls(fields) if padded else 0
            return (Document(content, source, origin, chat=True, dropped_nulls=lost),)
        if INPUT_IDS in record:
            return _token_documents(record, spec, stem, origin)
        if "messages" in record and spec.messages_field is None:
            raise RopewalkError(
                f"{origin}: the record has no text field {spec.text_field!r}, but has a field messages; "
                "set messages_field (--messages-field) to messages to train on chats"
            )
        raise _no_text_field(origin, spec, record)
    if not isinstance(text, str):
        raise RopewalkError(
            f"{origin}: the field {spec.text_field!r} must be a string, got {kind_name(text)}"
        )
    if len(text) > LONGEST_DOCUMENT:
        raise too_long(origin)
    check_characters(text, origin)
    source = spec.name or _source(record, spec, origin) or stem
    spans = _loss_spans(record, spec, len(text), origin)
    unread = spec.loss_spans_field is None and record.get(LOSS_SPANS) is not None
    return (Document(text, source, origin, spans=spans, unread_spans=unread),)


def _loss_spans(
    record: Mapping[str, Any], spec: SourceSpec, characters: int, origin: str
) -> tuple[tuple[int, int], ...] | None:
    """The spans of a text that count in the loss; None if all of it does.

    Raises:
        RopewalkError: if they are not an ascending list of ranges within the text.
    """
    if spec.loss_spans_field is None:
        return None
    field = spec.loss_spans_field
    spans = _field(record, field)
    if spans is _MISSING or spans is None:
        return None
    if not isinstance(spans, list) or not spans:
        raise RopewalkError(
            f"{origin}: the field {field!r} must be a list of spans [start, end], got "
            f"{'an empty list' if spans == [] else kind_name(spans)}; omit it in a record to train on the whole text"
        )
    before = 0
    for span in spans:
        pair = isinstance(span, list) and len(span) == 2
        if not pair or not all(isinstance(each, int) and not isinstance(each, bool) for each in span):
            raise RopewalkError(
                f"{origin}: each span in {field!r} must be two numbers [start, end] of characters, got {span!r}"
            )
        if not before <= span[0] < span[1] <= characters:
            raise RopewalkError(
                f"{origin}: the spans in {field!r} must ascend without overlap within the {characters} characters of "
                f"the text, each with its start before its end, got {span} after character {before}"
            )
        before = span[1]
    return None if spec.train_around_spans else tuple((start, end) for start, end in spans)


def _conversation(record: Mapping[str, Any], field: str, origin: str, padded: bool) -> str:
    """The messages and tools of a record as JSON.

    Raises:
        RopewalkError: if a message is not an object with a role and a text, or none is the assistant's.
    """
    messages, tools = _field(record, field), record.get("tools")
    if padded:
        messages, tools = _without_nulls(messages), _without_nulls(tools)
    if not isinstance(messages, list) or not messages:
        raise RopewalkError(
            f"{origin}: the field {field!r} must be a list of messages, got "
            f"{'an empty list' if messages == [] else kind_name(messages)}"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise RopewalkError(f"{origin}: message {number} must be an object, got {kind_name(message)}")
        # A null field of a message is an absent one; what is null in a tool call is the author's.
        message = {key: value for key, value in message.items() if value is not None}
        messages[number - 1] = message
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise RopewalkError(
                f"{origin}: message {number} must have a role such as user or assistant, got {role!r}"
            )
        # Messages that only call a tool often have no content.
        content = message.get("content", "" if "tool_calls" in message else None)
        if not isinstance(content, str):
            raise RopewalkError(
                f"{origin}: the content of message {number} must be a string, got {kind_name(content)}"
            )
        message["content"] = content
    if all(message["role"] != "assistant" for message in messages):
        raise RopewalkError(f"{origin}: the conversation has no message with the role assistant to train on")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise RopewalkError(f"{origin}: the field 'tools' must be a list of objects, got {kind_name(tools)}")
    try:
        # Not as escapes, so that check_characters sees lone surrogates.
        text = json.dumps({"messages": messages, "tools": tools}, ensure_ascii=False)
    except TypeError as error:
        raise RopewalkError(f"{origin}: the messages are not JSON values: {error}") from error
    check_characters(text, origin)
    return text


def _without_nulls(value: Any) -> Any:
    """A copy without null entries of objects: Parquet writes a null for each field that only other messages have."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _possible_nulls(value: Any, inside: bool = False) -> int:
    """Number of null entries that may be data: in the arguments of a tool call, or a schema's default or const."""
    if isinstance(value, Mapping):
        return sum(
            inside or key in ("default", "const")
            if each is None
            else _possible_nulls(each, inside or key == "arguments")
            for key, each in value.items()
        )
    return sum(_possible_nulls(each, inside) for each in value) if isinstance(value, list) else 0


def check_characters(text: str, origin: str) -> None:
    r"""Raise for a lone surrogate (JSON's ``"\ud800"``), which no tokenizer accepts.

    Raises:
        RopewalkError: with the origin and the position of the character.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RopewalkError(
            f"{origin}: the text contains a lone surrogate {text[error.start]!r} at character {error.start}"
        ) from error


def read_json_lines(
    path: Path, spec: SourceSpec, stem: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the records of a JSON lines file, plain or compressed; a blank line is a record without documents.

    Args:
        path: the file.
        spec: the fields to read.
        stem: source name if neither the spec nor a record gives one.
        start, stop: byte range of an uncompressed file; lines that begin within it are read. A stop of None is the end.

    Raises:
        RopewalkError: for an invalid line, with file and line number; if the file ends before ``start`` or ``stop``.
    """
    with open_bytes(path) as stream:
        offset = _first_line(stream, path, start, stop) if start else 0
        begin, number = offset, 0
        while stop is None or offset < stop:
            line = stream.readline(LONGEST_DOCUMENT + 1)
            if not line:
                break
            number += 1
            # Parsing is deferred until the origin of the record is known, which errors name.
            record = partial(_line_record, line, path, spec, stem, offset)
            yield _located_record(record, path, offset, number, begin)
            offset += len(line)
        if stop is not None and offset < stop:
            raise RopewalkError(
                f"{path} changed while it was read: it ends at byte {offset}, but was longer before; run again"
            )


def read_table(
    path: Path, spec: SourceSpec, stem: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file as records, with a few hundred rows in memory at a time.

    Args:
        path: the file; one whose name ends in ``.arrow`` is an Arrow file, as datasets writes them (a stream) or in
            Arrow's file format, which is mapped into memory.
        spec: the fields to read.
        stem: source name if neither the spec nor a record gives one.
        start, stop: range of row groups of a Parquet file; a stop of None is the end.

    Raises:
        RopewalkError: if the file is damaged or cut off, has neither the text field nor ``input_ids``, or has too few
            row groups.
    """
    import pyarrow

    arrow, row = split_suffix(path)[0] in ARROW, 0
    batches = _arrow_batches(path, spec) if arrow else _parquet_batches(path, spec, start, stop)
    try:
        for row, batch in batches:
            for record in _rows(batch):
                yield Record(record_documents(record, spec, stem, f"{path}:row {row}", padded=True))
                row += 1
    except RopewalkError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RopewalkError(
            f"{path} cannot be read as {'Arrow' if arrow else 'Parquet'} near row {row}: {_first_message_line(error)}"
        ) from error


def _parquet_batches(path: Path, spec: SourceSpec, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    """Yield the rows of some row groups in batches, each with the number of its first row."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = _columns(path, spec, file.schema_arrow.names)
        if file.num_row_groups < (start if stop is None else stop):
            raise RopewalkError(
                f"{path} changed while it was read: it has {file.num_row_groups} row groups, but had more before; "
                "run again"
            )
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        rows = [group.num_rows for group in groups]
        if sum(rows) != file.metadata.num_rows:
            raise RopewalkError(
                f"{path} is damaged: its footer states {file.metadata.num_rows} rows, but its row groups have "
                f"{sum(rows)}"
            )
        row = sum(rows[:start])
        for number in range(len(rows))[start:stop]:
            end = row + rows[number]
            # Limited in bytes too: a row may be a whole book.
            row_bytes = groups[number].total_byte_size // max(rows[number], 1)
            most = max(1, min(_TABLE_ROWS, _TABLE_BYTES // max(row_bytes, 1)))
            for batch in (
                file.iter_batches(most, row_groups=[number], columns=columns) if rows[number] else ()
            ):
                batch.validate(full=True)
                yield row, batch
                row += len(batch)
            if row != end:
                raise RopewalkError(
                    f"{path} is damaged: row group {number} ends at row {row}, but the footer says {end}"
                )


def _arrow_batches(path: Path, spec: SourceSpec) -> Iterator[tuple[int, Any]]:
    """Yield the rows of an Arrow file in batches, each with the number of its first row."""
    import pyarrow

    row = 0
    with pyarrow.memory_map(str(path)) as file:
        for batch in _stored_batches(file, path):
            batch = batch.select(_columns(path, spec, batch.schema.names))
            # Arrow follows offsets without a check: a wrong one would read other memory, or end the process.
            batch.validate(full=True)
            row_bytes = max(1, batch.nbytes // max(batch.num_rows, 1))
            step = max(1, min(_TABLE_ROWS, _TABLE_BYTES // row_bytes))
            for start in range(0, batch.num_rows, step):
                yield row + start, batch.slice(start, step)
            row += batch.num_rows


def _stored_batches(file: Any, path: Path) -> Iterator[Any]:
    import pyarrow.ipc

    size = file.size()
    if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
        file.seek(0)
        with pyarrow.ipc.open_file(file) as table:
            yield from (table.get_batch(number) for number in range(table.num_record_batches))
        return
    # Without this, a stream that was cut between two batches would read as a shorter one.
    file.seek(max(0, size - len(_ARROW_END)))
    if file.read() != _ARROW_END:
        raise RopewalkError(f"{path} is cut off: its {size} bytes lack the marker that ends an Arrow stream")
    file.seek(0)
    with pyarrow.ipc.open_stream(file) as stream:
        yield from stream


def row_group_sizes(path: Path) -> list[int]:
    """Compressed size in bytes of each row group of a Parquet file; reads only the file's footer.

    Raises:
        RopewalkError: if the file is missing or not a Parquet file.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            return [
                sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                for group in groups
            ]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"{path} cannot be read as Parquet: {_first_message_line(error)}") from error


def holds_json_lines(path: Path, spec: SourceSpec) -> bool:
    """Whether a file under the name of another kind contains JSON lines, according to its first lines.

    Either the first is an object with a text, messages or token ids; a single line with another object may as well be a
    configuration file. Or there are several, all begin like objects, and one of them is an object.

    Raises:
        RopewalkError: if the file is a JSON array of such objects.
    """
    try:
        with open_bytes(path) as stream:
            lines = list(_lines_of_json(stream))
    except RopewalkError:
        # Reading it as what its name says reports the damage; a compressed file of unknown content is passed over.
        return False
    if not lines:
        return False
    first, *others = map(_parsed, lines)
    if isinstance(first, list) and first and all(_is_record(value, spec) for value in first):
        raise RopewalkError(
            f"{path} is a JSON array of {len(first)} records; write one record per line, for example with jq -c '.[]'"
        )
    if _is_record(first, spec):
        return True
    alike = all(line.startswith(b"{") for line in lines)
    return alike and bool(others) and any(isinstance(record, dict) for record in (first, *others))


def _lines_of_json(stream: BinaryIO) -> Iterator[bytes]:
    """The first lines of JSON lines that are not blank, or a JSON array as one line; none of another text."""
    read = found = 0
    while found < _SNIFFED_LINES and read < _PIECE and (line := stream.readline(SNIFFED_BYTES)):
        start = line.removeprefix(codecs.BOM_UTF8).lstrip()
        if not found and start and not start.startswith((b"{", b"[")):
            return
        # The rest of a line is read only if it may be JSON, and of an array all lines.
        array = not found and start.startswith(b"[")
        if array or not line.endswith(b"\n"):
            start += stream.read(LONGEST_DOCUMENT) if array else stream.readline(LONGEST_DOCUMENT)
        read += len(start)
        if start := start.strip():
            found += 1
            yield start


def _parsed(content: bytes) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return parse_json(content)
    except json.JSONDecodeError:
        return None


def _is_record(record: Any, spec: SourceSpec) -> bool:
    """Whether a JSON value is an object with a text, messages or token ids."""
    if not isinstance(record, dict):
        return False
    text = _field(record, spec.text_field)
    if spec.messages_field and isinstance(_field(record, spec.messages_field), list):
        return True
    return isinstance(text, str) or (text is _MISSING and isinstance(record.get(INPUT_IDS), list))


def _located_record(
    record: Callable[[str], Record], path: Path, offset: int, number: int, begin: int
) -> Record:
    """Read the record in a line. Within a byte range, the line number is counted only for an error message.

    Args:
        record: reads the line, given its position for messages.
        path: the file.
        offset: offset of the line in bytes.
        number: number of the line in the range, from 1.
        begin: offset of the range's first line in bytes.
    """
    if not begin:
        return record(f"{path}:{number}")
    try:
        return record(f"{path}:byte {offset}")
    except RopewalkError:
        return record(f"{path}:{_count_lines(path, begin) + number}")


def _line_record(line: bytes, path: Path, spec: SourceSpec, stem: str, offset: int, origin: str) -> Record:
    if len(line) > LONGEST_DOCUMENT:
        raise too_long(origin)
    text = decode(line, path, offset)
    if not text or text.isspace():
        return _BLANK
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError, not only JSONDecodeError: an integer of 5000 digits raises the former.
        hint = (
            " (the line contains a NUL character, as in UTF-16; convert the file to UTF-8)"
            if "\0" in text
            else ""
        )
        raise RopewalkError(f"{origin}: broken JSON line: {json_fault(error)}{hint}") from error
    if not isinstance(record, dict):
        raise RopewalkError(f"{origin}: expected one JSON object per line, got {kind_name(record)}")
    return Record(record_documents(record, spec, stem, origin))


def _first_line(stream: BinaryIO, path: Path, start: int, stop: int | None) -> int:
    """Seek to the first line that begins at ``start`` or later; return its offset, which may be past ``stop``."""
    size = os.fstat(stream.fileno()).st_size
    if size <= start:
        raise RopewalkError(
            f"{path} changed while it was read: it ends at byte {size}, but was longer before; run again"
        )
    # Start one byte early: if that byte ends a line, the next line begins at start itself.
    offset = stream.seek(start - 1)
    while stop is None or offset < stop:
        # In pieces, because a single line may be gigabytes long and is only skipped here.
        piece = stream.readline(_PIECE)
        offset += len(piece)
        if not piece or piece.endswith(b"\n"):
            break
    return offset


def _count_lines(path: Path, stop: int) -> int:
    """Number of lines that end before byte ``stop``."""
    lines = 0
    with open_bytes(path) as stream:
        while stop > 0 and (piece := stream.read(min(_PIECE, stop))):
            lines += piece.count(b"\n")
            stop -= len(piece)
    return lines


def _columns(path: Path, spec: SourceSpec, names: list[str]) -> list[str]:
    """Columns of a table that its documents need."""
    text = _column(spec.text_field, names)
    messages = _column(spec.messages_field, names) if spec.messages_field else None
    if text is None and messages is None and INPUT_IDS not in names:
        raise _no_text_field(path, spec, names)
    # Other columns are not read: tables store columns apart, and unread ones cost nothing.
    wanted = {text or messages or INPUT_IDS}
    if messages:
        wanted |= {messages} | ({"tools"} & set(names))
    # A text with a name from the spec needs no source; for token ids the field may hold the boundaries.
    if spec.source_field and not (spec.name and text):
        wanted.add(_column(spec.source_field, names) or "")
    if text is None and SPANS in names:
        wanted.add(SPANS)
    if text and spec.loss_spans_field:
        wanted.add(_column(spec.loss_spans_field, names) or "")
    elif text and LOSS_SPANS in names:
        # Only to say that there are spans.
        wanted.add(LOSS_SPANS)
    return sorted(wanted - {""})


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow batch as records; token ids stay arrays, which saves one Python object per token."""
    import pyarrow

    names = batch.schema.names
    ids: Any = batch.column(names.index(INPUT_IDS)) if INPUT_IDS in names else None
    # to_pylist would make a Python int of every token id, which is many times slower than numpy's view.
    inner = getattr(getattr(ids, "type", None), "value_type", None)
    # Ids of another type take the slow way, and are refused by name later.
    if inner is None or not pyarrow.types.is_integer(inner):
        yield from batch.to_pylist()
        return
    others = [name for name in names if name != INPUT_IDS]
    rest = batch.select(others).to_pylist() if others else [{} for _ in range(len(batch))]
    for index, record in enumerate(rest):
        values = ids[index].values
        # A null list has no values, and nulls in a list have no integer form.
        plain = values is not None and values.null_count == 0
        record[INPUT_IDS] = values.to_numpy(zero_copy_only=False) if plain else ids[index].as_py()
        yield record


def _first_message_line(error: Exception) -> str:
    """First line of an error message of a library."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _field(record: Mapping[str, Any], name: str) -> Any:
    """Value of a field, given by name or by a dotted path into nested records; _MISSING if there is none."""
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
    return source_name(value, f"{origin}: the source field {spec.source_field!r}")


def _token_documents(
    record: Mapping[str, Any], spec: SourceSpec, stem: str, origin: str
) -> tuple[TokenisedDocument, ...]:
    """Documents of a tokenised record; its boundaries are a list in the source field or in ``source``."""
    fields = [record.get(SPANS)] if spec.source_field is None else [_field(record, spec.source_field)]
    spans = next((value for value in (*fields, record.get(SPANS)) if isinstance(value, list)), None)
    named_by_record = spans is not None and any(value is spans for value in fields)
    name = spec.name or (None if named_by_record else _source(record, spec, origin)) or None
    # Without a source field the names in the record do not count either.
    if spec.source_field is None:
        name = name or stem
    return token_documents(record[INPUT_IDS], spans, name, stem, origin)


def _column(field: str, names: list[str]) -> str | None:
    """Column to read for a field: the top-level one, so that nested records stay nested."""
    return next((name for name in (field, field.split(".")[0]) if name in names), None)


INPUT_IDS = "input_ids"
SPANS = "source"
"""Field with the boundaries of a record, and field of a boundary with the name of its source."""

GREATEST_ID = 2**31 - 1


def token_documents(
    values: Any, spans: Any, name: str | None, stem: str, origin: str
) -> tuple[TokenisedDocument, ...]:
    """Extract the documents of one tokenised record.

    Token ids are read unchanged, including special tokens. ``labels`` and ``attention_mask`` are ignored, because
    they follow from the documents. A document that was cut at a record's end is read as two documents, because the
    record does not mark the cut.

    Args:
        values: ``[num_tokens]`` ids from 0 to 2**31 - 1, a list or an array of integers.
        spans: ``[{"start", "end", "source"}, ...]``, token offsets of each document, the end exclusive;
            empty or None makes the record one document.
        name: the source of every document; None takes each span's own ``source``.
        stem: source name if neither ``name`` nor the span gives one.
        origin: file and line or row, for messages.

    Returns:
        One document per span, in order; an empty span is an empty document.

    Raises:
        RopewalkError: if an id is not an integer or is out of range, a span is malformed, out of order, out of range or
            overlaps the previous one, or tokens belong to no span.

    Source: the layout is that of the data set yaofu/slimpajama-per-source-length-upsample (arXiv:2402.10171).
    """
    input_ids = token_ids(values, origin)
    if not spans:
        return (TokenisedDocument(input_ids, name or stem, origin=origin),)
    documents = []
    done = 0
    for index, span in enumerate(spans):
        start, end = _bounds(span, f"{origin}: {SPANS}[{index}]", len(input_ids))
        if start < done:
            raise RopewalkError(
                f"{origin}: {SPANS}[{index}] begins at token {start}, but the previous document ends at token {done}; "
                "documents must be in order and must not overlap"
            )
        if start > done:
            raise _outside(origin, done, start)
        source = name or _name(span, origin, index) or stem
        documents.append(TokenisedDocument(input_ids[start:end], source, origin=origin))
        done = end
    if done < len(input_ids):
        raise _outside(origin, done, len(input_ids))
    return tuple(documents)


def token_ids(values: Any, origin: str) -> NDArray[np.int32]:
    """Convert a list or an array of integers to int32 ids.

    Raises:
        RopewalkError: if it is neither, or contains anything but integers from 0 to 2**31 - 1; the message gives the
            first offending value and its position.
    """
    if isinstance(values, list):
        # Check types first: numpy would convert True to 1 and truncate floats without an error.
        if not set(map(type, values)) <= {int}:
            index = next(index for index, value in enumerate(values) if type(value) is not int)
            raise _bad_id(origin, index, values[index])
        try:
            values = np.array(values, dtype=np.int64)
        except OverflowError:
            index = next(index for index, value in enumerate(values) if not 0 <= value <= GREATEST_ID)
            raise _bad_id(origin, index, values[index]) from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        raise RopewalkError(
            f"{origin}: the field {INPUT_IDS!r} must be a list of token ids, got {kind_name(values)}"
        )
    bad = (values < 0) | (values > GREATEST_ID)
    if bad.any():
        index = int(bad.argmax())
        raise _bad_id(origin, index, int(values[index]))
    return values.astype(np.int32)


def kind_name(value: Any) -> str:
    """Type of a value in JSON's terms."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def _bounds(span: Any, place: str, length: int) -> tuple[int, int]:
    if not isinstance(span, Mapping):
        raise RopewalkError(f"{place} must be an object with start and end, got {kind_name(span)}")
    start, end = span.get("start"), span.get("end")
    for key, value in (("start", start), ("end", end)):
        # Not isinstance: True is an int to Python.
        if type(value) is not int:
            raise RopewalkError(f"{place} must have a whole number as {key!r}, got {_shown(value)}")
    assert isinstance(start, int)
    assert isinstance(end, int)
    if not 0 <= start <= end <= length:
        raise RopewalkError(
            f"{place} spans tokens {start} to {end}, but the record has {length} tokens; use "
            f"0 <= start <= end <= {length}"
        )
    return start, end


def _name(span: Mapping[str, Any], origin: str, index: int) -> str | None:
    return source_name(span.get(SPANS), f"{origin}: the field 'source' of {SPANS}[{index}]")


def source_name(value: Any, what: str) -> str | None:
    """Name of a source in a record; None if it is missing.

    Args:
        value: a string or a whole number; None for a missing name.
        what: origin and field, for messages.

    Raises:
        RopewalkError: if it has another type, or contains a lone surrogate.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RopewalkError(
            f"{what} must be a name, got {kind_name(value)}; set source_field (--source-field) to another field, or "
            'to "" to ignore source names'
        )
    name = str(value).strip()
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RopewalkError(f"{what} contains a lone surrogate {name[error.start]!r}") from error
    return name


def _outside(origin: str, start: int, end: int) -> RopewalkError:
    return RopewalkError(
        f"{origin}: tokens {start} to {end} belong to no document; the field {SPANS!r} must cover all tokens, or be "
        "empty"
    )


def _bad_id(origin: str, index: int, value: Any) -> RopewalkError:
    return RopewalkError(
        f"{origin}: {INPUT_IDS}[{index}] must be an integer from 0 to {GREATEST_ID}, got {_shown(value)}"
    )


def _shown(value: Any) -> str:
    """Short text of a value for a message, because a record may contain values of any size."""
    shown = repr(value) if isinstance(value, int | float) else kind_name(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
