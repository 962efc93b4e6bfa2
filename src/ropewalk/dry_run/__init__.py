"""Plan a run without its hardware: the real training step on tensors without data, on a mesh of simulated ranks.

:func:`plan` gives memory, operations, bytes sent and time of every stage of a recipe on named GPUs.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.dry_run.run import PlannedRun, plan
    from ropewalk.dry_run.settings import HardwareSettings

_HOMES = {"HardwareSettings": "settings", "PlannedRun": "run", "plan": "run"}

__all__ = ["HardwareSettings", "PlannedRun", "plan"]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
