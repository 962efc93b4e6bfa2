"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError

from ropewalk.errors import RopewalkError

PARTIAL, REPLACED, DELETED = "partial", "old", "deleted"
"""Kinds of temporary names: being written, replaced by a new one, being deleted."""

_LEFT_OVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}(\.(?P<kind>\w+))?")
_EARLIER = re.compile(r"\.(stage\d+-step\d+|model)\.(partial|old)")
"""Names that earlier versions gave to what they wrote and deleted."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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

    A folder that stands there already is replaced. On failure nothing is left of the new one; what a killed process
    leaves is for :func:`remove_left_overs`.

    Raises:
        RopewalkError: if the disk is full or the place cannot be written.
    """
    temporary = unique_name(folder, PARTIAL)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        # safetensors' files are readable to their writer alone; a new folder's mode tells what the umask asks for.
        mode = temporary.stat().st_mode & 0o666
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(mode)
                _sync(path)
        if folder.exists():
            retired = unique_name(folder, REPLACED)
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


def unique_name(path: Path, kind: str) -> Path:
    """A hidden name beside a path that no other process takes; ``kind`` is PARTIAL, REPLACED or DELETED."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{kind}")


def is_left_over(name: str) -> bool:
    """Whether a name is one of the temporary ones that files and folders have until they are whole."""
    return bool(_LEFT_OVER.fullmatch(name) or _EARLIER.fullmatch(name))


def remove_left_overs(folder: Path, name: str | None = None) -> None:
    """Clear a folder of what killed processes left under temporary names, and put back what one had taken away.

    Only a process that holds the lock of the folder may call this: to the others it would look the same while they
    write.

    Args:
        folder: looked through, without what lies in its subfolders.
        name: only what belongs to this file or folder in it; everything if None.

    Raises:
        RopewalkError: if something cannot be removed.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if not is_left_over(path.name):
            continue
        found = _LEFT_OVER.fullmatch(path.name)
        of, kind = (path.name, None) if found is None else (found["name"], found["kind"])
        if name not in (None, of, f"{of}.{kind}"):
            continue
        with writing(path):
            if kind == REPLACED and not (folder / of).exists():
                # Killed between taking the old one away and giving its name to the new one.
                path.rename(folder / of)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


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


def plain_name(name: Any, place: Path) -> str:
    """The name of a file directly within a folder, as a manifest there lists it.

    Args:
        name: what the manifest says.
        place: the manifest, for the message.

    Raises:
        RopewalkError: for anything that leads elsewhere on any system: a path, absolute or relative, ``..``, a drive,
            an empty name, one with a NUL, or no text at all.
    """
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == PureWindowsPath(name).name == name
    )
    if not plain:
        raise RopewalkError(
            f"{place} lists the file {name!r}; it may list names within its own folder alone, so do not use what it "
            "belongs to"
        )
    return str(name)


def check_model_place(name: str | os.PathLike[str]) -> None:
    """Refuse what can only be meant as a folder or file on this machine, and is none.

    Raises:
        RopewalkError: for a missing ``./model``, ``/models/x``, ``a/b/c`` or ``config.json``; what could be a model's
            name on the Hugging Face Hub passes.
    """
    if not str(name):
        raise RopewalkError(
            "the name of the model is empty; give a folder, a file or a model on the Hugging Face Hub"
        )
    if not Path(name).exists() and (not _HUB_ID.fullmatch(str(name)) or str(name).endswith(".json")):
        raise RopewalkError(f"there is no folder or file {name}")


def not_found(name: str | os.PathLike[str], what: str, error: BaseException) -> RopewalkError:
    """What to raise where a library found neither a folder here nor a model on the Hub.

    Args:
        name: as the user gave it.
        what: is missing, such as ``config.json``.
        error: the library's; its first line is repeated.
    """
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return RopewalkError(f"there is no folder {name}, and the Hub gave no {what} for it: {reason}")


def check_writable(path: Path) -> None:
    """Raise for a file that could not be written, before the work whose result goes there.

    Raises:
        RopewalkError: naming the path and the reason.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    with writing(path), tempfile.TemporaryFile(dir=folder):
        pass


def parse_json(text: str | bytes, strict: bool = False) -> Any:
    """A JSON document; whatever is wrong with it is one kind of error.

    Args:
        text: as text, or as bytes in UTF-8.
        strict: whether to refuse what Python reads beyond the standard: NaN, infinity, numbers beyond float64.

    Raises:
        json.JSONDecodeError: also for bytes that are no UTF-8, brackets nested deeper than Python reads, and numbers of
            thousands of digits.
    """
    options: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if strict else {}
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **options)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "its brackets are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _NoJson(reason, "", 0) from error


class _NoJson(json.JSONDecodeError):
    """An error without a place in the text."""

    def __str__(self) -> str:
        return self.msg


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is beyond the largest float64 number")
    return value


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
