"""What a target length needs: settings compared, a recommendation in plain words, stages."""

from ropewalk.planning.advice import Advice, advise
from ropewalk.planning.settings import Setting, compare_settings
from ropewalk.planning.stages import PlannedStage, plan_stages, recipe_stages

__all__ = [
    "Advice",
    "PlannedStage",
    "Setting",
    "advise",
    "compare_settings",
    "plan_stages",
    "recipe_stages",
]
