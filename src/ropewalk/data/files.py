"""Files as the readers see them: kinds by suffix, folders in order, decompressed bytes, strict UTF-8."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from ropewalk.errors import RopewalkError

JSON_LINES = frozenset({".jsonl", ".jsonlines", ".json-lines", ".ndjson"})
PARQUET = frozenset({".parquet"})
COMPRESSIONS = frozenset({".gz", ".zst"})
# fmt: off
PROSE = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".adoc", ".org", ".html", ".htm", ".xml",
})
SOURCE_CODE = frozenset({
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".java", ".js", ".mjs",
    ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".pm", ".sh", ".bash", ".sql", ".scala", ".kt",
    ".swift", ".cs", ".fs", ".lua", ".r", ".jl", ".hs", ".ml", ".mli", ".el", ".lisp", ".clj", ".ex", ".exs",
    ".erl", ".dart", ".m", ".f90", ".zig", ".vue", ".css", ".scss", ".proto", ".cmake", ".yaml", ".yml",
    ".toml", ".ini", ".cfg",
})
# fmt: on
TEXT = PROSE | SOURCE_CODE

SNIFFED_BYTES = 8192
_BOM = "\ufeff"
_CHUNK = 1 << 17
# zstd --long=31, as large corpora are compressed, needs a window of 2 GiB; smaller files allocate less.
_MAX_ZSTD_WINDOW = 1 << 31


@dataclass(frozen=True)
class FolderListing:
    """The regular files of a folder in reading order, and how many hidden entries were passed over."""

    files: tuple[Path, ...]
    hidden: int


def split_suffix(path: Path) -> tuple[str, str]:
    """The suffix of the format and of the compression, in lower case: ``a.JSONL.gz`` is (.jsonl, .gz)."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        return (suffixes[0] if len(suffixes) == 2 else ""), suffixes[-1]
    return (suffixes[-1] if suffixes else ""), ""


def plain_stem(path: Path) -> str:
    """The file's name without the suffixes of its format and compression, a folder's name whole."""
    path = path.resolve()
    if path.is_dir():
        return path.name or "root"
    name = path.name
    for suffix in reversed(split_suffix(path)):
        name = name[: -len(suffix)] if suffix else name
    return name or path.name


def list_folder(folder: Path) -> FolderListing:
    """Every regular file below a folder, each folder's files by name before its subfolders by name.

    Hidden files and folders (``.git``) are counted and passed over; links to folders are not followed, so
    there is no endless loop.

    Raises:
        RopewalkError: if a folder cannot be read.
    """
    files: list[Path] = []
    hidden = 0

    def refuse(error: OSError) -> None:
        raise RopewalkError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        hidden += sum(name.startswith(".") for name in (*folders, *names))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(root)
        files.extend(
            here / name for name in sorted(names) if not name.startswith(".") and (here / name).is_file()
        )
    return FolderListing(tuple(files), hidden)


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed when its name ends in ``.gz`` or ``.zst``.

    Raises:
        RopewalkError: while reading, if the file is missing, unreadable, damaged or cut off.
    """
    compression = split_suffix(path)[1]
    try:
        with open(path, "rb") as file:
            if compression == ".gz":
                with gzip.open(file) as stream:
                    yield stream  # type: ignore[misc]  # a GzipFile reads as a BinaryIO
            elif compression == ".zst":
                with io.BufferedReader(_ZstdFrames(file), _CHUNK) as stream:
                    yield stream
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise RopewalkError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


class _ZstdFrames(io.RawIOBase):
    """All frames of a zstd file. zstandard's own stream reader takes a cut-off file for a complete one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._started = False
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._pending:
            compressed = self._frame.unused_data if self._frame.eof else b""
            compressed = compressed or self._file.read(_CHUNK)
            if not compressed:
                if self._started and not self._frame.eof:
                    raise EOFError("the last zstd frame has no end")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._started = True
            self._pending = self._frame.decompress(compressed)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count


def decode(content: bytes, path: Path, offset: int = 0) -> str:
    """UTF-8 bytes as text, a byte order mark at the file's beginning removed.

    Args:
        content: bytes of the (decompressed) file.
        path: the file, for the message.
        offset: where in the file ``content`` begins, in bytes.

    Raises:
        RopewalkError: if they are not UTF-8; the message gives the file and the byte offset.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        position = offset + error.start
        raise RopewalkError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {position}"
        ) from error
    return text.removeprefix(_BOM) if offset == 0 else text


def read_text(path: Path) -> str:
    """A whole file as text, line ends as they are."""
    with open_bytes(path) as stream:
        return decode(stream.read(), path)


def read_text_if_text(path: Path) -> str | None:
    """A whole file as text, or None where its first bytes hold a NUL or it is not UTF-8 (a binary file)."""
    with open_bytes(path) as stream:
        head = stream.read(SNIFFED_BYTES)
        if b"\0" in head:
            return None
        content = head + stream.read()
    try:
        return content.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError:
        return None
