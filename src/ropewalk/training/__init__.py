"""The main job: recipe, stages, steps, checkpoints."""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.training.recipe import Recipe
    from ropewalk.training.recipe_file import load_recipe
    from ropewalk.training.run import extend

_HOMES = {"Recipe": "recipe", "load_recipe": "recipe_file", "extend": "run"}

__all__ = ["Recipe", "extend", "load_recipe"]


__getattr__ = lazy_names(__name__, _HOMES)
