"""A lock on an output folder, or on one file in it, that names the process that holds it."""

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
from ropewalk.io.files import refuse_url

log = logging.getLogger("ropewalk")

WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks, such as some network mounts."""


@contextmanager
def locked(
    folder: Path, advice: str = "give another folder", *, file: str | None = None, wait: float = 0
) -> Iterator[None]:
    """Prevent other processes from writing to a folder, or to one file in it, while the block runs.

    The operating system releases the lock when the process ends, however it ends, so the lock file of a killed
    process does no harm. A second lock in the same process raises an error as well. If the file system does not support
    locks, the block runs without one and a warning says so.

    Args:
        folder: created if it does not exist; removed again if it was created and is empty when the block ends.
        advice: what the user can do besides waiting, for the message.
        file: name of the file in the folder to lock; None for the whole folder.
        wait: seconds to wait for the process that holds the lock.

    Raises:
        RopewalkError: if another process holds the lock (with its process id and host), if ``folder`` is a file or the
            URL of an object store, or if the lock file cannot be written.
    """
    refuse_url(folder, "results")
    path = folder / (".lock" if file is None else f".{file}.lock")
    shown = folder if file is None else folder / file
    # No soft lock: it would outlive a killed process.
    lock = FileLock(path, timeout=wait, fallback_to_soft=False)
    with ExitStack() as stack:
        try:
            if folder.exists() and not folder.is_dir():
                raise RopewalkError(f"{folder} is a file, but must be a folder; {advice}")
            if folder.is_symlink() and not folder.exists():
                raise RopewalkError(
                    f"{folder} is a link to {os.readlink(folder)}, which does not exist; {advice}"
                )
            if not folder.exists():
                folder.mkdir(parents=True)
                stack.callback(_remove_if_empty, folder)
            lock.acquire()
            stack.callback(lock.release)
            # Removed while the lock is held: a waiting process sees that its open file has lost its name, and retries.
            stack.callback(_remove, path)
            # For the message of the process that is refused: it names this one.
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
                "the file system of %s does not support locks, so nothing prevents a second process from writing there",
                shown,
            )
        yield


def _holder(path: Path) -> str:
    try:
        process, host = path.read_text(encoding="utf-8").split(maxsplit=1)
    except (OSError, ValueError):
        # The holder has the lock but has not written its name yet.
        return "another process"
    return f"process {process} on {host.strip()}"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
