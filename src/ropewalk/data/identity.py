"""What packed rows depend on, as plain values and one digest: the key of their folder."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.data.documents import SourceSpec
from ropewalk.data.readers import EMBEDDED, HUGGING_FACE, parse_hugging_face, source_files
from ropewalk.data.records import hugging_face_identity
from ropewalk.errors import RopewalkError

HASHED_BYTES = 1 << 20
"""A file up to this size is known by its content; a larger one by its place, size and time of change."""


def digest(value: Any) -> str:
    """SHA-256 over a value of JSON's kinds, the same whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def inputs_identity(specs: Sequence[SourceSpec]) -> dict[str, Any]:
    """The identity of everything that the specs read, as it is now.

    Returns:
        ``files``, how many there are, and ``sha256`` over their identities; for a dataset of the hub its
        own cache key, for the embedded corpus the running Python.

    Raises:
        RopewalkError: if a file is missing or unreadable or a dataset cannot be reached.
    """
    known: list[Any] = []
    files = 0
    for spec in specs:
        if spec.path.startswith(HUGGING_FACE):
            repository, config, split = parse_hugging_face(spec.path)
            known.append([hugging_face_identity(repository, config), split])
            continue
        paths = source_files(spec)
        files += len(paths)
        if not paths and spec.path.split(":")[0] == EMBEDDED:
            known.append([platform.python_implementation(), sys.version, sys.base_prefix])
        known.append([_file_identity(path) for path in paths])
    return {"files": files, "sha256": digest(known)}


def _file_identity(path: Path) -> list[str | int]:
    try:
        status = path.stat()
        if status.st_size <= HASHED_BYTES:
            return [str(path), hashlib.sha256(path.read_bytes()).hexdigest()]
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror}") from error
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
