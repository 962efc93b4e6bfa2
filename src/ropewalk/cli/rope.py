"""``ropewalk rope``: RoPE theory on its own, training plans, and a probe of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.output import JsonFlag, PlotFile, notes, print_json, results, show
from ropewalk.evaluation.settings import ProbeSettings
from ropewalk.io.settings import COMMON
from ropewalk.planning.settings import (
    BasesSettings,
    BoundSettings,
    FrequenciesSettings,
    PlanSettings,
    ThetaSettings,
)

if TYPE_CHECKING:
    from ropewalk.parallel.context import RunContext


def bound_command(settings: BoundSettings, *, plot: PlotFile = None, as_json: JsonFlag = False) -> None:
    """Compute the context bound of a base: the distance up to which a key similar to the query gets at least as much
    attention as a random key.
    """
    from ropewalk.planning.bases import bound_of
    from ropewalk.reporting import draw
    from ropewalk.reporting.rope import bound_figures, describe_bound

    result = bound_of(settings)
    # A bound has two figures; the second is written beside the first.
    plots = () if plot is None else (plot, plot.with_stem(f"{plot.stem}-decay"))
    if as_json:
        pictures = {"pictures": [str(each) for each in plots]} if plots else {}
        print_json({**result.to_json(), **pictures})
    else:
        show(describe_bound(result))
    for figure, path in zip(bound_figures(result) if plots else (), plots, strict=True):
        draw(figure, path)
    _say_pictures(plots, as_json)


def base_command(settings: BasesSettings, *, plot: PlotFile = None, as_json: JsonFlag = False) -> None:
    """Compute which RoPE bases are feasible for a context length: the smallest, all intervals, and the safe base.

    A base is feasible if a key similar to the query gets, on average, at least as much attention as a random key at
    every distance up to the length. Feasible bases form intervals with gaps between them. The infimum is the lower end
    of the first interval; from the safe base up to --ceiling, every base is feasible.
    """
    from ropewalk.planning.bases import bases_for, bases_for_halves
    from ropewalk.reporting import draw
    from ropewalk.reporting.rope import bases_figure, describe_bases

    context = _context()
    result = bases_for(settings, context)
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_bases(result))
    if plot is not None:
        # Bases for shorter lengths are searched for the figure alone.
        draw(bases_figure(result, bases_for_halves(result, context)), plot)
        _say_pictures([plot], as_json)


def theta_command(settings: ThetaSettings, *, plot: PlotFile = None, as_json: JsonFlag = False) -> None:
    """Compute a base for a longer context by a rule, and the context that it reaches.

    critical-dimension keeps how many dimensions complete a turn within the context; ntk keeps the slowest pair's angle
    over it. length-floor is the smallest base at which a similar key outscores a random one at every
    distance up to the target; above lower-bound, all bases do. recommended: the larger of critical-dimension and
    length-floor.
    """
    from ropewalk.planning.bases import theta_for
    from ropewalk.reporting import draw
    from ropewalk.reporting.rope import describe_theta, theta_figure

    result = theta_for(settings, _context())
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_theta(result))
    if plot is not None:
        draw(theta_figure(result), plot)
        _say_pictures([plot], as_json)


def frequencies_command(
    settings: FrequenciesSettings, *, plot: PlotFile = None, as_json: JsonFlag = False
) -> None:
    """Compute a method's frequencies for a target length: inv_freq in rad/token, and the attention factor."""
    from ropewalk.planning.bases import frequencies_for
    from ropewalk.reporting import draw
    from ropewalk.reporting.rope import describe_frequencies, frequencies_figure

    result = frequencies_for(settings)
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_frequencies(result))
    if plot is not None:
        draw(frequencies_figure(result), plot)
        _say_pictures([plot], as_json)


def plan_command(settings: PlanSettings, *, as_json: JsonFlag = False) -> None:
    """Plan the stages of an extension: the lengths to train at, the RoPE of each stage, and the reasons."""
    from ropewalk.planning.run import plan
    from ropewalk.reporting.planning import describe_plan

    result = plan(settings, _context())
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_plan(result, settings))


def probe_command(
    settings: ProbeSettings,
    *,
    plot: Annotated[PlotFile, COMMON] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Measure the loss on a text under several RoPE settings, without training and with unchanged weights."""
    from ropewalk.evaluation.probe import probe
    from ropewalk.reporting import draw
    from ropewalk.reporting.rope import describe_probe, losses_figure

    result = probe(settings, _context())
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_probe(result))
    # Figures come after the result, so that a figure that cannot be written does not lose the result.
    if plot is not None:
        draw(losses_figure(result), plot)
        if not as_json:
            results().print()
        _say_pictures([plot], as_json)


def _context() -> RunContext:
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext

    return RunContext(reporter=ConsoleReporter(notes))


def _say_pictures(plots: Sequence[Path], as_json: bool) -> None:
    for plot in () if as_json else plots:
        results().say(f"picture {plot}")


app = make_group(
    "rope",
    "Compute how far a RoPE setting reaches, and what a target length needs.",
    [
        make_command(bound_command, "bound", "ropewalk rope bound --rope-theta 10000 --rotary-dim 128"),
        make_command(
            base_command, "base", "ropewalk rope base --length 128k --rotary-dim 128 --plot bases.png"
        ),
        make_command(
            theta_command,
            "theta",
            "ropewalk rope theta --rope-theta 1e4 --from 2k --to 32k --rotary-dim 64",
        ),
        make_command(
            frequencies_command,
            "frequencies",
            "ropewalk rope frequencies --method yarn --rope-theta 10000 --rotary-dim 128 --from 4k --to 64k",
        ),
        make_command(plan_command, "plan", "ropewalk rope plan meta-llama/Meta-Llama-3-8B --to 1M"),
        make_command(
            probe_command,
            "probe",
            "ropewalk rope probe meta-llama/Llama-2-7b-hf --to 32k --text books/ --plot probe.png",
        ),
    ],
)
