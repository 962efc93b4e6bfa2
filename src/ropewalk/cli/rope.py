"""``ropewalk rope``: RoPE theory on its own, training plans, and a probe of a checkpoint."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.output import (
    JsonFlag,
    PlotFile,
    draw_figure,
    figure_of,
    print_json,
    results,
    run_context,
    show,
    show_result,
)
from ropewalk.evaluation.settings import ProbeSettings
from ropewalk.io.settings import COMMON
from ropewalk.planning.settings import (
    BasesSettings,
    BoundSettings,
    FrequenciesSettings,
    PlanSettings,
    ThetaSettings,
)


def bound_command(
    settings: BoundSettings,
    *,
    plot: Annotated[
        PlotFile,
        Field(
            description="File for a figure (.png or .svg) of how much more attention a similar key gets than a "
            "random key, by distance. A second figure shows RoFormer's long-term decay of attention. The name of its "
            "file ends in -decay."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute the context bound of a RoPE base: the distance up to which a key similar to the query gets, on average,
    at least as much attention as a random key (arXiv:2405.14591).
    """
    from ropewalk.planning.bases import bound_of
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
        draw_figure(figure, path, as_json)


def base_command(
    settings: BasesSettings,
    *,
    plot: Annotated[PlotFile, figure_of("the feasible bases for this length and shorter ones")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute all RoPE bases whose context bound is at least a given length (feasible bases).

    The context bound of a base is the distance up to which a key similar to the query gets, on average, at least as
    much attention as a random key (arXiv:2405.14591). Feasible bases form intervals with gaps between them. The output
    lists the intervals, the infimum (the smallest feasible base), and the safe base (every base from this one up to
    --ceiling is feasible).
    """
    from ropewalk.planning.bases import bases_for, bases_for_halves
    from ropewalk.reporting.rope import bases_figure, describe_bases

    context = run_context()
    result = bases_for(settings, context)
    show_result(result, as_json, describe_bases)
    if plot is not None:
        # Bases for shorter lengths are searched for the figure alone.
        draw_figure(bases_figure(result, bases_for_halves(result, context)), plot, as_json)


def theta_command(
    settings: ThetaSettings,
    *,
    plot: Annotated[PlotFile, figure_of("the slowest pair's angle with the old and the new base")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute the RoPE base that a rule gives for a longer context, and the context bound of this base.

    The context bound of a base is the distance up to which a key similar to the query gets, on average, at least as
    much attention as a random key (arXiv:2405.14591). A base reaches a length if its context bound is at least this
    length.

    critical-dimension: with this base, as many dimensions complete a full turn within the target length as did within
    the trained length (arXiv:2310.05209).

    length-floor: the smallest base that reaches the target length with 128 rotated dimensions per head. If the
    checkpoint's own base is larger, the rule keeps the checkpoint's base. The rule ignores --rotary-dim, because
    published models with other head dimensions use the same bases as models with 128.

    recommended: the larger of critical-dimension and length-floor, with one exception. If critical-dimension gives a
    larger base than any published extended model has, and the checkpoint's own base already reaches the target length,
    the rule keeps the checkpoint's base.

    lower-bound: the smallest base B for which all bases from B to --ceiling reach the target length with --rotary-dim
    dimensions. If the checkpoint's own base is larger, the rule keeps the checkpoint's base.

    ntk: NTK-aware scaling. With this base, the slowest pair of dimensions turns as far over the target length as it
    did over the trained length.

    ntk-rcd=PAIR: the same for the pair with this index, counted from 0 (NTK with a given critical dimension,
    arXiv:2502.20082).

    schedule:NAME: the base that a published model (Gradient, LWM or AnchorContext) used at the target length. If the
    model has no base for this length, the rule takes the base of the model's next longer length. It refuses targets
    beyond the model's longest length.
    """
    from ropewalk.planning.bases import theta_for
    from ropewalk.reporting.rope import describe_theta, theta_figure

    result = theta_for(settings, run_context())
    show_result(result, as_json, describe_theta)
    if plot is not None:
        draw_figure(theta_figure(result), plot, as_json)


def frequencies_command(
    settings: FrequenciesSettings,
    *,
    plot: Annotated[
        PlotFile, figure_of("each pair's period, in tokens, with the checkpoint's RoPE and with the method")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute a RoPE method's frequencies (inv_freq, in rad/token) and attention factor for a target length."""
    from ropewalk.planning.bases import frequencies_for
    from ropewalk.reporting.rope import describe_frequencies, frequencies_figure

    result = frequencies_for(settings)
    show_result(result, as_json, describe_frequencies)
    if plot is not None:
        draw_figure(frequencies_figure(result), plot, as_json)


def plan_command(settings: PlanSettings, *, as_json: JsonFlag = False) -> None:
    """Plan the training stages that extend a model's context: the length of each stage, its RoPE, and the reasons."""
    from ropewalk.planning.run import plan
    from ropewalk.reporting.planning import describe_plan

    result = plan(settings, run_context())
    show_result(result, as_json, lambda found: describe_plan(found, settings))


def probe_command(
    settings: ProbeSettings,
    *,
    plot: Annotated[PlotFile, COMMON, figure_of("the loss with each setting")] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Measure a model's loss on a text with several RoPE settings, without training.

    critical-dimension sets a larger base. With this base, as many dimensions complete a full turn within the target
    length as did within the trained length (arXiv:2310.05209).
    """
    from ropewalk.evaluation.rope_probe import probe
    from ropewalk.reporting.rope import describe_probe, losses_figure

    result = probe(settings, run_context())
    show_result(result, as_json, describe_probe)
    if plot is not None:
        if not as_json:
            results().print()
        draw_figure(losses_figure(result), plot, as_json)


app = make_group(
    "rope",
    "Compute RoPE bases and frequencies for a context length, plan training stages, or compare RoPE settings on a "
    "checkpoint.",
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
