"""Memory that a call allocates on the CPU."""

import os
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that a call allocates at once on the CPU, beyond those allocated before it.

    Resident memory of a process would depend on what ran before, so PyTorch's profiler reports what each operation
    allocated and freed, and Python between them. Memory that oneDNN or a BLAS allocates elsewhere is not included.
    Tensors from before the call should outlive it.
    """
    # The profiler's library reads this once; without it, it writes a line to stderr at each start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        run()
    # Replay allocations in order of time: each event reports only its own change of memory.
    changes = sorted((event.time_range.end, event.self_cpu_memory_usage) for event in found.events() or ())
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
