"""The main job: recipe, stages, steps, checkpoints."""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.training.recipe.file import load_recipe
    from ropewalk.training.recipe.recipe import Recipe
    from ropewalk.training.run import extend

_HOMES = {"Recipe": "recipe.recipe", "load_recipe": "recipe.file", "extend": "run"}

__all__ = ["Recipe", "extend", "load_recipe"]


__getattr__ = lazy_names(__name__, _HOMES)
