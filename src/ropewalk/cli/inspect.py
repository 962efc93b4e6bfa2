"""``ropewalk inspect``: show a checkpoint's RoPE, the context it supports, and what a target length needs."""

from __future__ import annotations

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, PlotFile, notes, print_json, results, show
from ropewalk.planning.settings import InspectSettings


def inspect(settings: InspectSettings, *, plot: PlotFile = None, as_json: JsonFlag = False) -> None:
    """Show a checkpoint's RoPE and the context it supports; with --target, what that length needs.

    Reads only the config, no weights.
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
