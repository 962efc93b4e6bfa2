"""File access for the readers: file kinds by suffix, the files of a source in order, decompression, strict UTF-8."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from ropewalk.io.files import LFS_POINTER, refuse_lfs_pointer
from ropewalk.io.urls import credentials, masked, without

HUGGING_FACE = "hf:"
EMBEDDED = "embedded"

Kind = Literal["lines", "parquet", "arrow", "text", "maybe_text", "closed", "tokens", "index"]
"""Contents of a file: JSON lines; a Parquet or Arrow table; a text; a text if it decodes; a compressed file of unknown
content, which is not read; token ids; an index of token ids. The name decides, except for the last two, which
:mod:`ropewalk.data.read.token_files` tells from others, and for JSON lines under the name of another kind."""

JSON_LINES = frozenset({".jsonl", ".jsonlines", ".json-lines", ".ndjson"})
PARQUET = frozenset({".parquet"})
ARROW = frozenset({".arrow"})
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

DATASET_STATE, DATASET_INFO, DATASET_DICT = "state.json", "dataset_info.json", "dataset_dict.json"
"""What ``save_to_disk`` of datasets writes beside the Arrow files, and in the folder above several splits."""

DATATROVE_COMPANIONS = (".ds.index", ".ds.metadata", ".ds.loss")

LONGEST_DOCUMENT = 1 << 27
"""Most bytes of a line of JSON lines or of a text. A document is held in memory as a whole, and its tokens take about
100 times as many bytes while it is tokenised; the longest contexts, of ten million tokens, are about 50 MB of text."""

SNIFFED_BYTES = 8192
_BOM = "\ufeff"
_CHUNK = 1 << 17
# Small, because a chunk of a very repetitive file can decompress to a thousand times its size.
_ZSTD_CHUNK = 1 << 14
# zstd --long=31, as large corpora are compressed, needs a window of 2 GiB; smaller files allocate less.
_MAX_ZSTD_WINDOW = 1 << 31


@dataclass(frozen=True)
class FolderListing:
    """The regular files of a folder in reading order, and the number of hidden entries that were skipped."""

    files: tuple[Path, ...]
    hidden: int


def split_suffix(path: Path) -> tuple[str, str]:
    """Suffixes of format and compression in lower case: ``a.JSONL.gz`` gives (.jsonl, .gz)."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        return (suffixes[0] if len(suffixes) == 2 else ""), suffixes[-1]
    return (suffixes[-1] if suffixes else ""), ""


def plain_stem(path: Path) -> str:
    """Name of a file without the suffixes of format and compression; the full name of a folder.

    Raises:
        RopewalkError: if the name is not UTF-8, and so cannot name a source.
    """
    # Resolved, because `.` and `..` have no name of their own.
    path = path.resolve()
    stem = path.name
    if path.is_dir():
        stem = stem or "root"
    else:
        for suffix in reversed(split_suffix(path)):
            stem = stem[: -len(suffix)] if suffix else stem
        stem = stem or path.name
    try:
        stem.encode()
    except UnicodeEncodeError as error:
        raise RopewalkError(f"the name of {os.fsencode(path)!r} is not UTF-8; rename it") from error
    return stem


def file_kind(path: Path, in_folder: bool) -> Kind:
    """Kind of a file's contents, according to its name.

    A ``.json`` file in a folder is usually a configuration file, which reads as plain text.

    Args:
        path: the file.
        in_folder: whether the user named a folder that contains the file, rather than the file itself.

    Raises:
        RopewalkError: if the user named a file whose suffix is not supported.
    """
    suffix, compression = split_suffix(path)
    if suffix in JSON_LINES:
        return "lines"
    if suffix in PARQUET and not compression:
        return "parquet"
    if suffix in ARROW and not compression:
        return "arrow"
    if suffix == ".json" and (compression or not in_folder):
        return "lines"
    if suffix in TEXT:
        return "text"
    if in_folder:
        # A compressed file of unknown content (an archive, say) is not opened at all.
        return "closed" if compression else "maybe_text"
    if suffix or compression:
        raise RopewalkError(
            f"unsupported suffix {''.join((suffix, compression))!r} of {path}; ropewalk reads .jsonl, .json, text "
            "and source-code files (each also .gz or .zst), .parquet, .arrow, token ids (.bin, .ds, .npy), and "
            "folders of such files"
        )
    return "maybe_text"


def names_records(path: Path) -> bool:
    """Whether the name of a file says that it holds many records; that of a ``.json`` file leaves it open."""
    suffix, compression = split_suffix(path)
    return suffix in JSON_LINES or (suffix in PARQUET | ARROW and not compression)


def is_named(path: str) -> bool:
    """Whether a source's path names a dataset on the Hub or the embedded corpus instead of a file."""
    return path.startswith(HUGGING_FACE) or path == EMBEDDED or path.startswith(EMBEDDED + ":")


def hub_advice(path: str) -> str:
    """How to name a dataset on the Hub, if a path that does not exist looks like one; otherwise empty."""
    looks = re.fullmatch(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", path)
    return f"; for a dataset on the Hub, write {HUGGING_FACE}{path}" if looks else ""


def existing_path(name: str) -> Path:
    """Path of a file or folder that the user named.

    Raises:
        RopewalkError: if it does not exist, or is neither a file nor a folder.
    """
    try:
        path = Path(name).expanduser()
        exists = bool(name) and path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        # A name that is too long, one with a NUL, or ~someone where there is no such user.
        raise RopewalkError(
            f"there is no file or folder {masked(name)!r}: {without(str(error), credentials(name))}"
        ) from error
    if not exists:
        advice = hub_advice(name)
        if "://" in name:
            advice = (
                "; ropewalk does not read URLs; copy or mount the files, or give hf:owner/name for a dataset "
                "on the Hub"
            )
        raise RopewalkError(f"there is no file or folder {masked(name)!r}{advice}")
    if not path.is_dir() and not path.is_file():
        raise RopewalkError(
            f"{name} is neither a file nor a folder; a pipe or a device must be saved to a file first"
        )
    return path


def source_files(spec: SourceSpec) -> tuple[Path, ...]:
    """Files of a source in reading order, with their companions; empty for a dataset on the Hub or the embedded corpus.

    Raises:
        RopewalkError: if the file or folder does not exist.
    """
    if is_named(spec.path):
        return ()
    path = existing_path(spec.path)
    return list_folder(path).files if path.is_dir() else (path, *companions(path))


def companions(path: Path) -> tuple[Path, ...]:
    """Existing files that belong to a file of token ids: index, metadata and loss mask; none for other files."""
    names = {
        ".ds": [path.stem + suffix for suffix in DATATROVE_COMPANIONS],
        ".bin": [path.stem + ".idx"],
        ".npy": [path.stem + ".csv.gz"],
    }.get(path.suffix.lower(), [])
    return tuple(found for name in names if (found := path.with_name(name)).is_file())


def list_folder(folder: Path) -> FolderListing:
    """List all regular files below a folder: first a folder's files by name, then its subfolders by name.

    Hidden files and folders (``.git``) are counted and skipped. Links to folders are not followed, because they could
    form a cycle. Of a folder that datasets saved, only the files that its state names are listed: ``save_to_disk`` and
    ``map`` leave others there.

    Raises:
        RopewalkError: if a folder cannot be read, or holds several splits of a dataset or not all of its files.
    """
    files: list[Path] = []
    hidden = 0

    def refuse(error: OSError) -> None:
        raise RopewalkError(f"cannot read the folder {error.filename}: {error.strerror}") from error

    for root, folders, names in os.walk(folder, onerror=refuse):
        hidden += sum(name.startswith(".") for name in (*folders, *names))
        # In place, which is how os.walk takes an order and leaves folders out. Sorted, so that machines agree.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(root)
        if DATASET_DICT in names and len(folders) > 1:
            raise RopewalkError(
                f"{here} holds several splits of a dataset ({', '.join(folders)}); give one split, such as "
                f"{here / folders[0]}"
            )
        names = _dataset_files(here, names)
        files.extend(
            here / name for name in sorted(names) if not name.startswith(".") and (here / name).is_file()
        )
    return FolderListing(tuple(files), hidden)


def _dataset_files(folder: Path, names: list[str]) -> list[str]:
    """The names without what is no data of a dataset that ``save_to_disk`` wrote."""
    if DATASET_DICT in names:
        return [name for name in names if name != DATASET_DICT]
    if DATASET_STATE not in names or DATASET_INFO not in names:
        return names
    state = folder / DATASET_STATE
    try:
        stored = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
    except OSError as error:
        raise RopewalkError(f"cannot read {state}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        # Files of other programs that happen to have both names.
        return names
    if missing := [name for name in stored if name not in names]:
        raise RopewalkError(f"{state} names {missing[0]}, which is missing; copy the whole folder again")
    return [
        name
        for name in names
        if name in stored or not (name.endswith(".arrow") or name in (DATASET_STATE, DATASET_INFO))
    ]


def hidden_entries(specs: Sequence[SourceSpec]) -> int:
    """Number of files and folders that are skipped in the specs' folders because their names begin with a dot."""
    folders = [Path(spec.path).expanduser() for spec in specs if not is_named(spec.path)]
    return sum(list_folder(folder).hidden for folder in folders if folder.is_dir())


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; decompress it if its name ends in ``.gz`` or ``.zst``.

    Raises:
        RopewalkError: while reading, if the file is missing, unreadable, damaged or truncated.
    """
    compression = split_suffix(path)[1]
    try:
        with open(path, "rb", _CHUNK) as file:
            if compression and not os.fstat(file.fileno()).st_size:
                # Both decompressors accept an empty file, but even compressed empty content has a header.
                raise EOFError("the compressed file is empty")
            if compression == ".gz":
                with gzip.open(file) as stream:
                    yield stream  # type: ignore[misc]  # a GzipFile reads as a BinaryIO
            elif compression == ".zst":
                with io.BufferedReader(_ZstdFrames(file), _CHUNK) as stream:
                    yield stream
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RopewalkError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


class _ZstdFrames(io.RawIOBase):
    """Reads all frames of a zstd file; zstandard's own stream reader does not detect a truncated file."""

    def __init__(self, file: BinaryIO) -> None:
        # Here, because an evaluation on a server reads files and may do without.
        import zstandard

        self._file, self._error = file, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._started = False
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._pending:
            # What follows the end of a frame is the beginning of the next one.
            compressed = self._frame.unused_data if self._frame.eof else b""
            compressed = compressed or self._file.read(_ZSTD_CHUNK)
            if not compressed:
                if self._started and not self._frame.eof:
                    raise EOFError("the last zstd frame has no end")
                # 0 tells BufferedReader that the file has ended.
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._started = True
            try:
                self._pending = memoryview(self._frame.decompress(compressed))
            except self._error as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count


def decode(content: bytes, path: Path, offset: int = 0) -> str:
    """Decode UTF-8, and remove a byte order mark at the beginning of the file.

    Args:
        content: bytes of the (decompressed) file.
        path: the file, for the message.
        offset: offset of ``content`` in the file, in bytes.

    Raises:
        RopewalkError: if the bytes are not UTF-8; the message gives the file and the byte offset.
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        position = offset + error.start
        raise RopewalkError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02x} at offset {position}; convert it to UTF-8"
        ) from error
    return text.removeprefix(_BOM) if offset == 0 else text


def read_text(path: Path, most: int = LONGEST_DOCUMENT) -> str:
    """Read a whole file as text, without converting line ends.

    Args:
        path: path of the file.
        most: maximum number of bytes.

    Raises:
        RopewalkError: as in :func:`open_bytes` and :func:`decode`, if the file has more bytes, is a Git LFS pointer, or
            contains a NUL, as UTF-16 and binary files do.
    """
    refuse_lfs_pointer(path)
    with open_bytes(path) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise too_long(path, most)
    # Found in the bytes, since a user can look up an offset in bytes in the file.
    nul = content.find(b"\0")
    text = decode(content, path)
    if nul >= 0:
        raise RopewalkError(f"{path} is not UTF-8 text: it contains a NUL byte at offset {nul}")
    return text


def read_text_if_text(path: Path) -> str | None:
    """Read a whole file as text; None if it contains a NUL or is not UTF-8 (a binary file), or is a Git LFS pointer.

    Raises:
        RopewalkError: if it cannot be read, or is a text of more than ``LONGEST_DOCUMENT`` bytes.
    """
    with open_bytes(path) as stream:
        # A binary file may be large, and its first bytes usually tell.
        head = stream.read(SNIFFED_BYTES)
        if b"\0" in head or head.startswith(LFS_POINTER):
            return None
        content = head + stream.read(LONGEST_DOCUMENT + 1 - len(head))
    if b"\0" in content:
        return None
    try:
        text = content.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError:
        return None
    if len(content) > LONGEST_DOCUMENT:
        raise too_long(path)
    return text


def too_long(origin: str | Path, most: int = LONGEST_DOCUMENT) -> RopewalkError:
    """The error to raise for a text or a line of more than ``most`` bytes."""
    return RopewalkError(
        f"{origin}: the text is longer than {most >> 20} MiB, the most that ropewalk reads as one "
        "document; divide it into several documents"
    )
