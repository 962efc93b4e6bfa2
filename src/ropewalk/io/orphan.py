"""Start a command that ends with the process that started it, or that cleans up after it, also if that one is killed.

The kernel's parent-death signal is set by a small process that then becomes the command: setting it between fork and
exec would run Python in a fork of a process with threads. The file runs on its own, so it imports nothing from here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
CLEAN_UP = "clean-up"
CLEAN_UP_SECONDS = 20.0


def ends_with_this_process() -> list[str]:
    """Words to put before a command; none where the system has no parent-death signal."""
    return [sys.executable, "-I", __file__, str(os.getpid())] if sys.platform == "linux" else []


def clean_up_after_this_process(folder: Path, variable: str) -> subprocess.Popen[bytes]:
    """Start a process that waits until its stdin is closed, which the end of this process does too, and then cleans up.

    It kills the processes in whose environment the variable names the folder (on Linux), and removes the folder.
    """
    # A session of its own: Ctrl-C at the terminal must not end it before the others.
    return subprocess.Popen(
        [sys.executable, "-I", __file__, CLEAN_UP, variable, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _clean_up(variable: str, folder: str) -> None:
    sys.stdin.buffer.read()
    end = time.monotonic() + CLEAN_UP_SECONDS
    # Again until there is none, because a process may have started another meanwhile.
    while (found := _processes_with(f"{variable}={folder}".encode())) and time.monotonic() < end:
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _processes_with(assignment: bytes) -> list[int]:
    """Processes of this user that were started with a variable of this value; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:
            # It has ended, or belongs to another user.
            continue
        if assignment in environment:
            found.append(int(path.parent.name))
    return found


def _main(parent: int, command: list[str]) -> None:
    import ctypes

    # SIGTERM: a run ends in order, and a launcher ends its workers.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # A shell that starts a job in the background has it ignore Ctrl-C, and so would the command.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The parent may have ended before the signal was requested.
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    if sys.argv[1] == CLEAN_UP:
        _clean_up(*sys.argv[2:])
        sys.exit()
    _main(int(sys.argv[1]), sys.argv[2:])
