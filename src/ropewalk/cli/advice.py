"""Advice on a target length, printed for two readers: what to do first, where each number comes from last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropewalk.cli.output import results

if TYPE_CHECKING:
    from ropewalk.planning import Advice
    from ropewalk.rope import RopeMethod


BOUND = (
    "the largest L with B(m) = Σ cos(m·θ_i) ≥ 0 for all whole 0 ≤ m ≤ L",
    "Men et al., arXiv:2405.14591, section 4",
    "rotated dimensions only; attention factors and what a model learns are left out",
)
"""Formula, source and caveat."""


def print_advice(advice: Advice, notes: Sequence[str]) -> None:
    """The answer with its stages, and at most a screen of reasons.

    Args:
        advice: what to print.
        notes: what to know of the checkpoint itself.
    """
    from ropewalk.planning import recipe_stages

    console = results()
    console.print(f"To reach {advice.target_length:,} tokens", style="bold")
    console.print(advice.action, markup=False)
    if advice.stages:
        console.print("\nFor a recipe (steps are yours to choose):", style="bold")
        console.print(recipe_stages(advice.stages), markup=False, soft_wrap=True, end="")
    _print_list("Why", advice.reasons)
    _print_list("Note", [*notes, *advice.caveats])
    if advice.reasons:
        console.print(
            "\n--explain shows every rule's setting, which bases reach the target, and all sources.",
            markup=False,
        )


def print_details(advice: Advice) -> None:
    """Every rule's setting, the bases that reach the target beside published ones, and where each number is from."""
    if not advice.settings:
        return
    print_bases(advice)
    _print_settings(advice)
    results().print("\nWhere the numbers come from", style="bold")
    for setting in advice.settings:
        if setting.method is not None:
            _print_origin(setting.rule, setting.formula, setting.source, setting.caveat)
    _print_origin("context bound", *BOUND)


def print_bases(advice: Advice) -> None:
    """The bases that the rules and the similarity margin give, beside what published models took."""
    from rich.table import Table

    from ropewalk.planning.rules import WIDE

    console = results()
    found = advice.recommendation
    table = Table(title=f"\nbases for {advice.target_length:,} tokens", title_justify="left")
    table.add_column("what")
    table.add_column("rope_theta", justify="right", no_wrap=True)
    if found is not None:
        table.add_row("critical-dimension law", f"{found.law:,.0f}")
        table.add_row("length floor: smallest feasible base of 128 rotary dimensions", f"{found.floor:,.0f}")
    feasible = advice.feasible
    if feasible is not None and feasible.reason is None:
        own = f"of {feasible.rotary_dim} rotary dimensions"
        many = f"{feasible.intervals:,} intervals"
        table.add_row(f"smallest feasible base {own} ({many})", _base(feasible.infimum, feasible.ceiling))
        wide = f"first feasible interval at least {WIDE:.0%} wide"
        table.add_row(wide, _base(feasible.wide_from, feasible.ceiling))
        safe = f"safe base: all larger ones up to {feasible.ceiling:g} are feasible"
        table.add_row(safe, _base(feasible.safe_base, feasible.ceiling))
    table.add_section()
    for each in advice.published:
        begin = f"from {each.trained_length:,} tokens with base {each.rope_theta:,.0f}"
        table.add_row(f"{each.model}: {each.target_length:,} tokens, {begin}", f"{each.new_theta:,.0f}")
    console.print(table)
    if feasible is not None and feasible.reason is not None:
        console.print(f"feasible bases: {feasible.reason}", markup=False, soft_wrap=True)


def _base(value: float | None, ceiling: float) -> str:
    return f"none up to {ceiling:g}" if value is None else f"{value:,.0f}"


def _print_settings(advice: Advice) -> None:
    from rich.table import Table

    console = results()
    table = Table(title=f"\nwhat each rule sets for {advice.target_length:,} tokens", title_justify="left")
    table.add_column("rule", no_wrap=True)
    table.add_column("setting")
    table.add_column("context bound", justify="right")
    table.add_column("reaches")
    recommended = None if advice.chosen is None else advice.chosen.rule
    for setting in advice.settings:
        if setting.method is not None:
            mark = " ←" if setting.rule == recommended else ""
            reaches = "yes" if setting.reaches_target else "no"
            table.add_row(f"{setting.rule}{mark}", _setting_text(setting.method), setting.reach, reaches)
    console.print(table)
    refused: dict[str | None, list[str]] = {}
    for setting in advice.settings:
        if setting.method is None:
            refused.setdefault(setting.reason, []).append(setting.rule)
    for reason, rules in refused.items():
        console.print(f"does not apply: {', '.join(rules)}: {reason}", markup=False, soft_wrap=True)


def _print_list(title: str, sentences: Sequence[str]) -> None:
    console = results()
    if sentences:
        console.print(f"\n{title}", style="bold")
    for sentence in sentences:
        console.print(f"- {sentence}", markup=False)


def _print_origin(name: str, formula: str, source: str, caveat: str) -> None:
    console = results()
    console.print(name, markup=False)
    for label, text in (("formula", formula), ("source", source), ("caveat", caveat)):
        console.print(f"  {label:8} {text}", markup=False, soft_wrap=True)


def _setting_text(method: RopeMethod) -> str:
    factor = getattr(method, "factor", None)
    if factor is not None:
        return f"{method.name}, factor {factor:g}, base {method.rope_theta:,.10g}"
    return f"rope_theta {method.rope_theta:,.10g}"


def default_notes(defaults: Mapping[str, Any], config_class: str | None) -> list[str]:
    """A sentence for each value that the config leaves to its class: never a silent default."""
    return [
        f"config.json does not say {key}; {config_class}'s own default {summary(value)} is what transformers uses"
        for key, value in defaults.items()
    ]


def summary(value: object) -> str:
    """A value of a config in a few characters."""
    if isinstance(value, tuple):
        return f"{len(value)} factors, {min(value):g} to {max(value):g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
