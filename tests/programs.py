"""Programs in processes of their own, which start in a moment: as forks of a server that has imported what most need.

The server has never computed anything, so a program finds itself as in a fresh interpreter, but for the modules of the
libraries and of ropewalk. What must show that a module is *not* imported needs a real one.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROPEWALK = "from ropewalk.cli.app import run; run()"
"""What ``python -m ropewalk`` does."""

IN_A_FOLDER = f"import os, sys; os.chdir(sys.argv.pop(1)); {ROPEWALK}"
"""The same, in the folder that the first argument names."""


class Program:
    """A program that is running; as much of ``subprocess.Popen`` as the tests use."""

    def __init__(self, code: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> None:
        # Not above: the program's process imports this module too.
        from ropewalk.parallel.rank_pool import process_context

        self._said = tempfile.TemporaryDirectory()
        for name in ("out", "errors"):
            (Path(self._said.name) / name).touch()
        given = (
            code,
            [str(each) for each in arguments],
            {**os.environ, **(environment or {})},
            self._said.name,
        )
        self._process = process_context().Process(target=_run, args=given)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 280) -> tuple[str, str]:
        """What it printed, once it has ended."""
        with self._said as folder:
            self._process.join(timeout)
            if self._process.exitcode is None:
                self.kill()
                self._process.join()
                raise subprocess.TimeoutExpired("a program", timeout)
            out, errors = Path(folder) / "out", Path(folder) / "errors"
            return out.read_text(), errors.read_text()


def run_together(
    number: int, *arguments: Any, code: str = ROPEWALK
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in so many processes at once, which join as those of torchrun do, without its agent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": number,
        "LOCAL_WORLD_SIZE": number,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    programs = []
    for rank in range(number):
        environment = {k: str(v) for k, v in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        programs.append(Program(code, *arguments, environment=environment))
    said = [program.communicate() for program in programs]
    codes = [program.returncode for program in programs]
    return [
        subprocess.CompletedProcess("a program", status, *each)
        for status, each in zip(codes, said, strict=True)
    ]


def run_program(
    code: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run([sys.executable, "-c", code, ...])`` does."""
    program = Program(code, *arguments, environment=environment)
    out, errors = program.communicate()
    return subprocess.CompletedProcess("a program", program.returncode, out, errors)


def run_interpreter(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end in a real interpreter, for what must not find ropewalk imported."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(code: str, arguments: list[str], environment: dict[str, str], said: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in enumerate(("out", "errors"), start=1):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY), descriptor)
    sys.argv = ["-c", *arguments]
    # As in conftest: what the server has loaded is not looked through for garbage again and again.
    gc.freeze()
    # Nor need a test's files outlive a power cut; a process that is killed loses nothing that it has written.
    os.fsync = lambda file: None
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
