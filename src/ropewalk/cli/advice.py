"""Advice on a target length, printed for two readers: what to do first, where each number comes from last."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def print_advice(advice: Advice) -> None:
    """The recommendation, the stages, every rule's setting, and formula, source and caveat of each."""
    from rich.table import Table

    from ropewalk.planning import recipe_stages

    console = results()
    console.print(f"\nTo reach {advice.target_length:,} tokens", style="bold")
    console.print(advice.action, markup=False)
    for title, sentences in (("Why", advice.reasons), ("Mind", advice.caveats)):
        if sentences:
            console.print(f"\n{title}", style="bold")
        for sentence in sentences:
            console.print(f"- {sentence}", markup=False)
    if not advice.settings:
        return
    console.print()
    table = Table(title=f"what each rule would set for {advice.target_length:,} tokens", title_justify="left")
    table.add_column("rule", no_wrap=True)
    table.add_column("setting")
    table.add_column("context bound", justify="right")
    table.add_column("reaches")
    for setting in advice.settings:
        if setting.method is not None:
            mark = " ←" if setting is advice.chosen else ""
            reaches = "yes" if setting.reaches_target else "no"
            table.add_row(f"{setting.rule}{mark}", _setting_text(setting.method), setting.reach, reaches)
    console.print(table)
    refused: dict[str | None, list[str]] = {}
    for setting in advice.settings:
        if setting.method is None:
            refused.setdefault(setting.reason, []).append(setting.rule)
    for reason, rules in refused.items():
        console.print(f"does not apply: {', '.join(rules)}: {reason}", markup=False, soft_wrap=True)
    console.print("\nWhere the numbers come from", style="bold")
    for setting in advice.settings:
        if setting.method is not None:
            _print_origin(setting.rule, setting.formula, setting.source, setting.caveat)
    _print_origin("context bound", *BOUND)
    if advice.stages:
        console.print("\nfor a recipe (steps are yours to choose):\n", markup=False)
        console.print(recipe_stages(advice.stages), markup=False, soft_wrap=True, end="")


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
