"""Peak memory: of this process alone, and it grows with what the process touches."""

import subprocess
import sys

import pytest
import torch

from ropewalk.training.update.peak_memory import PROCESS, peak_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
CPU = torch.device("cpu")


@pytest.mark.slow
def test_it_grows_by_what_is_touched_and_stays():
    before = peak_memory(CPU)[PROCESS]
    held = torch.ones(before // 4 + 2**26)
    touched = held.numel() * held.element_size()
    assert peak_memory(CPU)[PROCESS] >= touched - 2**22
    del held
    # The kernel's counters lag by some pages per thread.
    assert peak_memory(CPU)[PROCESS] >= touched - 2**22


def test_the_memory_of_the_process_that_started_this_one_is_not_counted():
    code = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Torch alone takes more than this in the process of the tests.
    assert int(found.stdout) * 1024 < 2**26 < peak_memory(CPU)[PROCESS]
