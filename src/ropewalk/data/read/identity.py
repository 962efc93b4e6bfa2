"""Identity of the inputs of packed rows, as plain values and a digest that keys their folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.data.read.documents import Document
from ropewalk.data.read.files import EMBEDDED, HUGGING_FACE, is_named, source_files
from ropewalk.data.read.hub import hugging_face_identity, parse_hugging_face
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest

if TYPE_CHECKING:
    from ropewalk.data.read.embedded import Split

HASHED_BYTES = 1 << 20
"""Files up to this size are identified by their content, larger ones by name, size and modification time."""

EMBEDDED_SPLITS: tuple[Split, ...] = ("train", "validation", "all")
RETRIEVAL_DOCUMENTS = "retrieval-documents"

_THREADS = 8

FileIdentity = list[str | int]
"""[name, SHA-256 of the content], or [name, size, modification time in ns]."""


def inputs_identity(specs: Sequence[SourceSpec]) -> dict[str, Any]:
    """Current identity of everything that the specs read.

    Files are named as in the specs, so machines agree if they access a folder by the same name.

    Returns:
        ``files``, their number, and ``sha256`` over their identities. A dataset on the Hub is identified by its cache
        key, the embedded corpus by its texts.

    Raises:
        RopewalkError: if a file is missing or unreadable or a dataset cannot be reached.
    """
    known: list[Any] = []
    files = 0
    for spec in specs:
        paths = source_files(spec)
        files += len(paths)
        known.append(named_identity(spec) or file_identities(spec, paths))
    return {"files": files, "sha256": digest(known)}


def named_identity(spec: SourceSpec) -> list[str]:
    """Identity of a dataset on the Hub or of the embedded corpus; empty for files.

    Raises:
        RopewalkError: if the dataset cannot be reached or the name is incomplete.
    """
    if spec.path.startswith(HUGGING_FACE):
        repository, config, split = parse_hugging_face(spec.path)
        return [repository, config or "", split, hugging_face_identity(repository, config)]
    if not is_named(spec.path):
        return []
    texts = hashlib.sha256()
    for document in embedded_corpus(spec.path):
        # As JSON, because plain concatenation would make different divisions of the same characters equal.
        texts.update(json.dumps([document.source, document.origin, document.text]).encode())
    return [EMBEDDED, texts.hexdigest()]


def embedded_corpus(path: str) -> list[Document]:
    """Documents of ``embedded[:train|validation|all]`` or ``embedded:retrieval-documents``, at most ten megabytes.

    Raises:
        RopewalkError: if the split is none of these or the library's sources cannot be read.
    """
    from ropewalk.data.read.embedded import embedded_documents
    from ropewalk.data.read.retrieval import retrieval_documents

    split = path.removeprefix(EMBEDDED).removeprefix(":") or "train"
    known: Split | None = next((each for each in EMBEDDED_SPLITS if each == split), None)
    if known is None and split != RETRIEVAL_DOCUMENTS:
        choices = ", ".join([*EMBEDDED_SPLITS, RETRIEVAL_DOCUMENTS])
        raise RopewalkError(f"unknown split in {path!r}; choose one of {choices}")
    try:
        return list(retrieval_documents() if known is None else embedded_documents(known))
    except OSError as error:
        raise RopewalkError(f"cannot read the documents that ropewalk ships (embedded): {error}") from error


def file_identities(spec: SourceSpec, paths: Sequence[Path]) -> list[FileIdentity]:
    """Identity of each of a source's files, in order, named as in the spec.

    Raises:
        RopewalkError: if a file is missing or unreadable.
    """
    if len(paths) < 2:
        return [_file_identity(spec, path) for path in paths]
    # hashlib and file reads release the GIL, so threads keep several disks or cores busy.
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_file_identity, repeat(spec), paths))


def _name(spec: SourceSpec, path: Path) -> str:
    place = Path(spec.path).expanduser()
    if place.is_file() and path != place:
        # The index of the file that the spec names lies beside it.
        return str(Path(spec.path).with_name(path.name))
    # `.` if the spec names the file itself.
    inside = path.relative_to(place).as_posix()
    return spec.path if inside == "." else f"{spec.path.rstrip('/')}/{inside}"


def _file_identity(spec: SourceSpec, path: Path) -> FileIdentity:
    try:
        status = path.stat()
        if status.st_size <= HASHED_BYTES:
            return [_name(spec, path), hashlib.sha256(path.read_bytes()).hexdigest()]
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror}") from error
    return [_name(spec, path), status.st_size, status.st_mtime_ns]
