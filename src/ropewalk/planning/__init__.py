"""Plan a longer context: compare RoPE settings, recommend one, lay out stages, and count operations and bytes.

:func:`inspect` describes a checkpoint's RoPE and what a target length needs. :func:`plan` returns the training stages.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.planning.advice import Advice as Advice, advise as advise
    from ropewalk.planning.inspection import InspectResult as InspectResult, inspect as inspect
    from ropewalk.planning.rules import Setting as Setting, compare_settings as compare_settings
    from ropewalk.planning.run import PlanResult as PlanResult, plan as plan
    from ropewalk.planning.settings import InspectSettings as InspectSettings, PlanSettings as PlanSettings
    from ropewalk.planning.sizing.mesh_check import check_mesh as check_mesh
    from ropewalk.planning.sizing.model_shape import ModelShape as ModelShape, ShardedRun as ShardedRun
    from ropewalk.planning.sizing.time import H100 as H100, Cluster as Cluster
    from ropewalk.planning.sizing.traffic import (
        Communication as Communication,
        step_communication as step_communication,
    )
    from ropewalk.planning.stages import (
        PlannedStage as PlannedStage,
        plan_stages as plan_stages,
        recipe_stages as recipe_stages,
    )
else:
    __getattr__, __dir__ = on_first_use(__name__)
