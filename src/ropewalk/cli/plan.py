"""``ropewalk plan``: memory, time and cost of a recipe on named GPUs, from a dry run of its training step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, PlotFile, draw_figure, figure_of, run_context, show_result
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.io.settings import COMMON, RECIPE_NAME, Overrides


def plan(
    recipe: Annotated[str, Field(description=f"{RECIPE_NAME}.")],
    hardware: HardwareSettings,
    *,
    overrides: Annotated[Overrides, COMMON] = (),
    plot: Annotated[PlotFile, figure_of("a GPU's memory during a training step")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Estimate the memory, time and cost of a training run. Needs no GPU.

    Simulates the training step of one GPU with PyTorch's fake tensors. Reads the model's config.json, but no weights.
    Takes a minute or two.
    """
    from ropewalk.dry_run.run import plan as run
    from ropewalk.reporting.dry_run import describe_planned_run
    from ropewalk.reporting.figures.dry_run import memory_figure
    from ropewalk.training import load_recipe

    result = run(load_recipe(recipe, list(overrides)), hardware, run_context())
    show_result(result, as_json, describe_planned_run)
    if plot is not None:
        draw_figure(memory_figure(result), plot, as_json)


app = make_command(plan, "plan", "ropewalk plan recipe.yaml --gpus 64 --gpu h100 --plot memory.png")
