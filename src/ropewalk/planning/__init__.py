"""Plan a longer context: compare RoPE settings, recommend one, lay out stages, and estimate memory, time and mesh.

:func:`inspect` describes a checkpoint's RoPE and what a target length needs. :func:`plan` returns the training stages.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.planning.advice import Advice, advise
    from ropewalk.planning.inspection import InspectResult, inspect
    from ropewalk.planning.rules import Setting, compare_settings
    from ropewalk.planning.run import PlanResult, plan
    from ropewalk.planning.settings import InspectSettings, PlanSettings
    from ropewalk.planning.sizing.memory import Memory, estimate_memory
    from ropewalk.planning.sizing.mesh_choice import check_mesh, choose_mesh
    from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
    from ropewalk.planning.sizing.time import H100, Cluster, Estimate, estimate_step
    from ropewalk.planning.sizing.traffic import Communication, step_communication
    from ropewalk.planning.stages import PlannedStage, plan_stages, recipe_stages

_HOMES = {
    "H100": "sizing.time",
    "Advice": "advice",
    "Cluster": "sizing.time",
    "Communication": "sizing.traffic",
    "Estimate": "sizing.time",
    "InspectResult": "inspection",
    "InspectSettings": "settings",
    "Memory": "sizing.memory",
    "ModelShape": "sizing.model_shape",
    "PlanResult": "run",
    "PlanSettings": "settings",
    "PlannedStage": "stages",
    "Setting": "rules",
    "ShardedRun": "sizing.model_shape",
    "advise": "advice",
    "check_mesh": "sizing.mesh_choice",
    "choose_mesh": "sizing.mesh_choice",
    "compare_settings": "rules",
    "estimate_memory": "sizing.memory",
    "estimate_step": "sizing.time",
    "inspect": "inspection",
    "plan": "run",
    "plan_stages": "stages",
    "recipe_stages": "stages",
    "step_communication": "sizing.traffic",
}

__all__ = [
    "H100",
    "Advice",
    "Cluster",
    "Communication",
    "Estimate",
    "InspectResult",
    "InspectSettings",
    "Memory",
    "ModelShape",
    "PlanResult",
    "PlanSettings",
    "PlannedStage",
    "Setting",
    "ShardedRun",
    "advise",
    "check_mesh",
    "choose_mesh",
    "compare_settings",
    "estimate_memory",
    "estimate_step",
    "inspect",
    "plan",
    "plan_stages",
    "recipe_stages",
    "step_communication",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
