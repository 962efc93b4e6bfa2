"""A command that ends with the process that started it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ropewalk.io import orphan

PARENT = """
import subprocess, sys
from ropewalk.io.orphan import ends_with_this_process
before = ends_with_this_process() if sys.argv[1] == "yes" else []
child = subprocess.Popen([*before, "sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


@pytest.mark.parametrize("prefixed", ["yes", "no"])
def test_a_command_ends_when_its_parent_is_killed(prefixed):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, prefixed], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = int(parent.stdout.readline())
        try:
            assert within(20, lambda: command_of(child).startswith("sleep"))
            parent.kill()
            parent.wait()
            # Without the prefix the command goes on, or this test would prove nothing.
            assert within(10 if prefixed == "yes" else 0.3, lambda: not is_running(child)) == (
                prefixed == "yes"
            )
        finally:
            if is_running(child):
                os.kill(child, signal.SIGKILL)


def test_a_command_whose_parent_ended_before_does_not_start(tmp_path):
    touched = tmp_path / "touched"
    found = subprocess.run(
        [sys.executable, "-I", orphan.__file__, "1", "touch", str(touched)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "has ended" in found.stderr
    assert found.returncode != 0
    assert not touched.exists()


def test_a_command_that_cannot_start_is_an_error_that_names_it():
    command = [*orphan.ends_with_this_process(), "no-such-launcher"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (
        1,
        "error: cannot start no-such-launcher: No such file or directory\n",
    )


def test_a_command_heeds_interrupts_that_this_process_ignores():
    """As where a shell has started this process in the background."""
    asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [*orphan.ends_with_this_process(), sys.executable, "-c", asks]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"
    finally:
        signal.signal(signal.SIGINT, before)
