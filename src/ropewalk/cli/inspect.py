"""``ropewalk inspect``: show a checkpoint's RoPE, the context it supports, and what a target length needs."""

from __future__ import annotations

from typing import Annotated

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, PlotFile, draw_figure, figure_of, run_context, show_result
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
    from ropewalk.planning.inspection import inspect as run
    from ropewalk.reporting.planning import describe_inspection, inspection_figure

    result = run(settings, run_context())
    # Drawn before anything is printed, so that a model without layers to draw is rejected first.
    figure = None if plot is None else inspection_figure(result)
    show_result(result, as_json, lambda found: describe_inspection(found, settings))
    if plot is not None and figure is not None:
        draw_figure(figure, plot, as_json)


app = make_command(
    inspect, "inspect", "ropewalk inspect meta-llama/Llama-3.1-8B --target 1M --plot periods.png"
)
