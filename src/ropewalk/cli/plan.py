"""``ropewalk plan``: memory, time and cost of a recipe on named GPUs, from a dry run of its training step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, PlotFile, notes, print_json, results, show
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.io.settings import COMMON, Overrides


def plan(
    recipe: Annotated[str, Field(description="Recipe file (YAML), or the name of a shipped recipe.")],
    hardware: HardwareSettings,
    *,
    overrides: Annotated[
        Overrides,
        COMMON,
        Field(description="Override a key of the recipe, such as stages.0.context=1M."),
    ] = (),
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Estimate memory, time and cost of a recipe, without the GPUs.

    Simulates the recipe's training step as one of its GPUs would run it, on fake tensors, so it needs no GPU. Of the
    model, it reads only config.json. Takes a minute or two.
    """
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.dry_run.run import plan as run
    from ropewalk.parallel.context import RunContext
    from ropewalk.reporting import draw
    from ropewalk.reporting.dry_run import describe_planned_run
    from ropewalk.reporting.figures.dry_run import memory_figure
    from ropewalk.training import load_recipe

    result = run(load_recipe(recipe, list(overrides)), hardware, RunContext(reporter=ConsoleReporter(notes)))
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_planned_run(result))
    if plot is not None:
        draw(memory_figure(result), plot)
        if not as_json:
            results().say(f"picture {plot}")


app = make_command(plan, "plan", "ropewalk plan recipe.yaml --gpus 64 --gpu h100 --plot memory.png")
