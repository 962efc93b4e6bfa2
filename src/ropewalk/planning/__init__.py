"""What a target length needs: settings compared, a recommendation in plain words, stages; memory, time and a mesh."""

from ropewalk.planning.advice import Advice, advise
from ropewalk.planning.rules import Setting, compare_settings
from ropewalk.planning.sizing.memory import Memory, estimate_memory
from ropewalk.planning.sizing.mesh_choice import check_mesh, choose_mesh
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import H100, Cluster, Estimate, estimate_step
from ropewalk.planning.sizing.traffic import Communication, step_communication
from ropewalk.planning.stages import PlannedStage, plan_stages, recipe_stages

__all__ = [
    "H100",
    "Advice",
    "Cluster",
    "Communication",
    "Estimate",
    "Memory",
    "ModelShape",
    "PlannedStage",
    "Setting",
    "ShardedRun",
    "advise",
    "check_mesh",
    "choose_mesh",
    "compare_settings",
    "estimate_memory",
    "estimate_step",
    "plan_stages",
    "recipe_stages",
    "step_communication",
]
