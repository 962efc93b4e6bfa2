"""``ropewalk rope``: the theory by itself, without a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ropewalk.cli import probe, rope_plan
from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.options import JsonFlag, PlotFile, TargetLength
from ropewalk.cli.output import print_json, results, searching
from ropewalk.cli.rope_pictures import decay_path, draw_bases, draw_bound, draw_periods, draw_theta
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.io.settings import FilePath, Length, Option, Settings, Several

if TYPE_CHECKING:
    from ropewalk.planning.bases import BoundResult
    from ropewalk.rope.theory import FeasibleBases

LISTED = 12

RotaryDim = Annotated[int, Field(description="Rotated dimensions of a head: head_dim, or a part of it.")]


class UnscaledRope(Settings):
    """RoPE as a checkpoint was trained with it."""

    rope_theta: float = Field(description="RoPE base of the checkpoint.")
    rotary_dim: RotaryDim


class ExtendedRope(UnscaledRope):
    """A checkpoint's RoPE, and the length that it is changed for."""

    from_length: Annotated[Length, Option(name="--from")] = Field(description="Trained length: 8192, 8k.")
    to_length: TargetLength


def bound_command(
    rope: UnscaledRope,
    *,
    compare: Annotated[
        Several[float],
        Option(metavar="NUMBER,..."),
        Field(description="Other bases to draw beside it, with commas between: 1e6,5e5."),
    ] = (),
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """The context bound of a base: up to which distance a similar token attracts more than a random one."""
    from ropewalk.planning.bases import bound_of

    found = bound_of(rope.rope_theta, rope.rotary_dim, compare)
    result = found.to_json()
    if plot is not None:
        result["pictures"] = [str(plot), str(decay_path(plot))]
    if as_json:
        print_json(result)
    else:
        _print_bound(found)
    if plot is not None:
        draw_bound(rope.rotary_dim, found.bounds, plot)
        _say_plot(as_json, plot, decay_path(plot))


def _print_bound(found: BoundResult) -> None:
    from ropewalk.rope.theory import SEARCH_LIMIT

    console = results()
    for base in found.bases:
        bound = found.bounds[base]
        far = f"more than {SEARCH_LIMIT:,}" if bound is None else f"{bound:,}"
        console.print(
            f"base {base:,.10g}, rotary_dim {found.rotary_dim}: context bound {far} tokens", markup=False
        )
    if found.first_violation is not None:
        console.print(
            f"B({found.first_violation}) = {found.margin_there:.3g} is the first below zero", markup=False
        )


def base_command(
    *,
    length: Annotated[Length, Field(description="Tokens: 8192, 128k, 1M.")],
    rotary_dim: RotaryDim,
    ceiling: Annotated[float, Field(description="Largest base to look at.")] = 1e9,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """The bases that reach a length: the infimum, every feasible interval, and the safe base above the holes."""
    from ropewalk.planning.bases import bases_for

    with searching(f"bases for {length:,} tokens", length) as progress:
        result = bases_for(length, rotary_dim, ceiling, progress)
    if as_json:
        print_json(result.to_json())
    else:
        _print_bases(result.found, result.safe_base_near_ceiling)
    if plot is not None:
        draw_bases(length, rotary_dim, ceiling, result.found, plot)
        _say_plot(as_json, plot)


def _print_bases(found: FeasibleBases, near: bool) -> None:
    from rich.table import Table

    console = results()
    if found.infimum is None:
        more = "a single pair turns the same at every base" if found.rotary_dim == 2 else "raise --ceiling"
        console.print(
            f"no base up to {found.ceiling:g} reaches {found.length:,} tokens with rotary_dim {found.rotary_dim}; "
            f"{more}",
            soft_wrap=True,
        )
        return
    console.print(f"bases that reach {found.length:,} tokens with rotary_dim {found.rotary_dim}")
    table = Table(show_header=False)
    table.add_row("infimum", f"{found.infimum:,.9g}")
    count = len(found.feasible)
    table.add_row("feasible intervals", f"{count:,}, with holes between them" if count > 1 else "1")
    if found.safe_base is None:
        table.add_row("safe base", f"none: the ceiling of {found.ceiling:g} lies in a hole; raise --ceiling")
    else:
        table.add_row(
            "safe base", f"{found.safe_base:,.9g}: from there to {found.ceiling:g} every base reaches"
        )
    console.print(table)
    if near:
        console.print(
            "The safe base lies close to the ceiling, beyond which nothing was looked at: raise --ceiling."
        )
    widest = sorted(found.feasible, key=lambda ends: math.log(ends[1] / ends[0]), reverse=True)[:LISTED]
    of = f"the {len(widest)} widest of {len(found.feasible):,}" if len(found.feasible) > LISTED else "all"
    intervals = Table(title=f"feasible intervals, {of}", title_justify="left")
    for column in ("from base", "to base", "width"):
        intervals.add_column(column, justify="right")
    for low, high in sorted(widest):
        intervals.add_row(f"{low:,.9g}", f"{high:,.9g}", f"{100 * (high / low - 1):,.3g} %")
    console.print(intervals)


def theta_command(
    rope: ExtendedRope,
    *,
    rule: Annotated[
        str,
        Field(
            description="recommended, critical-dimension, length-floor, ntk, lower-bound, or schedule:NAME "
            "(gradient, lwm, anchorcontext)."
        ),
    ] = "recommended",
    ceiling: Annotated[
        float | None,
        Field(description="For lower-bound: largest base to look at; 1e12 or more if not given."),
    ] = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """The base for a longer context by a rule, and how far that base reaches."""
    from ropewalk.planning.bases import theta_for
    from ropewalk.planning.rules import tokens_text
    from ropewalk.rope import Default

    from_length, to_length = rope.from_length, rope.to_length
    before = Default(rope.rotary_dim, rope.rope_theta)
    with searching(f"safe base for {to_length:,} tokens", None) as progress:
        found = theta_for(before, from_length, to_length, rule, ceiling, progress)
    if as_json:
        print_json(found.to_json())
    else:
        covers = "covers" if found.reaches_target else "does not cover"
        for line in (
            f"rope_theta {found.after.rope_theta:,.10g} for {to_length:,} tokens, by {found.rule}",
            *([] if found.reason is None else [f"recommended: {found.reason}"]),
            f"its context bound of {tokens_text(found.context_bound)} {covers} the target",
            f"critical dimension {found.critical_dimension} of {rope.rotary_dim} (base {rope.rope_theta:,.10g}, "
            f"{from_length:,} tokens)",
            f"formula  {found.origin.formula}",
            f"source   {found.origin.source}",
            f"caveat   {found.origin.caveat}",
        ):
            results().say(line)
    if plot is not None:
        draw_theta(found.before, found.after, from_length, to_length, plot)
        _say_plot(as_json, plot)


def frequencies_command(
    rope: ExtendedRope,
    *,
    method: Annotated[
        str, Field(description="default, theta, linear, ntk, dynamic, yarn, llama3 or longrope.")
    ],
    factor: Annotated[
        float | None,
        Field(description="In place of target over trained length (linear, ntk, yarn, llama3)."),
    ] = None,
    factors: Annotated[
        FilePath | None,
        Field(description="For longrope: JSON with short_factor and long_factor, one a pair."),
    ] = None,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """The frequencies of a method for a target length: inv_freq in rad/token, and the attention factor."""
    from ropewalk.planning.bases import frequencies_for
    from ropewalk.rope import Default

    from_length, to_length = rope.from_length, rope.to_length
    short, long = _factor_lists(factors)
    parameters = {"factor": factor, "short_factor": short, "long_factor": long}
    found = frequencies_for(
        method, Default(rope.rotary_dim, rope.rope_theta), from_length, to_length, parameters
    )
    result = found.to_json()
    if as_json:
        print_json(result)
    else:
        _print_frequencies(result, from_length, to_length)
    if plot is not None:
        draw_periods(found.before, found.after, from_length, to_length, plot)
        _say_plot(as_json, plot)


def _factor_lists(path: Path | None) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    if path is None:
        return None, None
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RopewalkError(f"cannot read {path} as JSON: {error}") from error
    keys = ("short_factor", "long_factor")
    if not isinstance(values, dict) or not all(isinstance(values.get(key), list) for key in keys):
        raise RopewalkError(f"{path} must hold an object with the lists short_factor and long_factor")
    return tuple(values[keys[0]]), tuple(values[keys[1]])


def _print_frequencies(result: dict[str, Any], trained: int, target: int) -> None:
    from rich.table import Table

    from ropewalk.planning.rules import tokens_text

    console = results()
    console.print(
        f"{result['method']}, base {result['rope_theta']:,.10g}, attention factor {result['attention_factor']:.6g}, "
        f"context bound {tokens_text(result['context_bound'])}",
        markup=False,
        soft_wrap=True,
    )
    table = Table()
    for column in (
        "pair",
        "inv_freq (rad/token)",
        "period (tokens)",
        f"turns in {trained:,}",
        f"turns in {target:,}",
    ):
        table.add_column(column, justify="right")
    for pair, theta in enumerate(result["inv_freq"]):
        turns = (f"{length * theta / (2 * math.pi):,.3g}" for length in (trained, target))
        table.add_row(str(pair), f"{theta:.9g}", f"{2 * math.pi / theta:,.6g}", *turns)
    console.print(table)


def _say_plot(as_json: bool, *plots: Path) -> None:
    for plot in () if as_json else plots:
        results().say(f"picture {plot}")


app = make_group(
    "rope",
    "How far a RoPE setting reaches, and what a length needs.",
    [
        make_command(bound_command, "bound", "ropewalk rope bound --rope-theta 10000 --rotary-dim 128"),
        make_command(
            base_command, "base", "ropewalk rope base --length 128k --rotary-dim 128 --plot bases.png"
        ),
        make_command(
            theta_command,
            "theta",
            "ropewalk rope theta --rope-theta 500000 --from 8k --to 256k --rotary-dim 128",
        ),
        make_command(
            frequencies_command,
            "frequencies",
            "ropewalk rope frequencies --method yarn --rope-theta 10000 --rotary-dim 128 --from 4k --to 64k",
        ),
        make_command(rope_plan.plan_command, "plan", "ropewalk rope plan meta-llama/Meta-Llama-3-8B --to 1M"),
        make_command(
            probe.probe_command,
            "probe",
            "ropewalk rope probe meta-llama/Llama-2-7b-hf --to 32k --text books/ --plot probe.png",
        ),
    ],
)
