"""Token shards: the documents of an input split as token ids on disk, in files that are written atomically."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.ipc
from numpy.typing import NDArray

from ropewalk.data.tokens.arrow import HashingFile, as_numpy, numbers
from ropewalk.data.tokens.chat import token_ids
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, replacing

FORMAT = 2
"""Version of the format, part of the names of the splits' folders. Change it together with SHARD_TOKENS or the contents
of a shard."""

SHARD_TOKENS = 1 << 22
"""A shard is full when it has this many tokens; it ends with a complete record."""

_KEY = b"ropewalk"
_SEAL_BYTES = 64
_LEFTOVER = re.compile(r"\.\d{5,}\.[0-9a-f]{32}\.arrow")
# A list column of Arrow has int32 offsets.
_MOST_TOKENS = 2**31 - 1
_ATTEMPTS = 10
_SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("source", pyarrow.int32()),
        ("hash", pyarrow.uint64()),
        ("characters", pyarrow.int64()),
    ]
)


@dataclass(frozen=True, eq=False)
class TokenShard:
    """Header and index of a shard on disk; the token ids stay in the file.

    Attributes:
        path: path of the file.
        last: whether it is the last shard of its split.
        records: number of the split's records in it, including those without documents.
        empty_documents, binary_files: numbers of blank documents and binary files skipped in these records.
        dropped_nulls: number of nulls left out of chats in tables (:class:`Document`).
        tokens: number of token ids.
        sources: names of the sources, in the order of their first documents.
        digest: SHA-256 over the documents' ids, lengths, sources and hashes.
        lengths: int64 ``[documents]``, tokens of each document.
        source_ids: int32 ``[documents]``, index into ``sources``.
        hashes: uint64 ``[documents]``, hash of the text or token ids.
        characters: int64 ``[documents]``, characters of the text; 0 if the input was tokenised.
        first_ids, last_ids: int32 ``[documents]``, first and last token; -1 for an empty document.
    """

    path: Path
    last: bool
    records: int
    empty_documents: int
    binary_files: int
    dropped_nulls: int
    tokens: int
    sources: tuple[str, ...]
    digest: str
    lengths: NDArray[np.int64]
    source_ids: NDArray[np.int32]
    hashes: NDArray[np.uint64]
    characters: NDArray[np.int64]
    first_ids: NDArray[np.int32]
    last_ids: NDArray[np.int32]


class ShardWriter:
    """Writes the shards of one split, each as soon as it is full.

    Args:
        folder: the split's folder.
        shards: the shards that exist already, from the first on.
    """

    def __init__(self, folder: Path, shards: Sequence[TokenShard]) -> None:
        self._folder = folder
        self._shards = list(shards)
        self._begin()

    def _begin(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._sources: dict[str, int] = {}
        self._source_ids = array("i")
        self._hashes = array("Q")
        self._characters = array("q")
        self._tokens = self._records = self._empty = self._binary = self._nulls = 0

    def next_record(self, binary: bool = False) -> None:
        """Start a record; documents added from now on belong to it.

        Args:
            binary: whether the record is a binary file that was skipped.

        Raises:
            RopewalkError: if a shard is full and cannot be written.
        """
        # Write a full shard only once another record follows, because the header marks the split's last shard.
        if self._tokens >= SHARD_TOKENS:
            self._write(last=False)
        self._records += 1
        self._binary += binary

    def add_nulls(self, count: int) -> None:
        """Count nulls that were left out of a document of the record."""
        self._nulls += count

    def add_empty(self) -> None:
        """Count a document of the record that was skipped because its text is blank."""
        self._empty += 1

    def add(self, input_ids: NDArray[np.int32], source: str, text_hash: int, characters: int) -> None:
        """Add a document of the record.

        Raises:
            RopewalkError: if one record has more tokens than a shard can hold.
        """
        self._tokens += len(input_ids)
        if self._tokens > _MOST_TOKENS:
            raise RopewalkError(
                f"a record of source {source!r} is too long: it fills a file of token ids to {self._tokens} tokens, "
                f"but the limit is {_MOST_TOKENS}; split the record"
            )
        self._ids.append(input_ids)
        self._source_ids.append(self._sources.setdefault(source, len(self._sources)))
        self._hashes.append(text_hash)
        self._characters.append(characters)

    def finish(self) -> tuple[TokenShard, ...]:
        """Write the last shard, and return all shards of the split, including earlier ones.

        Raises:
            RopewalkError: if it cannot be written.
        """
        self._write(last=True)
        return tuple(self._shards)

    def _write(self, last: bool) -> None:
        path = _shard_path(self._folder, len(self._shards))
        lengths = np.fromiter(map(len, self._ids), np.int64, len(self._ids))
        # The empty array comes first because np.concatenate refuses an empty list.
        ids = np.concatenate([np.zeros(0, np.int32), *self._ids])
        first_ids, last_ids = _ends(ids, lengths)
        source_ids, hashes = np.array(self._source_ids, np.int32), np.array(self._hashes, np.uint64)
        sources = tuple(self._sources)
        shard = TokenShard(
            path=path,
            last=last,
            records=self._records,
            empty_documents=self._empty,
            binary_files=self._binary,
            dropped_nulls=self._nulls,
            tokens=len(ids),
            sources=sources,
            digest=_content_digest(ids, lengths, sources, source_ids, hashes),
            lengths=lengths,
            source_ids=source_ids,
            hashes=hashes,
            characters=np.array(self._characters, np.int64),
            first_ids=first_ids,
            last_ids=last_ids,
        )
        _commit(shard, ids)
        self._shards.append(shard)
        self._begin()


def committed_shards(folder: Path, known: Sequence[TokenShard] = ()) -> tuple[TokenShard, ...]:
    """Open the shards of a split on disk, from the first to the last one or to the first gap.

    Args:
        folder: the split's folder, which may not exist yet.
        known: shards that are already open, from the first on; they are not read again.

    Raises:
        RopewalkError: as in :func:`open_shard`.
    """
    shards = list(known)
    while not (shards and shards[-1].last):
        path = _shard_path(folder, len(shards))
        if not path.exists():
            break
        shards.append(open_shard(path))
    return tuple(shards)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed runs.

    A temporary file may belong to a running process that works on the same split; that process then writes its shard
    again.

    Raises:
        RopewalkError: if the folder cannot be read or written.
    """
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if _LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise RopewalkError(f"cannot clear {folder}: {error.strerror or error}") from error


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
    try:
        table, header, _ = _table(path)
    except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
        raise damaged from error
    if header.get("format") != FORMAT:
        raise RopewalkError(
            f"{path} has format {header.get('format')}, but this version of ropewalk reads format {FORMAT}; delete "
            "the file and run again"
        )
    if (header["portion"], f"{header['block']:05}") != (path.parent.name, path.stem):
        raise RopewalkError(
            f"{path} has the contents of another file, {header['portion']}/{header['block']:05}.arrow; delete "
            f"{path.name} and run again"
        )
    column = table.column("input_ids")
    ids, offsets = as_numpy(column.values, np.int32), as_numpy(column.offsets, np.int32)
    lengths = np.diff(offsets).astype(np.int64)
    first_ids, last_ids = _ends(ids, lengths)
    return TokenShard(
        path=path,
        last=header["last"],
        records=header["records"],
        empty_documents=header["empty_documents"],
        binary_files=header["binary_files"],
        dropped_nulls=header.get("dropped_nulls", 0),
        tokens=header["tokens"],
        sources=tuple(header["sources"]),
        digest=header["sha256"],
        lengths=lengths,
        # Copies: the index outlives the memory map.
        source_ids=as_numpy(table.column("source"), np.int32).copy(),
        hashes=as_numpy(table.column("hash"), np.uint64).copy(),
        characters=as_numpy(table.column("characters"), np.int64).copy(),
        first_ids=first_ids,
        last_ids=last_ids,
    )


class TokenFile:
    """Reads token ids of a shard that :func:`open_shard` has verified.

    The file is read instead of mapped: pages of a mapped file count towards the process's memory, and a corpus has
    many shards.

    Attributes:
        offsets: int32 ``[documents + 1]``, start of each document among the ids, and the end of the last one.

    Raises:
        RopewalkError: if the file is missing or has changed.
    """

    _file: FileIO | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            table, _, start = _table(path)
            column = table.column("input_ids")
            self.offsets: NDArray[np.int32] = as_numpy(column.offsets, np.int32).copy()
            # Only the place of the ids is kept: they are read with plain file reads, since pages of a memory map would
            # count as this process's memory.
            self._place = column.values.buffers()[1].address - start if len(column.values) else 0
            self._file = FileIO(path)
        except (OSError, pyarrow.ArrowException, KeyError, ValueError) as error:
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
            self._file.seek(self._place + first * out.itemsize)
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


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.arrow"


def _table(path: Path) -> tuple[Any, dict[str, Any], int]:
    """The only batch of a shard's file, its header, and the address in memory at which the file begins."""
    with pyarrow.memory_map(str(path)) as file:
        # Without the seal: Arrow expects its footer at the end of the file.
        content = file.read_buffer(max(0, file.size() - _SEAL_BYTES))
    with pyarrow.ipc.open_file(pyarrow.BufferReader(content)) as reader:
        header = parse_json(reader.schema.metadata[_KEY])
        return reader.get_batch(0), header, content.address


def _ends(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """First and last id of each document; -1 for an empty one."""
    ends = np.cumsum(lengths)
    full = lengths > 0
    first, last = (np.full(len(lengths), -1, np.int32) for _ in range(2))
    # Tokens that are never targets are stored as ~id; compared with BOS and EOS, they count as their ids.
    first[full] = token_ids(ids[(ends - lengths)[full]])
    last[full] = token_ids(ids[ends[full] - 1])
    return first, last


def _content_digest(
    ids: NDArray[np.int32],
    lengths: NDArray[np.int64],
    sources: tuple[str, ...],
    source_ids: NDArray[np.int32],
    hashes: NDArray[np.uint64],
) -> str:
    """Digest of a shard's contents that depends neither on the machine nor on the version of Arrow."""
    state = hashlib.sha256(json.dumps([len(ids), len(lengths), sources]).encode())
    # Little-endian whatever the machine, so that digests agree everywhere.
    for values, kind in ((ids, "<i4"), (lengths, "<i8"), (source_ids, "<i4"), (hashes, "<u8")):
        state.update(np.ascontiguousarray(values, kind).data)
    return state.hexdigest()


def _commit(shard: TokenShard, ids: NDArray[np.int32]) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            with replacing(shard.path) as temporary, temporary.open("wb") as file:
                _write_file(file, shard, ids)
            return
        except RopewalkError as error:
            # Another process that starts the same split deletes temporary files, possibly this one; write it again.
            lost = isinstance(error.__cause__, FileNotFoundError)
            if not lost or attempt == _ATTEMPTS - 1:
                raise


def _write_file(file: BinaryIO, shard: TokenShard, ids: NDArray[np.int32]) -> None:
    """Write an Arrow file, followed by the SHA-256 of its bytes in 64 hexadecimal digits."""
    header = {
        "format": FORMAT,
        # Other names for these keys would need another FORMAT, and all documents would be tokenised again.
        "portion": shard.path.parent.name,
        "block": int(shard.path.stem),
        "last": shard.last,
        "records": shard.records,
        "documents": len(shard.lengths),
        "empty_documents": shard.empty_documents,
        "binary_files": shard.binary_files,
        # Absent in most shards, so that their bytes are those of earlier versions.
        **({"dropped_nulls": shard.dropped_nulls} if shard.dropped_nulls else {}),
        "tokens": shard.tokens,
        "sources": shard.sources,
        "sha256": shard.digest,
    }
    schema = _SCHEMA.with_metadata({_KEY: json.dumps(header).encode()})
    offsets = np.concatenate([[0], np.cumsum(shard.lengths)]).astype(np.int32)
    columns = [
        pyarrow.ListArray.from_arrays(numbers(offsets), numbers(ids)),
        *(numbers(column) for column in (shard.source_ids, shard.hashes, shard.characters)),
    ]
    hashing = HashingFile(file)
    with pyarrow.ipc.new_file(pyarrow.PythonFile(hashing, "w"), schema) as writer:
        writer.write_batch(pyarrow.record_batch(columns, schema=schema))
    # Behind the Arrow file, so that the digest covers all of it; _table cuts it off again.
    file.write(hashing.digest.hexdigest().encode())
