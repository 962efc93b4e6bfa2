"""``ropewalk rope``: the theory by itself, without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk.cli import probe, rope_plan
from ropewalk.cli.options import FromOption, PlotOption, RotaryDimOption, ThetaOption, ToOption, check_plot
from ropewalk.cli.output import JsonOption, print_json, results, searching
from ropewalk.cli.rope_pictures import decay_path, draw_bases, draw_bound, draw_periods, draw_theta
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.io.lengths import parse_length

rope_app = typer.Typer(no_args_is_help=True, help="How far a RoPE setting reaches, and what a length needs.")

LISTED = 12


def register(app: typer.Typer) -> None:
    """Add the group ``rope`` to the program."""
    if not rope_app.registered_commands:
        bound = "Example: ropewalk rope bound --rope-theta 10000 --rotary-dim 128"
        rope_app.command("bound", epilog=bound)(bound_command)
        base = "Example: ropewalk rope base --length 128k --rotary-dim 128 --plot bases.png"
        rope_app.command("base", epilog=base)(base_command)
        theta = "Example: ropewalk rope theta --rope-theta 500000 --from 8k --to 256k --rotary-dim 128"
        rope_app.command("theta", epilog=theta)(theta_command)
        frequencies = (
            "Example: ropewalk rope frequencies --method yarn --rope-theta 10000 --rotary-dim 128 "
            "--from 4k --to 64k"
        )
        rope_app.command("frequencies", epilog=frequencies)(frequencies_command)
        rope_plan.register(rope_app)
        probe.register(rope_app)
    app.add_typer(rope_app, name="rope")


def bound_command(
    rope_theta: ThetaOption,
    rotary_dim: RotaryDimOption,
    compare: Annotated[
        str | None, typer.Option(help="Other bases to draw beside it, with commas between: 1e6,5e5.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """The context bound of a base: up to which distance a similar token attracts more than a random one."""
    from ropewalk.rope.theory import SEARCH_LIMIT, context_bound, inv_freq_of_base, similarity_margin

    check_plot(plot)
    bases = [rope_theta, *_numbers(compare, "--compare")]
    frequencies = {base: inv_freq_of_base(rotary_dim, base) for base in bases}
    found = {base: context_bound(inv_freq) for base, inv_freq in frequencies.items()}
    bound = found[rope_theta]
    violation = None if bound is None else bound + 1
    result: dict[str, Any] = {
        "rope_theta": rope_theta,
        "rotary_dim": rotary_dim,
        "context_bound": SEARCH_LIMIT if bound is None else bound,
        "at_least": bound is None,
        "first_violation": violation,
        "margin_there": None
        if violation is None
        else float(similarity_margin(frequencies[rope_theta], violation)),
        "others": [
            {"rope_theta": base, "context_bound": SEARCH_LIMIT if found[base] is None else found[base]}
            for base in bases[1:]
        ],
        "formula": "largest L with B(m) = Σ cos(m·b^(-2i/d)) ≥ 0 for all 0 ≤ m ≤ L",
        "source": "arXiv:2405.14591, section 4.3",
    }
    if plot is not None:
        result["pictures"] = [str(plot), str(decay_path(plot))]
    if as_json:
        print_json(result)
    else:
        _print_bound(bases, rotary_dim, found, result)
    if plot is not None:
        draw_bound(frequencies, found, plot)
        _say_plot(as_json, plot, decay_path(plot))


def _print_bound(
    bases: Sequence[float], rotary_dim: int, found: dict[float, int | None], result: dict[str, Any]
) -> None:
    from ropewalk.rope.theory import SEARCH_LIMIT

    console = results()
    for base in bases:
        far = f"more than {SEARCH_LIMIT:,}" if found[base] is None else f"{found[base]:,}"
        console.print(f"base {base:,.10g}, rotary_dim {rotary_dim}: context bound {far} tokens", markup=False)
    if not result["at_least"]:
        first = result["first_violation"]
        console.print(f"B({first}) = {result['margin_there']:.3g} is the first below zero", markup=False)


def base_command(
    length: Annotated[
        int, typer.Option("--length", parser=parse_length, metavar="LENGTH", help="Tokens: 8192, 128k, 1M.")
    ],
    rotary_dim: RotaryDimOption,
    ceiling: Annotated[float, typer.Option(help="Largest base to look at.")] = 1e9,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """The bases that reach a length: the infimum, every feasible interval, and the safe base above the holes."""
    from ropewalk.rope.theory import feasible_bases

    check_plot(plot)
    with searching(f"bases for {length:,} tokens", length) as progress:
        found = feasible_bases(length, rotary_dim, ceiling, progress)
    near = found.safe_base is not None and found.safe_base > ceiling / 10 and ceiling > 10
    result = {
        **asdict(found),
        "safe_base_near_ceiling": near,
        "formula": "B(m) = Σ cos(m·b^(-2i/d)) ≥ 0 for all 0 ≤ m ≤ length",
        "source": "arXiv:2405.14591, equation 7; intervals found exactly, at least 1e-6 wide (relative)",
    }
    if as_json:
        print_json(result)
    else:
        _print_bases(found, near)
    if plot is not None:
        draw_bases(length, rotary_dim, ceiling, found, plot)
        _say_plot(as_json, plot)


def _print_bases(found: Any, near: bool) -> None:
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
    rope_theta: ThetaOption,
    from_length: FromOption,
    to_length: ToOption,
    rotary_dim: RotaryDimOption,
    rule: Annotated[
        str,
        typer.Option(
            help="recommended, critical-dimension, length-floor, ntk, lower-bound, or schedule:NAME (gradient, lwm, "
            "anchorcontext)."
        ),
    ] = "recommended",
    ceiling: Annotated[
        float | None,
        typer.Option(help="For lower-bound: largest base to look at; 1e12 or more if not given."),
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """The base for a longer context by a rule, and how far that base reaches."""
    from ropewalk.planning.rules import bound_at, origin_of, tokens_text
    from ropewalk.rope import Default
    from ropewalk.rope.theory import (
        SEARCH_LIMIT,
        check_rule,
        critical_dimension,
        recommended_theta,
        theta_by_rule,
    )
    from ropewalk.rope.theory.rules import RECOMMENDED

    check_plot(plot)
    check_rule(rule)
    if to_length > SEARCH_LIMIT:
        raise RopewalkError(f"the target length may be at most {SEARCH_LIMIT} tokens, got {to_length}")
    with searching(f"safe base for {to_length:,} tokens", None) as progress:
        theta = theta_by_rule(rule, rotary_dim, rope_theta, from_length, to_length, ceiling, progress)
    why = None
    if rule == RECOMMENDED:
        found = recommended_theta(rope_theta, from_length, to_length)
        rule, why = found.rule, found.reason
    method = Default(rotary_dim, theta)
    bound = bound_at(method, to_length)
    formula, source, caveat = origin_of(rule, Default(rotary_dim, rope_theta))
    result = {
        "rope_theta": theta,
        "rule": rule,
        "reason": why,
        "critical_dimension": critical_dimension(rotary_dim, rope_theta, from_length),
        "from": {"rope_theta": rope_theta, "length": from_length},
        "to": to_length,
        "rotary_dim": rotary_dim,
        "context_bound": bound,
        "reaches_target": bound >= to_length,
        "formula": formula,
        "source": source,
        "caveat": caveat,
    }
    if as_json:
        print_json(result)
    else:
        covers = "covers" if bound >= to_length else "does not cover"
        for line in (
            f"rope_theta {theta:,.10g} for {to_length:,} tokens, by {rule}",
            *([] if why is None else [f"recommended: {why}"]),
            f"its context bound of {tokens_text(bound)} {covers} the target",
            f"critical dimension {result['critical_dimension']} of {rotary_dim} (base {rope_theta:,.10g}, "
            f"{from_length:,} tokens)",
            f"formula  {formula}",
            f"source   {source}",
            f"caveat   {caveat}",
        ):
            results().say(line)
    if plot is not None:
        draw_theta(Default(rotary_dim, rope_theta), method, from_length, to_length, plot)
        _say_plot(as_json, plot)


def frequencies_command(
    method: Annotated[
        str, typer.Option(help="default, theta, linear, ntk, dynamic, yarn, llama3 or longrope.")
    ],
    rope_theta: ThetaOption,
    rotary_dim: RotaryDimOption,
    from_length: FromOption,
    to_length: ToOption,
    factor: Annotated[
        float | None, typer.Option(help="In place of target over trained length (linear, ntk, yarn, llama3).")
    ] = None,
    factors: Annotated[
        Path | None, typer.Option(help="For longrope: JSON with short_factor and long_factor, one a pair.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """The frequencies of a method for a target length: inv_freq in rad/token, and the attention factor."""
    from ropewalk.planning.rules import bound_at
    from ropewalk.rope import Default, DynamicNtk, method_for_target

    check_plot(plot)
    before = Default(rotary_dim, rope_theta)
    if method == DynamicNtk.name:
        if factors is not None:
            raise RopewalkError("--factors has no meaning for dynamic")
        after: Any = DynamicNtk(rotary_dim, rope_theta, factor or to_length / from_length, from_length)
    else:
        short, long = _factor_lists(factors)
        parameters = {"factor": factor, "short_factor": short, "long_factor": long}
        after = method_for_target(method, before, from_length, to_length, parameters=parameters)
    inv_freq, attention_factor = after.frequencies(to_length)
    result = {
        "method": method,
        "rope_theta": after.rope_theta,
        "rotary_dim": rotary_dim,
        "from": from_length,
        "to": to_length,
        "inv_freq": inv_freq.tolist(),
        "attention_factor": attention_factor,
        "context_bound": bound_at(after, to_length),
    }
    if as_json:
        print_json(result)
    else:
        _print_frequencies(result, from_length, to_length)
    if plot is not None:
        draw_periods(before, after, from_length, to_length, plot)
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


def _numbers(text: str | None, option: str) -> Sequence[float]:
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise RopewalkError(f"{option} takes numbers with commas between, got {text!r}") from None


def _say_plot(as_json: bool, *plots: Path) -> None:
    for plot in () if as_json else plots:
        results().say(f"picture {plot}")
