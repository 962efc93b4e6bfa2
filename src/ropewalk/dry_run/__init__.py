"""Plan a run without its hardware: the real training step on tensors without data, on a mesh of simulated ranks.

:func:`plan` gives memory, operations, bytes sent and time of every stage of a recipe on named GPUs. Two more modules
work before a run: ``init`` proposes a recipe, and ``check`` checks one.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.dry_run.run import PlannedRun as PlannedRun, plan as plan
    from ropewalk.dry_run.settings import HardwareSettings as HardwareSettings
else:
    __getattr__, __dir__ = on_first_use(__name__)
