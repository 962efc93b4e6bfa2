"""The main job: recipe, stages, steps, checkpoints."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk.training.recipe import Recipe
    from ropewalk.training.recipe_file import load_recipe
    from ropewalk.training.run import extend

_HOMES = {"Recipe": "recipe", "load_recipe": "recipe_file", "extend": "run"}

__all__ = ["Recipe", "extend", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ropewalk.training' has no attribute {name!r}")
    return getattr(import_module(f"ropewalk.training.{_HOMES[name]}"), name)
