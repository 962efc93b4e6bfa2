"""A lock on an output folder, or on one file of it, that names the process that holds it."""

from __future__ import annotations

import errno
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ropewalk.errors import RopewalkError

log = logging.getLogger("ropewalk")

WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What a file system answers that has no locks, as some network mounts do."""


@contextmanager
def locked(folder: Path, advice: str = "give another folder", *, file: str | None = None) -> Iterator[None]:
    """Keep other processes from writing to a folder, or to one file in it, while the block runs.

    The operating system holds the lock and gives it up when the process ends, however it ends: the lock file that a
    killed process leaves behind does no harm. A second lock in the same process is refused as well. Where the file
    system has no locks, the block runs without one and a warning says so.

    Args:
        folder: made if it is not there; one that was made and is empty when the block ends goes again.
        advice: what the user can do other than wait, for the message.
        file: name of the file in the folder to keep; None for the whole folder.

    Raises:
        RopewalkError: if another process has the lock, with its number and host; if ``folder`` is a file; or if the
            lock file cannot be written.
    """
    path = folder / (".lock" if file is None else f".{file}.lock")
    shown = folder if file is None else folder / file
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    with ExitStack() as stack:
        try:
            if folder.exists() and not folder.is_dir():
                raise RopewalkError(f"{folder} is a file, and a folder is needed; {advice}")
            if folder.is_symlink() and not folder.exists():
                raise RopewalkError(
                    f"{folder} is a link to {os.readlink(folder)}, which is not there; {advice}"
                )
            if not folder.exists():
                folder.mkdir(parents=True)
                stack.callback(_remove_if_empty, folder)
            lock.acquire()
            stack.callback(lock.release)
            # While the lock is held: whoever waits with the file open sees that it lost its name, and opens a new one.
            stack.callback(_remove, path)
            path.write_text(f"{os.getpid()} {platform.node()}\n", encoding="utf-8")
        except Timeout as error:
            raise RopewalkError(
                f"{_holder(path)} is writing to {shown}; wait until it is done, or {advice}"
            ) from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise RopewalkError(f"cannot lock {shown}: {error.strerror or error}") from error
            stack.callback(_remove, path)
            log.warning(
                "the file system of %s has no locks, so nothing keeps a second process from writing there",
                shown,
            )
        yield


def _holder(path: Path) -> str:
    try:
        process, host = path.read_text(encoding="utf-8").split(maxsplit=1)
    except (OSError, ValueError):
        # It has the lock and has not yet written its name.
        return "another process"
    return f"process {process} on {host.strip()}"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
