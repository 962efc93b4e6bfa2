"""Records that are tokenised already: ``input_ids``, whole or with the boundaries of their documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.errors import RopewalkError

INPUT_IDS = "input_ids"
SPANS = "source"
"""The field that holds the boundaries, and the field of a boundary that names its source."""

GREATEST_ID = 2**31 - 1


def token_documents(
    values: Any, spans: Any, name: str | None, stem: str, origin: str
) -> tuple[TokenisedDocument, ...]:
    """The documents of one tokenised record.

    Tokens are taken as they are, with any special tokens among them; ``labels`` and ``attention_mask``
    beside them are ignored, for they follow from the documents. A document that was cut at a record's end
    is two documents here, as nothing in the record tells.

    Args:
        values: ``[num_tokens]`` ids from 0 to 2**31 - 1, a list or an array of integers.
        spans: ``[{"start", "end", "source"}, ...]``, token offsets of each document, the end exclusive;
            empty or None makes the record one document.
        name: the source of every document; None takes each span's own ``source``.
        stem: the source of a document where neither says one.
        origin: file and line or row, for messages.

    Returns:
        One document a span, in order; an empty span is an empty document.

    Raises:
        RopewalkError: if an id is not an integer or out of range, a span is malformed, out of order, out of
            the record or overlaps the one before, or tokens lie outside every span.

    Source: the layout is that of the data set yaofu/slimpajama-per-source-length-upsample (arXiv:2402.10171).
    """
    input_ids = token_ids(values, origin)
    if not spans:
        return (TokenisedDocument(input_ids, name or stem),)
    documents = []
    done = 0
    for index, span in enumerate(spans):
        start, end = _bounds(span, f"{origin}: {SPANS}[{index}]", len(input_ids))
        if start < done:
            raise RopewalkError(
                f"{origin}: {SPANS}[{index}] begins at token {start}, before token {done}, where the one before "
                "it ends; documents must be in order and not overlap"
            )
        if start > done:
            raise _outside(origin, done, start)
        documents.append(TokenisedDocument(input_ids[start:end], name or _name(span, origin, index) or stem))
        done = end
    if done < len(input_ids):
        raise _outside(origin, done, len(input_ids))
    return tuple(documents)


def token_ids(values: Any, origin: str) -> NDArray[np.int32]:
    """A list or an array of integers as int32 ids.

    Raises:
        RopewalkError: if it is neither or holds anything but integers from 0 to 2**31 - 1; the message gives
            the first offending value and its position.
    """
    if isinstance(values, list):
        # A look at the types first: numpy would take True for 1 and a list of floats for what it is.
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
    """What a value is, in JSON's words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def _bounds(span: Any, place: str, length: int) -> tuple[int, int]:
    if not isinstance(span, Mapping):
        raise RopewalkError(f"{place} must be an object with start and end, got {kind_name(span)}")
    start, end = span.get("start"), span.get("end")
    for key, value in (("start", start), ("end", end)):
        if type(value) is not int:
            raise RopewalkError(f"{place} must have a whole number as {key!r}, got {_shown(value)}")
    assert isinstance(start, int)
    assert isinstance(end, int)
    if not 0 <= start <= end <= length:
        raise RopewalkError(
            f"{place} spans tokens {start} to {end} of a record of {length}; 0 <= start <= end"
        )
    return start, end


def _name(span: Mapping[str, Any], origin: str, index: int) -> str | None:
    return source_name(span.get(SPANS), f"{origin}: the field 'source' of {SPANS}[{index}]")


def source_name(value: Any, what: str) -> str | None:
    """A source's name as a record gives it, or None where it is missing or blank.

    Args:
        value: a string or a whole number; None is a missing name.
        what: place and field, for messages.

    Raises:
        RopewalkError: if it is of another kind, or holds a character that no UTF-8 can.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RopewalkError(
            f"{what} must be a name, got {kind_name(value)}; name another source field, or none"
        )
    name = str(value).strip()
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RopewalkError(f"{what} holds a lone surrogate {name[error.start]!r}") from error
    return name


def _outside(origin: str, start: int, end: int) -> RopewalkError:
    return RopewalkError(
        f"{origin}: tokens {start} to {end} lie in no document; {SPANS!r} must name all tokens, or none"
    )


def _bad_id(origin: str, index: int, value: Any) -> RopewalkError:
    return RopewalkError(
        f"{origin}: {INPUT_IDS}[{index}] must be an integer from 0 to {GREATEST_ID}, got {_shown(value)}"
    )


def _shown(value: Any) -> str:
    """A value, cut short: a record may hold anything."""
    shown = repr(value) if isinstance(value, int | float) else kind_name(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
