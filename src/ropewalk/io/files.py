"""Files that appear complete or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.urls import credentials, masked, without

PARTIAL, REPLACED, DELETED = "partial", "old", "deleted"
"""Suffixes of temporary names: being written, replaced by a new one, being deleted."""

_LEFT_OVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}(\.(?P<kind>\w+))?")
_EARLIER = re.compile(r"\.(stage\d+-step\d+|model)\.(partial|old)")
"""Suffixes that earlier versions used for files being written and deleted."""
_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.-]+):/")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one sentence.

    Raises:
        RopewalkError: naming the path and the reason (no space, no permission).
    """
    try:
        yield
    except OSError as error:
        raise RopewalkError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill; it gets its own name when the block succeeds.

    An existing folder of that name is replaced. If the block fails, the new folder is removed. What a killed process
    leaves behind is removed by :func:`remove_left_overs`.

    Raises:
        RopewalkError: if the disk is full or the path cannot be written.
    """
    temporary = unique_name(folder, PARTIAL)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        # safetensors writes files that only their owner can read; the mode of a new folder reveals the umask.
        mode = temporary.stat().st_mode & 0o666
        for path in temporary.rglob("*"):
            if path.is_file():
                path.chmod(mode)
                # On the disk before the rename: after a power cut the final name must not hold empty files.
                _sync(path)
        if folder.exists():
            # A folder cannot replace a full one in one step, so the old one moves away first.
            retired = unique_name(folder, REPLACED)
            folder.rename(retired)
            temporary.rename(folder)
            shutil.rmtree(retired)
        else:
            temporary.rename(folder)
    except _write_errors() as error:
        # safetensors reports a failed write as its own error, which contains the system's message.
        reason = getattr(error, "strerror", None) or str(error)
        raise RopewalkError(f"cannot write {folder}: {reason}") from error
    finally:
        # After a successful rename there is nothing left under the temporary name.
        shutil.rmtree(temporary, ignore_errors=True)


def _write_errors() -> tuple[type[Exception], ...]:
    """Errors of a failed write: those of the system, and of safetensors, which whoever writes with it has imported."""
    safetensors = sys.modules.get("safetensors")
    return (OSError,) if safetensors is None else (OSError, safetensors.SafetensorError)


def unique_name(path: Path, kind: str) -> Path:
    """A hidden name beside a path, unique among processes; ``kind`` is PARTIAL, REPLACED or DELETED."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{kind}")


def is_left_over(name: str) -> bool:
    """Whether a name is one of the temporary names of incomplete files and folders."""
    return bool(_LEFT_OVER.fullmatch(name) or _EARLIER.fullmatch(name))


def remove_left_overs(folder: Path, *names: str) -> None:
    """Remove what killed processes left under temporary names, and restore what one was about to replace.

    Only a process that holds the lock of the folder may call this: files that another process is still writing look the
    same.

    Args:
        folder: folder to search, without its subfolders.
        names: remove only what belongs to these files or folders in it; none for everything.

    Raises:
        RopewalkError: if something cannot be removed.
    """
    wanted = set(names)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if not is_left_over(path.name):
            continue
        found = _LEFT_OVER.fullmatch(path.name)
        of, kind = (path.name, None) if found is None else (found["name"], found["kind"])
        # `replacing` keeps the suffix of the file last, so there `kind` is that suffix and `of` the stem.
        if wanted and not wanted & {of, f"{of}.{kind}"}:
            continue
        with writing(path):
            if kind == REPLACED and not (folder / of).exists():
                # The process was killed after moving the old one away and before renaming the new one.
                path.rename(folder / of)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                # Machines that share a folder may clear it at the same time.
                path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside a file; it gets the file's name when the block succeeds.

    The temporary name keeps the suffix, from which writers infer the format. Missing folders are created.

    Raises:
        RopewalkError: if the disk is full or the path cannot be written.
    """
    # The suffix stays last, because some writers choose a format by it or append it.
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # Flushed before the rename, so that a power cut cannot leave the final name on an empty file.
        _sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise RopewalkError(f"cannot write {path}: {error.strerror or error}") from error
    # Ctrl-C too must leave no temporary file behind.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_plain(name: Any) -> bool:
    """Whether a value names a file directly within a folder on any system: no path, no drive, no ``..``."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        # Half of a surrogate pair, which JSON can spell but no name of a file contains.
        return False
    # Both kinds of path: the name may have been given on another operating system.
    return PurePosixPath(name).name == PureWindowsPath(name).name == name


def path_inside(folder: Path, name: str) -> Path | None:
    """Path of a file in a folder or its subfolders, from a name given elsewhere; None if it would lie outside.

    Args:
        folder: the folder.
        name: plain names joined by ``/``.
    """
    if not all(is_plain(part) for part in name.split("/")):
        return None
    path = folder / name
    # A link in the folder may lead out of it. Not resolve, which raises for links that lead in a circle.
    home, there = (Path(os.path.realpath(each)) for each in (folder, path.parent))
    return path if there.is_relative_to(home) else None


def plain_name(name: Any, place: Path) -> str:
    """Validate the name of a file directly within a folder, as a manifest there lists it.

    Args:
        name: the name in the manifest.
        place: path of the manifest, for the message.

    Raises:
        RopewalkError: for anything that leads elsewhere on any system: an absolute or relative path, ``..``, a drive,
            an empty name, a name with a NUL, or a value that is not a string.
    """
    if not is_plain(name):
        raise RopewalkError(
            f"{place} lists the file {name!r}, but may list only files in its own folder; do not use the data in "
            "this folder"
        )
    return str(name)


def check_model_place(name: str | os.PathLike[str]) -> None:
    """Raise for a name that can only mean a folder or file on this machine, if that does not exist.

    Raises:
        RopewalkError: for a missing ``./model``, ``/models/x``, ``a/b/c`` or ``config.json``; possible names of models
            on the Hugging Face Hub pass.
    """
    if not str(name):
        raise RopewalkError(
            "the name of the model is empty; give a folder, a file or a model on the Hugging Face Hub"
        )
    if not Path(name).exists() and (not _HUB_ID.fullmatch(str(name)) or str(name).endswith(".json")):
        raise RopewalkError(f"there is no folder or file {masked(str(name))}")


def refuse_adapter(name: str | os.PathLike[str], beside_weights: bool = True) -> None:
    """Raise for a folder with an adapter, which transformers would add to the weights there, or to another base.

    Args:
        name: the folder; anything else passes.
        beside_weights: whether to raise for weights and adapter in one folder too, as for everything but a tokenizer.

    Raises:
        RopewalkError: naming the folder, and what to give instead.
    """
    folder = Path(name)
    if not (folder / "adapter_config.json").is_file():
        return
    if any(folder.glob("model*.safetensors*")):
        if not beside_weights:
            return
        raise adapter_beside_weights(folder)
    raise RopewalkError(
        f"{folder} contains an adapter and no model; give a folder with the merged model, such as model/ "
        "in the output folder of a ropewalk run"
    )


def adapter_beside_weights(name: str | os.PathLike[str]) -> RopewalkError:
    """The error to raise for a model with an adapter beside it, of which nobody knows whether it is merged already."""
    return RopewalkError(
        f"{name} contains both the weights of a model and adapter_config.json, so transformers would add the adapter "
        "to these weights, a second time if they are merged; if they are, or if you want the model without the "
        "adapter, move adapter_config.json to another folder; otherwise merge the adapter, and give the merged model"
    )


def refuse_lfs_pointer(path: Path) -> None:
    """Raise for a file that Git LFS has not downloaded: a few lines of text in place of its content.

    Raises:
        RopewalkError: naming the file, or if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    if start == LFS_POINTER:
        raise RopewalkError(
            f"{path} is a Git LFS pointer instead of the file; run `git lfs pull` in its folder"
        )


def not_found(name: str | os.PathLike[str], what: str, error: BaseException) -> RopewalkError:
    """The error to raise if a library found neither a local folder nor a model on the Hub.

    Args:
        name: name as the user gave it.
        what: what is missing, such as ``config.json``.
        error: the library's error, whose first line is repeated.
    """
    # Only the first line: libraries append paragraphs of advice.
    reason = first_line(error)
    return RopewalkError(
        f"there is no folder {masked(str(name))}, and no {what} could be loaded for it from the Hugging Face Hub: "
        f"{without(reason, credentials(str(name)))}"
    )


def refuse_url(path: Path, what: str) -> None:
    """Raise for the URL of an object store where a folder is needed.

    As a path, ``s3://bucket/rows`` is a relative one, so the files would end up in a folder named ``s3:``.

    Args:
        path: the folder that the user named; a path has lost one of the slashes.
        what: what it is to hold, for the message.

    Raises:
        RopewalkError: with the URL.
    """
    if found := _URL.match(str(path)):
        url = masked(f"{found['protocol']}://{str(path)[found.end() :]}")
        raise RopewalkError(
            f"{url} is a URL, but {what} can only be written to a folder; give a folder on this machine and upload it "
            "when it is complete, or mount the bucket as a folder"
        )


def check_writable(path: Path) -> None:
    """Raise for a file that could not be written, before doing the work whose result it receives.

    Raises:
        RopewalkError: naming the path and the reason.
    """
    # The nearest folder that exists, because the writer will create the missing ones.
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    # A real file: permissions alone do not show a read-only mount or a full disk.
    with writing(path), tempfile.TemporaryFile(dir=folder):
        pass


SAID_FROM = 10**9
"""Bytes from which a command says what it will write."""


def room_for(folder: Path, needed: int, what: str) -> str | None:
    """Say how much of a disk will be used, before the work whose result it receives.

    Args:
        folder: where files will be written; it need not exist yet.
        needed: bytes.
        what: what takes them, in the plural.

    Returns:
        A sentence without its full stop; None below ``SAID_FROM``.

    Raises:
        RopewalkError: if the disk has less.
    """
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise RopewalkError(
            f"{what} take {_amount(needed)}, but the disk of {folder} has only {_amount(free)} left; free some space, "
            "or choose a folder on another disk"
        )
    if needed < SAID_FROM:
        return None
    return f"{what} take {_amount(needed)} in {folder}, whose disk has {_amount(free)} left"


def _amount(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= SAID_FROM else f"{size / 1e6:,.1f} MB"


def json_fault(error: Exception) -> str:
    """What is wrong with a JSON document, from an error of ``json.loads``."""
    if isinstance(error, RecursionError):
        return "its brackets are nested too deeply"
    # For a number of thousands of digits, Python adds advice on its own settings.
    return str(error).partition("; use sys.")[0]


def field_fault(error: Exception) -> str:
    """What is wrong with the fields of a JSON object, from an error of reading them; a KeyError names a missing one."""
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)


def parse_json(text: str | bytes, strict: bool = False) -> Any:
    """Parse a JSON document; every kind of mistake raises the same type of error.

    Args:
        text: the document as a string, or as bytes in UTF-8.
        strict: whether to reject what Python accepts beyond the standard: NaN, infinity, numbers beyond float64.

    Raises:
        json.JSONDecodeError: also for bytes that are not UTF-8, brackets nested too deeply for Python, and numbers
            with thousands of digits.
    """
    options: dict[str, Any] = {"parse_constant": _refuse_constant, "parse_float": _finite} if strict else {}
    try:
        # Decoded here, because json.loads would also accept bytes in UTF-16 and UTF-32.
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), **options)
    except json.JSONDecodeError:
        # A subclass of ValueError, which the next clause would otherwise catch.
        raise
    except (ValueError, RecursionError) as error:
        raise _NoJson(json_fault(error), "", 0) from error


class _NoJson(json.JSONDecodeError):
    """An error without a position in the text."""

    def __str__(self) -> str:
        return self.msg


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    # float() turns an overflow into infinity without an error.
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is beyond the largest float64 number")
    return value


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, completely or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, completely or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def cache_folder(name: str) -> Path:
    """Folder of what may be deleted and made again, in the user's cache folder; it need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ropewalk" / name


def _sync(path: Path) -> None:
    # fsync flushes the file, not the handle, so a handle for reading is enough.
    with path.open("rb") as file:
        os.fsync(file.fileno())
