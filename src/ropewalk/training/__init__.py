"""Long-context training: recipes, stages, optimizer steps and checkpoints."""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.training.collator import RowCollator
    from ropewalk.training.recipe.file import load_recipe
    from ropewalk.training.recipe.recipe import Recipe
    from ropewalk.training.run import RunResult, StoppedRun, extend, extend_until

_HOMES = {
    "Recipe": "recipe.recipe",
    "RowCollator": "collator",
    "RunResult": "run",
    "StoppedRun": "run",
    "load_recipe": "recipe.file",
    "extend": "run",
    "extend_until": "run",
}

__all__ = ["Recipe", "RowCollator", "RunResult", "StoppedRun", "extend", "extend_until", "load_recipe"]


__getattr__ = lazy_names(__name__, _HOMES)
