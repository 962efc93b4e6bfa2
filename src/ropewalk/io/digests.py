"""Digests that detect damage to files, and to the JSON record that lists them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import plain_name, write_json


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys.

    Raises:
        ValueError: for NaN or infinity, which JSON does not have.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and hexadecimal SHA-256 of a file when it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """The digest of a file in its current state.

        Raises:
            OSError: if it cannot be read.
        """
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.stat().st_size, sha256)


class HashedFile(io.BufferedWriter):
    """A new file that is hashed while it is written, from its start to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any, /) -> int:
        """Append bytes."""
        self._sha256.update(data)
        self._bytes += memoryview(data).nbytes
        return super().write(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Refuse to write anywhere but at the end, since the bytes are hashed in their order."""
        raise io.UnsupportedOperation(
            "a file that is hashed while it is written has no other place than its end"
        )

    def digest(self) -> FileDigest:
        """Size and digest of what was written."""
        return FileDigest(self._bytes, self._sha256.hexdigest())


def digests(paths: Iterable[Path]) -> dict[str, FileDigest]:
    """Digests of files by file name."""
    return {path.name: FileDigest.of(path) for path in paths}


def damage(path: Path, wanted: FileDigest) -> str | None:
    """Describe the damage to a file, such as ``model.safetensors is 10 bytes short``; None if it is intact."""
    try:
        size = path.stat().st_size
        if size < wanted.bytes:
            return f"{path.name} is {wanted.bytes - size} bytes short"
        if size > wanted.bytes:
            return f"{path.name} is {size - wanted.bytes} bytes too long"
        # Sizes first: they tell most damage at once, while hashing reads the whole file.
        if FileDigest.of(path) != wanted:
            return f"{path.name} was altered: its SHA-256 differs"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return None


def write_sealed(path: Path, values: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
    """Write a record as JSON: its values, the digests of files, and a digest of the record itself.

    Args:
        path: path of the record.
        values: plain values; the names ``files`` and ``sha256`` are reserved.
        files: digests by file name.
    """
    whole = {**values, "files": {name: asdict(each) for name, each in sorted(files.items())}}
    write_json(path, {**whole, "sha256": digest(whole)})


def read_sealed(values: Mapping[str, Any], path: Path) -> dict[str, FileDigest]:
    """The digests in a record that :func:`write_sealed` wrote, given its parsed JSON.

    Args:
        values: the parsed record.
        path: path of the record, for the message.

    Raises:
        ValueError: if the record was altered.
        RopewalkError: if it names a file outside its own folder.
        KeyError, TypeError, AttributeError: if it is not such a record.
    """
    # The digest was taken of everything but itself.
    unsealed = {key: value for key, value in values.items() if key != "sha256"}
    if values["sha256"] != digest(unsealed):
        raise ValueError(f"{path.name} was altered: its SHA-256 differs")
    return {
        plain_name(name, path): FileDigest(int(known["bytes"]), str(known["sha256"]))
        for name, known in values["files"].items()
    }


def path_digest(path: Path) -> str:
    """Compute the SHA-256 digest of a file, or of the names and contents of all files in a folder.

    Raises:
        RopewalkError: if a file cannot be read.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    try:
        return digest([[each.relative_to(path).as_posix(), FileDigest.of(each).sha256] for each in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
