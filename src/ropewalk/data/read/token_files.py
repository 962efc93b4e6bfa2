"""Files of token ids that other tools wrote: Megatron .bin/.idx, datatrove .ds, OLMo and dolma .npy, and raw .bin.

A file is read through a memory map. Its documents are those of the index beside it, or, where the user names a
separator, the tokens between separators; without either a file is refused.

Sources: ``megatron/core/datasets/indexed_dataset.py`` (Megatron-LM), ``pipeline/tokens/tokenizer.py`` (datatrove, whose
files nanotron reads too), ``tokenizer/memmap_writer.py`` (dolma), and OLMo-core's guide to data loading.
"""

from __future__ import annotations

import csv
import struct
import tokenize
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.read.documents import Record, TokenisedDocument
from ropewalk.data.read.files import DATATROVE_COMPANIONS, companions, open_bytes
from ropewalk.data.read.records import token_ids
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of the integer types in a Megatron index; 6 and 7 are floating-point numbers."""

NUMPY_MAGIC = b"\x93NUMPY"

_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_HINT = "set token_dtype (--token-dtype), for example to uint16 or uint32"
# Tokens at the beginning of a file by which a wrong type is told. The upper half of a 4-byte id is below 4 in
# vocabularies of up to 262,144 tokens.
_PROBED, _FEWEST, _UPPER = 4096, 64, 4
# Bytes of a line of an index, which holds two numbers and where the document came from.
_LONGEST_ROW = 1 << 16
# Tokens that the search for separators looks at together.
_SEARCHED = 1 << 22


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A file of token ids with the bounds of its documents.

    Attributes:
        path: the file.
        ids: ``[num_tokens]``, a memory map of little-endian integers.
        ends: int64 ``[documents]``, where each document ends, in tokens; the next one begins there.
        separator: id that stands at the beginning or end of every document and belongs to none; None if none was named.
        tokenizer: name of the tokenizer that the file's metadata states; None without one.
    """

    path: Path
    ids: NDArray[Any]
    ends: NDArray[np.int64]
    separator: int | None
    tokenizer: str | None

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.ends)

    def document(self, number: int) -> NDArray[np.int32]:
        """Ids of a document, without the separator.

        Raises:
            RopewalkError: if an id is negative or does not fit in int32, or the separator contradicts the index: it
                stands inside a document, or neither at its beginning nor at its end.
        """
        start = int(self.ends[number - 1]) if number else 0
        origin = self.origin(number)
        ids = token_ids(np.asarray(self.ids[start : int(self.ends[number])]), origin)
        if self.separator is None or not len(ids):
            return ids
        first, last = (int(ids[end] == self.separator) for end in (0, -1))
        kept = ids[first : len(ids) - last]
        inside = np.flatnonzero(kept == self.separator)
        if len(inside):
            raise RopewalkError(
                f"{origin}: the separator (id {self.separator}) occurs inside the document, at token "
                f"{int(inside[0]) + first}, which contradicts the index; omit separator_id (--separator-id) to use "
                "only the index"
            )
        # Where separators stand at beginnings and there is no index, each document is read with that of the next.
        last_of_all = number == len(self) - 1 and int(self.ids[0]) == self.separator
        if not (first or last or last_of_all):
            raise RopewalkError(
                f"{origin}: the document begins with id {int(ids[0])} and ends with id {int(ids[-1])}, but must "
                f"begin or end with the separator (id {self.separator}); omit separator_id (--separator-id) to use "
                "only the index"
            )
        return kept

    def origin(self, number: int) -> str:
        """Name of a document for messages; numbers start at 0."""
        return f"{self.path}: document {number}"


def token_file_kind(path: Path, spec: SourceSpec, in_folder: bool) -> Literal["tokens", "index"] | None:
    """Whether a file holds token ids or is the index of such a file, by its name and what lies beside it.

    In a folder, a ``.bin`` file without an index, or a ``.npy`` file with numpy's header and without offsets, holds
    tokens only if the source names a separator: it may as well be the weights of a model or any array.

    Raises:
        RopewalkError: if the file is an index, and the user named it or its tokens are missing.
    """
    indexed = _indexed_by(path)
    if indexed is not None:
        if not indexed.is_file():
            raise RopewalkError(
                f"{path} is the index of {indexed.name}, which is missing; restore {indexed.name}"
            )
        if not in_folder:
            raise RopewalkError(f"{path} is the index of {indexed.name}; give {indexed} instead")
        return "index"
    suffix = path.suffix.lower()
    if suffix == ".ds":
        return "tokens"
    if suffix not in (".bin", ".npy"):
        return None
    if not in_folder or spec.separator_id is not None or _index_of(path) is not None:
        return "tokens"
    return "tokens" if suffix == ".npy" and not _starts_with(path, NUMPY_MAGIC) else None


def document_ranges(path: Path, spec: SourceSpec, most: int) -> list[tuple[int, int]]:
    """Cut a file into ranges of documents of about ``most`` bytes.

    Returns:
        The first document of each range, and the size of the range in bytes.

    Raises:
        RopewalkError: as in :func:`open_token_file`.
    """
    file = open_token_file(path, spec)
    size = file.ids.itemsize
    # The document that contains the beginning of each stretch of bytes; a longer one makes a range of its own.
    marks = np.arange(0, len(file.ids), max(1, most // size))
    firsts = (
        np.unique(np.searchsorted(file.ends, marks, side="right")) if len(marks) else np.zeros(1, np.int64)
    )
    # Empty documents at the beginning contain no mark.
    firsts[0] = 0
    starts = np.concatenate([[0], file.ends])[firsts]
    sizes = np.diff([*starts, len(file.ids)]) * size
    return list(zip(firsts.tolist(), sizes.tolist(), strict=True))


def read_token_file(
    path: Path, spec: SourceSpec, stem: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the documents of a file of token ids, each as a record.

    Args:
        path: the file.
        spec: the source, which may name a separator and the type of the ids.
        stem: source name if the spec gives none.
        start, stop: range of documents; a stop of None is the end.

    Raises:
        RopewalkError: as in :func:`open_token_file` and :meth:`TokenFile.document`.
    """
    file = open_token_file(path, spec)
    for number in islice(range(len(file)), start, stop):
        yield Record(
            (TokenisedDocument(file.document(number), spec.name or stem, origin=file.origin(number)),)
        )


def open_token_file(path: Path, spec: SourceSpec) -> TokenFile:
    """Open a file of token ids and find its documents.

    Raises:
        RopewalkError: if the file or its index is missing, unreadable, cut off or of an unknown version, if both
            disagree about the number of tokens, if the type of the ids is unknown or differs from the stated one, or if
            there is neither an index nor a separator.
    """
    stamps = []
    for each in (path, *companions(path)):
        try:
            status = each.stat()
        except OSError as error:
            raise RopewalkError(f"cannot read {each}: {error.strerror}") from error
        stamps.append((each, status.st_size, status.st_mtime_ns))
    return _opened(path, spec.separator_id, spec.token_dtype, tuple(stamps))


# A few files, because the splits of one file are read one after the other, and each needs the whole index.
@lru_cache(maxsize=4)
def _opened(path: Path, separator: int | None, stated: str | None, stamps: tuple[Any, ...]) -> TokenFile:
    size = stamps[0][1]
    if any(each.name.endswith(".loss") for each, _, _ in stamps):
        raise RopewalkError(
            f"{path}.loss is a loss mask, which ropewalk does not support; give the documents as chats with "
            "messages_field (--messages-field), or move this file away to train on every token"
        )
    tokenizer = ends = None
    header = 0
    index = _index_of(path)
    if path.suffix.lower() == ".ds":
        tokenizer, width, counted = _datatrove_metadata(path)
        if index is not None:
            ends = _datatrove_ends(index)
            width = width or _width(path, size, index, ends, (2, 4))
        dtype = _of_width(path, width, stated)
        if counted is not None and width and counted * width != size:
            raise RopewalkError(
                f"{path} has {size} bytes, but {path.name}.metadata counts {counted} tokens of {width} bytes; one of "
                "the two files is cut off"
            )
    elif path.suffix.lower() == ".npy" and _starts_with(path, NUMPY_MAGIC):
        dtype, header = _numpy_header(path)
        ends = None if index is None else _dolma_ends(index)
    elif index is None:
        dtype = stated
    elif path.suffix.lower() == ".npy":
        ends = _dolma_ends(index)
        width = _width(path, size, index, ends, (1, 2, 4, 8))
        if width == 1 and stated is None:
            # Also the size of a file of 2 bytes a token that was cut in half.
            raise RopewalkError(
                f"{index} counts as many tokens as {path} has bytes; if each id takes one byte, set token_dtype "
                f"(--token-dtype) to uint8; otherwise {path.name} is cut off"
            )
        dtype = _of_width(path, width, stated)
    else:
        dtype, ends = _megatron_index(index)
    if ends is None and separator is None:
        raise RopewalkError(
            f"{path} has no index of its documents; set separator_id (--separator-id) to the token id that separates "
            "documents"
        )
    if dtype is None:
        raise RopewalkError(f"{path} does not state the dtype of its token ids; {_DTYPE_HINT}")
    if stated is not None and stated != dtype:
        raise RopewalkError(
            f"{path} stores token ids as {dtype}, but token_dtype is {stated}; omit token_dtype (--token-dtype)"
        )
    ids = _memory_map(path, size, header, dtype, stated)
    if path.suffix.lower() != ".bin" or index is None:
        _refuse_halves(path, ids, stated)
    if ends is None:
        assert separator is not None
        ends = _separated(path, ids, separator)
    else:
        assert index is not None
        _check_ends(index, ends, path, len(ids))
    return TokenFile(path, ids, ends, separator, tokenizer)


def _index_of(path: Path) -> Path | None:
    endings = (".ds.index", ".idx", ".csv.gz")
    return next((each for each in companions(path) if each.name.endswith(endings)), None)


def _indexed_by(path: Path) -> Path | None:
    """The file of token ids that a file is an index of, whether it exists or not; None if the file is no index."""
    if path.name.endswith(DATATROVE_COMPANIONS):
        return path.with_suffix("")
    if path.suffix.lower() == ".idx":
        tokens = path.with_suffix(".bin")
        return tokens if tokens.is_file() or _starts_with(path, MEGATRON_MAGIC) else None
    if path.name.endswith(".csv.gz"):
        tokens = path.with_name(path.name.removesuffix(".csv.gz") + ".npy")
        return tokens if tokens.is_file() else None
    return None


def _starts_with(path: Path, magic: bytes) -> bool:
    with open_bytes(path) as stream:
        return stream.read(len(magic)) == magic


def _megatron_index(index: Path) -> tuple[str, NDArray[np.int64]]:
    """Type of the ids and ends of the documents."""
    with open_bytes(index) as stream:
        content = stream.read()
    if len(content) < _HEADER.size:
        raise RopewalkError(
            f"{index} has {len(content)} bytes, but a Megatron index has at least {_HEADER.size}"
        )
    magic, version, code, sequences, bounds = _HEADER.unpack_from(content)
    if magic != MEGATRON_MAGIC:
        raise RopewalkError(
            f"{index} is not a Megatron index: it begins with {magic!r}, not {MEGATRON_MAGIC!r}"
        )
    if version != 1:
        raise RopewalkError(f"{index} has version {version} of the Megatron index; ropewalk reads version 1")
    if code not in MEGATRON_TYPES:
        known = ", ".join(f"{number} ({name})" for number, name in MEGATRON_TYPES.items())
        raise RopewalkError(
            f"{index} states the type code {code} for token ids; the code must be one of {known}"
        )
    dtype = MEGATRON_TYPES[code]
    expected = _HEADER.size + 12 * sequences + 8 * bounds
    if sequences and len(content) == expected + sequences:
        raise RopewalkError(
            f"{index} states a mode for each sequence, so it indexes a multimodal corpus, which ropewalk does not read"
        )
    if len(content) != expected:
        raise RopewalkError(
            f"{index} has {len(content)} bytes, but its header counts {sequences} sequences and {bounds} document "
            f"bounds, which take {expected} bytes; the file is {'cut off' if len(content) < expected else 'damaged'}"
        )
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", bounds, _HEADER.size + 12 * sequences)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    wrong = np.flatnonzero((lengths < 0) | (pointers != ends[:-1] * np.dtype(dtype).itemsize))
    if len(wrong):
        at = int(wrong[0])
        if lengths[at] < 0:
            raise RopewalkError(f"{index} is damaged: sequence {at} has {lengths[at]} tokens")
        raise RopewalkError(
            f"{index}: sequence {at} begins at byte {pointers[at]} instead of byte "
            f"{ends[at] * np.dtype(dtype).itemsize}; sequences must follow one another without gaps"
        )
    if not bounds or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise RopewalkError(
            f"{index}: the document bounds must ascend from 0 to {sequences}, the number of sequences, got "
            f"{_shown(documents)}"
        )
    return dtype, ends[documents[1:]]


def _datatrove_metadata(path: Path) -> tuple[str | None, int | None, int | None]:
    """Name of the tokenizer, bytes of a token, and number of tokens, each None if there are no metadata."""
    place = path.with_name(path.name + ".metadata")
    if not place.is_file():
        return None, None, None
    with open_bytes(place) as stream:
        lines = stream.read(_LONGEST_ROW).decode("utf-8", "replace").splitlines()
    name, bar, width = lines[0].rpartition("|") if lines else ("", "", "")
    if not bar or width not in ("2", "4") or len(lines) < 2 or not _is_count(lines[1]):
        raise RopewalkError(
            f"{place} must have the tokenizer and the bytes per token (2 or 4) in line 1, such as gpt2|2, and the "
            f"number of tokens in line 2, got {lines[:2]}"
        )
    return name.removesuffix(f"|{width}"), int(width), int(lines[1])


def _datatrove_ends(index: Path) -> NDArray[np.int64]:
    with open_bytes(index) as stream:
        content = stream.read()
    if len(content) % 8:
        raise RopewalkError(
            f"{index} has {len(content)} bytes, but the size of a datatrove index is a multiple of 8; the file is "
            "cut off"
        )
    ends = np.frombuffer(content, "<u8")
    # Larger values would become negative numbers, which the check of the order finds.
    return ends.astype(np.int64)


def _dolma_ends(index: Path) -> NDArray[np.int64]:
    ends = array("q")
    done = 0
    with open_bytes(index) as stream:
        for number, row in enumerate(_csv_rows(stream, index), 1):
            if len(row) < 2 or not _is_count(row[0]) or not _is_count(row[1]):
                raise RopewalkError(
                    f"{index}:{number}: the line must begin with two whole numbers, the start and the end of a "
                    f"document in tokens, got {','.join(row)[:80]!r}"
                )
            if int(row[0]) != done or int(row[1]) >= 1 << 62:
                raise RopewalkError(
                    f"{index}:{number}: the document spans tokens {row[0]} to {row[1]}, but the previous document "
                    f"ends at {done}; documents must follow one another without gaps"
                )
            done = int(row[1])
            ends.append(done)
    return np.array(ends, np.int64)


def _csv_rows(stream: BinaryIO, index: Path) -> Iterator[list[str]]:
    def lines() -> Iterator[str]:
        while line := stream.readline(_LONGEST_ROW):
            if len(line) == _LONGEST_ROW:
                raise RopewalkError(f"{index} is damaged: a line is longer than {_LONGEST_ROW} bytes")
            yield line.decode("utf-8", "replace")

    try:
        yield from csv.reader(lines())
    except csv.Error as error:
        raise RopewalkError(f"{index} is damaged: {error}") from error


def _is_count(digits: str) -> bool:
    """Whether a text is a whole number that Python and a 64-bit index can hold."""
    return digits.isdecimal() and len(digits) <= 19


def _width(
    path: Path, size: int, index: Path, ends: NDArray[np.int64], widths: tuple[int, ...]
) -> int | None:
    """Bytes of a token, which follow from the file's size and the number of tokens in its index."""
    tokens = int(ends[-1]) if len(ends) else 0
    if not tokens and not size:
        # Any width reads an empty file.
        return widths[0]
    if tokens <= 0 or size % tokens or size // tokens not in widths:
        raise RopewalkError(
            f"{index} counts {tokens} tokens and {path} has {size} bytes, but a token must take "
            f"{', '.join(map(str, widths[:-1]))} or {widths[-1]} bytes; one of the two files is cut off"
        )
    return size // tokens


def _of_width(path: Path, width: int | None, stated: str | None) -> str | None:
    """The stated type, or the unsigned type of a width in bytes."""
    if width is None or (stated is not None and np.dtype(stated).itemsize == width):
        return stated
    return f"uint{8 * width}"


def _numpy_header(path: Path) -> tuple[str, int]:
    """Type of an array and its offset in bytes."""
    try:
        # Reads the header alone; a pickled array is refused. A shape beyond all memory overflows before it is refused.
        with np.errstate(over="ignore"):
            found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, OverflowError, TypeError, tokenize.TokenError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise RopewalkError(f"{path} cannot be read as a numpy array: {said}") from error
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.dtype.isnative:
        raise RopewalkError(
            f"{path} holds an array of {found.dtype} with shape {list(found.shape)}; token ids are a list of integers"
        )
    held = path.stat().st_size - int(found.offset)
    if found.nbytes != held:
        raise RopewalkError(
            f"{path} states {len(found)} token ids of {found.itemsize} bytes, but holds {held} bytes of them; restore "
            "the file"
        )
    return found.dtype.name, int(found.offset)


def _memory_map(path: Path, size: int, header: int, dtype: str, stated: str | None) -> NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    if (size - header) % kind.itemsize:
        raise RopewalkError(
            f"{path} has {size - header} bytes of token ids, which is not a multiple of {kind.itemsize} ({dtype}); "
            f"restore the file if it is cut off{', or correct token_dtype (--token-dtype)' if stated else ''}"
        )
    if size == header:
        return np.empty(0, kind)
    try:
        return np.memmap(path, kind, "r", header)
    except (OSError, ValueError) as error:
        raise RopewalkError(f"cannot read {path}: {error}") from error


def _refuse_halves(path: Path, ids: NDArray[Any], stated: str | None) -> None:
    """Raise if the ids are halves of wider ones: every second one is next to nothing, and the others are not.

    The type of a file without a header is the user's word, or follows from its size, which halves if it is cut in half.
    """
    head = np.asarray(ids[:_PROBED])
    if len(head) < _FEWEST or ids.itemsize not in (2, 4):
        return
    lower, upper = head[::2], head[1::2]
    if upper.max() < _UPPER <= lower.max() and upper.min() >= 0:
        wider = f"uint{16 * ids.itemsize}"
        raise RopewalkError(
            f"{path}: every second id among the first {len(head)}, read as {ids.dtype.name}, is below {_UPPER}, so "
            f"the ids are probably {wider}"
            + (
                f"; set token_dtype (--token-dtype) to {wider}"
                if stated
                else " and the file was cut in half; restore the file"
            )
        )


def _check_ends(index: Path, ends: NDArray[np.int64], path: Path, tokens: int) -> None:
    wrong = np.flatnonzero(np.diff(ends, prepend=0) < 0)
    if len(wrong):
        at = int(wrong[0])
        raise RopewalkError(
            f"{index}: document {at} begins at token {ends[at - 1] if at else 0} and ends at token {ends[at]}; the "
            "index is damaged"
        )
    beyond = np.flatnonzero(ends > tokens)
    if len(beyond):
        at = int(beyond[0])
        raise RopewalkError(
            f"{index}: document {at} ends at token {ends[at]}, but {path} has {tokens} tokens; one of the two files is "
            "cut off"
        )
    last = int(ends[-1]) if len(ends) else 0
    if last != tokens:
        raise RopewalkError(
            f"{index}: the last document ends at token {last}, but {path} has {tokens} tokens; one of the two files is "
            "cut off"
        )


def _separated(path: Path, ids: NDArray[Any], separator: int) -> NDArray[np.int64]:
    """Ends of the documents, each behind its separator; the last may lack one if the first token is a separator."""
    if len(ids) and separator not in (int(ids[0]), int(ids[-1])):
        raise RopewalkError(
            f"{path} begins with id {int(ids[0])} and ends with id {int(ids[-1])}, but documents must begin or end "
            f"with the separator (id {separator}); set separator_id (--separator-id) to the id that separates "
            "documents, or restore the file if it is cut off"
        )
    parts = [
        np.flatnonzero(np.asarray(ids[start : start + _SEARCHED]) == separator) + start + 1
        for start in range(0, len(ids), _SEARCHED)
    ]
    if len(ids) and int(ids[-1]) != separator:
        parts.append(np.array([len(ids)]))
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def _shown(values: NDArray[np.int64]) -> str:
    few = values.tolist() if len(values) <= 6 else [*values[:3].tolist(), "...", *values[-2:].tolist()]
    return ", ".join(map(str, few)) or "none"
