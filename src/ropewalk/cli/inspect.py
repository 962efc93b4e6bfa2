"""``ropewalk inspect``: show a checkpoint's RoPE, the context it supports, and what a target length needs."""

from __future__ import annotations

from typing import Annotated

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, PlotFile, figure_of, notes, print_json, results, show
from ropewalk.planning.settings import InspectSettings


def inspect(
    settings: InspectSettings,
    *,
    plot: Annotated[PlotFile, figure_of("the period of each pair of RoPE dimensions, in tokens")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a checkpoint's RoPE and supported context length. With --target, show how to reach a longer context.

    Reads the checkpoint's config, but no weights.
    """
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext
    from ropewalk.planning.inspection import inspect as run
    from ropewalk.reporting import draw
    from ropewalk.reporting.planning import describe_inspection, inspection_figure

    result = run(settings, RunContext(reporter=ConsoleReporter(notes)))
    # Drawn before anything is printed, so that a model without layers to draw is rejected first.
    figure = None if plot is None else inspection_figure(result)
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_inspection(result, settings))
    if plot is not None and figure is not None:
        draw(figure, plot)
        if not as_json:
            results().say(f"picture {plot}")


app = make_command(
    inspect, "inspect", "ropewalk inspect meta-llama/Llama-3.1-8B --target 1M --plot periods.png"
)
