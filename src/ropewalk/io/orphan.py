"""Start a command that ends with the process that started it, also if that one is killed.

The kernel's parent-death signal is set by a small process that then becomes the command: setting it between fork and
exec would run Python in a fork of a process with threads. The file runs on its own, so it imports nothing from here.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def ends_with_this_process() -> list[str]:
    """Words to put before a command; none where the system has no parent-death signal."""
    return [sys.executable, "-I", __file__, str(os.getpid())] if sys.platform == "linux" else []


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
    _main(int(sys.argv[1]), sys.argv[2:])
