"""Peak memory of a training process: of its GPU, or of the process itself on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GPU, PROCESS = "peak_gpu_memory", "peak_process_memory"
"""Keys of a line of metrics; the key says what was measured."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Most bytes so far under the key that says of what; empty where the system does not tell.

    On a GPU these are the bytes of tensors at their most, of this process; on a CPU its resident memory.
    """
    if device.type == "cuda":
        import torch

        return {GPU: torch.cuda.max_memory_allocated(device)}
    if sys.platform == "linux":
        # Not ru_maxrss, which counts the memory of the process that started this one too.
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                # The kernel writes kB and means 1,024 bytes.
                return {PROCESS: int(line.split()[1]) * 1024}
    return {}
