"""``ropewalk rope plan``: the stages from a checkpoint to a target length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.advice import default_notes
from ropewalk.cli.options import JsonFlag, TargetLength
from ropewalk.cli.output import print_json, results, searching
from ropewalk.io.settings import Length, Option


def plan_command(
    model: Annotated[str, Field(description="A checkpoint's folder, a config.json, or a Hub id.")],
    *,
    to_length: TargetLength,
    from_length: Annotated[
        Length | None,
        Option(name="--from"),
        Field(description="Trained length; what the config states if not given."),
    ] = None,
    rule: Annotated[
        str | None,
        Field(
            description="critical-dimension, length-floor, ntk, lower-bound, schedule:NAME, linear, yarn, llama3, "
            "theta=5e6; if not given, what inspect --target recommends."
        ),
    ] = None,
    explain: Annotated[
        bool, Field(description="Also list the bases of every rule beside published ones; takes seconds.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Plan the stages to a longer context: at which lengths to train, with which RoPE, and why."""
    from rich.table import Table

    from ropewalk.cli.advice import print_bases
    from ropewalk.planning.run import plan

    with searching(f"bases for {to_length:,} tokens", None) as progress:
        found = plan(model, to_length, rule=rule, from_length=from_length, explain=explain, progress=progress)
    if as_json:
        print_json(found.to_json())
        return
    advice, trained, config = found.advice, found.config.trained_length, found.config
    console = results()
    table = Table(title=f"from {trained:,} to {to_length:,} tokens", title_justify="left")
    for name in ("context", "method", "rope_theta", "factor"):
        table.add_column(name, justify="right")
    table.add_column("reason")
    for stage in found.stages:
        values = stage.to_json()
        factor = "" if values["factor"] is None else f"{values['factor']:g}"
        table.add_row(
            f"{stage.context:,}",
            stage.recipe_method,
            f"{stage.method.rope_theta:,.10g}",
            factor,
            stage.reason,
        )
    console.print(table)
    if explain:
        print_bases(advice)
    for line in () if rule is not None else advice.reasons:
        console.print(f"- {line}", markup=False)
    for line in (*default_notes(config.defaults, config.config_class), *found.notes):
        console.print(f"note: {line}", markup=False, soft_wrap=True)
    console.print("\nfor a recipe (steps are yours to choose):\n", markup=False)
    console.print(found.recipe, markup=False, soft_wrap=True, end="")
