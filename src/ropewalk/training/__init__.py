"""Long-context training: recipes, stages, optimizer steps and checkpoints."""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.training.collator import RowCollator as RowCollator
    from ropewalk.training.recipe.file import load_recipe as load_recipe
    from ropewalk.training.recipe.recipe import Recipe as Recipe
    from ropewalk.training.run import (
        RunResult as RunResult,
        StoppedRun as StoppedRun,
        extend as extend,
        extend_until as extend_until,
    )
else:
    __getattr__, __dir__ = on_first_use(__name__)
