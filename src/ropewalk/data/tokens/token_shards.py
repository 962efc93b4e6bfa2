"""Token shards: the documents of an input split as token ids on disk, in a file that is written atomically.

A file consists of the ids (int32), the columns of ``COLUMNS`` one after the other, a header in JSON, the length of the
header in 16 hexadecimal digits, and the SHA-256 of everything before it in 64. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from array import array
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.read.readers import ReadingCounts
from ropewalk.data.tokens.chat import token_ids
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import HashedFile
from ropewalk.io.files import parse_json, replacing

FORMAT = 3
"""Version of the format, part of the names of the files. Change it together with the contents of a shard."""

SUFFIX = ".tokens"

COLUMNS: dict[str, np.dtype[Any]] = {
    "lengths": np.dtype("<i8"),
    "source_ids": np.dtype("<i4"),
    "hashes": np.dtype("<u8"),
    "characters": np.dtype("<i8"),
    "first_ids": np.dtype("<i4"),
    "last_ids": np.dtype("<i4"),
}
"""The index of the documents: names and types of its columns, in the order of the file."""

RATIOS = {"gzip_ratios": np.dtype("<f8")}
"""A further column of shards that were asked for it: gzip ratios by the zlib that the header names, NaN without one."""

_COUNTS = ("empty_documents", "binary_files", "dropped_nulls", "span_documents")
_LENGTH_BYTES, _SEAL_BYTES = 16, 64


@dataclass(frozen=True, eq=False)
class TokenShard:
    """Header and index of a shard on disk; the token ids stay in the file.

    Attributes:
        path: path of the file.
        reading: numbers of documents, and of what was skipped.
        tokens: number of token ids.
        sources: names of the sources, in the order of their first documents.
        digest: SHA-256 over the documents' ids, lengths, sources and hashes.
        lengths: int64 ``[documents]``, tokens of each document.
        source_ids: int32 ``[documents]``, index into ``sources``.
        hashes: uint64 ``[documents]``, hash of the text or token ids.
        characters: int64 ``[documents]``, characters of the text; 0 if the input was tokenised.
        first_ids, last_ids: int32 ``[documents]``, first and last token; -1 for an empty document.
        gzip_ratios: float64 ``[documents]``, gzip ratio of the text, NaN for a chat; None if the shard has none.
        zlib: version of zlib that they are from; None likewise.
    """

    path: Path
    reading: ReadingCounts
    tokens: int
    sources: tuple[str, ...]
    digest: str
    lengths: NDArray[np.int64]
    source_ids: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    characters: NDArray[np.int64]
    first_ids: NDArray[np.int32]
    last_ids: NDArray[np.int32]
    gzip_ratios: NDArray[np.float64] | None = None
    zlib: str | None = None


@contextmanager
def writing_shard(path: Path, zlib: str | None = None) -> Iterator[ShardWriter]:
    """A shard to be filled; it gets its name when the block succeeds.

    Args:
        path: path of the file.
        zlib: version of zlib if documents are added with their gzip ratios.

    Raises:
        RopewalkError: if it cannot be written.
    """
    with replacing(path) as temporary, HashedFile(temporary) as file:
        writer = ShardWriter(file, zlib)
        yield writer
        writer.finish(path.stem)


class ShardWriter:
    """Writes the documents of a split; made by :func:`writing_shard`.

    Attributes:
        reading: numbers of what was skipped, which the caller counts.
    """

    def __init__(self, file: HashedFile, zlib: str | None = None) -> None:
        self._file = file
        self._zlib = zlib
        self._ratios = array("d")
        self._ids = hashlib.sha256()
        self._sources: dict[str, int] = {}
        self._columns = [array(kind) for kind in "qiQqii"]
        self._tokens = 0
        self.reading = ReadingCounts()

    def add(
        self,
        input_ids: NDArray[np.int32],
        source: str,
        text_hash: int,
        characters: int,
        gzip_ratio: float = math.nan,
    ) -> None:
        """Add a document.

        Args:
            input_ids: int32 ``[tokens]``, ``~id`` for tokens that are never targets.
            source: name of its source.
            text_hash: hash of the text or token ids.
            characters: characters of the text; 0 if the input was tokenised.
            gzip_ratio: gzip ratio of the text, for a shard that has them.
        """
        content = np.ascontiguousarray(input_ids, "<i4").tobytes()
        self._file.write(content)
        self._ids.update(content)
        self._tokens += len(input_ids)
        # Compared with BOS and EOS, tokens that are never targets count as their ids.
        ends = token_ids(input_ids[[0, -1]]).tolist() if len(input_ids) else [-1, -1]
        source_id = self._sources.setdefault(source, len(self._sources))
        for column, value in zip(
            self._columns, (len(input_ids), source_id, text_hash, characters, *ends), strict=True
        ):
            column.append(value)
        self._ratios.append(gzip_ratio)

    def finish(self, name: str) -> None:
        """Write the index, the header and the digest."""
        columns = {
            each: np.array(column, kind)
            for (each, kind), column in zip(COLUMNS.items(), self._columns, strict=True)
        }
        sources = list(self._sources)
        # Depends on what the documents are, and not on how the file is laid out.
        state = hashlib.sha256(json.dumps([self._ids.hexdigest(), sources]).encode())
        for column in ("lengths", "source_ids", "hashes"):
            state.update(columns[column].data)
        header = {
            "format": FORMAT,
            "name": name,
            "documents": len(columns["lengths"]),
            "tokens": self._tokens,
            **{name: getattr(self.reading, name) for name in _COUNTS},
            "sources": sources,
            "sha256": state.hexdigest(),
        }
        if self._zlib is not None:
            header["zlib"] = self._zlib
            columns["gzip_ratios"] = np.array(self._ratios, RATIOS["gzip_ratios"])
        for values in columns.values():
            self._file.write(values.tobytes())
        content = json.dumps(header).encode()
        self._file.write(content + f"{len(content):016x}".encode())
        self._file.write(self._file.digest().sha256.encode())


def open_shard(path: Path) -> TokenShard:
    """Read a shard's header and index, and verify the digest of the whole file.

    Raises:
        RopewalkError: if the file cannot be read, is damaged, has another format, or is not the shard that its path
            states.
    """
    damaged = RopewalkError(f"{path} is damaged; delete it and run again")
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
            view[:-_SEAL_BYTES] as sealed,
        ):
            whole = hashlib.sha256(sealed).hexdigest().encode() == view[-_SEAL_BYTES:].tobytes()
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise damaged from error
    if not whole:
        raise damaged
    header, columns = _index(path)
    if header["format"] != FORMAT:
        raise RopewalkError(
            f"{path} has format {header['format']}, but this version of ropewalk reads format {FORMAT}; delete "
            "the file and run again"
        )
    if header["name"] != path.stem:
        raise RopewalkError(
            f"{path} has the contents of another file, {header['name']}{SUFFIX}; delete {path.name} and run again"
        )
    return TokenShard(
        path=path,
        reading=ReadingCounts(header["documents"], **{name: header.get(name, 0) for name in _COUNTS}),
        tokens=header["tokens"],
        sources=tuple(header["sources"]),
        digest=header["sha256"],
        zlib=header.get("zlib"),
        **columns,
    )


class ShardFile:
    """Reads token ids of a shard that :func:`open_shard` has verified.

    The file is read instead of mapped: pages of a mapped file count towards the process's memory, and a corpus has
    many shards.

    Attributes:
        offsets: int64 ``[documents + 1]``, start of each document among the ids, and the end of the last one.

    Raises:
        RopewalkError: if the file is missing or has changed.
    """

    _file: FileIO | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            lengths = _index(path, ("lengths",))[1]["lengths"]
            self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
            self._file = FileIO(path)
        except (OSError, KeyError, ValueError) as error:
            raise RopewalkError(f"cannot read {path}: {error}; run again to recreate it") from error

    def read(self, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with token ids, starting at index ``first``.

        Raises:
            RopewalkError: if the file cannot be read, or ends too soon.
        """
        if not len(out):
            return
        assert self._file is not None
        view = out.view(np.uint8).data
        try:
            self._file.seek(first * out.itemsize)
            # readinto may return fewer bytes than requested, on network file systems for example.
            while len(view):
                count = self._file.readinto(view)
                if not count:
                    raise RopewalkError(f"{self._path} ends too soon; delete it and run again")
                view = view[count:]
        except OSError as error:
            raise RopewalkError(f"cannot read {self._path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; this also happens when the object is deleted."""
        if self._file is not None:
            self._file.close()

    __del__ = close


def _index(
    path: Path, wanted: Collection[str] = (*COLUMNS, *RATIOS)
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of a file that was verified, and columns of its index."""
    with path.open("rb") as file:
        end = file.seek(-_LENGTH_BYTES - _SEAL_BYTES, 2)
        end -= int(file.read(_LENGTH_BYTES), 16)
        file.seek(end)
        header = parse_json(file.read()[: -_LENGTH_BYTES - _SEAL_BYTES])
        columns, start = {}, 4 * header["tokens"]
        for name, kind in (COLUMNS | RATIOS if "zlib" in header else COLUMNS).items():
            if name in wanted:
                file.seek(start)
                columns[name] = np.frombuffer(file.read(header["documents"] * kind.itemsize), kind)
            start += header["documents"] * kind.itemsize
    return header, columns
