"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ropewalk.errors import RopewalkError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the disk into one sentence.

    Raises:
        RopewalkError: naming the path and the reason (no space, no permission).
    """
    try:
        yield
    except OSError as error:
        raise RopewalkError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name; it takes its own name when the block ends well.

    A folder that stands there already is replaced. On failure nothing is left of the new one.

    Raises:
        RopewalkError: if the disk is full or the place cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        if folder.exists():
            retired = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(retired, ignore_errors=True)
            folder.rename(retired)
            temporary.rename(folder)
            shutil.rmtree(retired)
        else:
            temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        # safetensors reports a failed write as its own error, with the system's words in it.
        reason = getattr(error, "strerror", None) or str(error)
        raise RopewalkError(f"cannot write {folder}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside a file; it takes the file's name when the block ends well.

    The temporary name keeps the suffix, by which writers know the format. Missing folders are made.

    Raises:
        RopewalkError: if the disk is full or the place cannot be written.
    """
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RopewalkError(f"cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raise for a file that could not be written, before the work whose result goes there.

    Raises:
        RopewalkError: naming the path and the reason.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    with writing(path), tempfile.TemporaryFile(dir=folder):
        pass


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
