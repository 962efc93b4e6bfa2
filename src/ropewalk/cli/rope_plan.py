"""``ropewalk rope plan``: the stages from a checkpoint to a target length."""

from __future__ import annotations

from typing import Annotated

import typer

from ropewalk.cli.inspect import advise_on, default_notes, read_config
from ropewalk.cli.options import ToOption
from ropewalk.cli.output import JsonOption, print_json, results, searching
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import parse_length


def register(group: typer.Typer) -> None:
    """Add the command to the group ``rope``."""
    group.command("plan", epilog="Example: ropewalk rope plan meta-llama/Meta-Llama-3-8B --to 1M")(
        plan_command
    )


def plan_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a config.json, or a Hub id.")
    ],
    to_length: ToOption,
    from_length: Annotated[
        int | None,
        typer.Option(
            "--from",
            parser=parse_length,
            metavar="LENGTH",
            help="Trained length; what the config states if not given.",
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="critical-dimension, length-floor, ntk, lower-bound, schedule:NAME, linear, yarn, llama3, theta=5e6; "
            "if not given, what inspect --target recommends."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Also list the bases of every rule beside published ones; takes seconds.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan the stages to a longer context: at which lengths to train, with which RoPE, and why."""
    from rich.table import Table

    from ropewalk.cli.advice import print_bases
    from ropewalk.planning import plan_stages, recipe_stages
    from ropewalk.planning.checkpoint import of_checkpoint
    from ropewalk.rope import check_candidate, config_tensions

    if rule is not None:
        check_candidate(rule)
    config = read_config(model)
    checkpoint = of_checkpoint(config.values, from_length)
    trained = checkpoint.trained_length
    said = [*config_tensions(config.values), *checkpoint.notes]
    advice = advise_on(config, checkpoint, to_length, explain=explain)
    if advice.refusals:
        raise RopewalkError(advice.action.rstrip("."))
    with searching(f"safe base for {to_length:,} tokens", None) as progress:
        stages = plan_stages(checkpoint.method, trained, to_length, rule, progress=progress)
    snippet = recipe_stages(stages)
    if as_json:
        print_json(
            {
                "model": model,
                "trained_length": trained,
                "target_length": to_length,
                "defaults": config.defaults,
                "notes": said,
                "stages": [stage.to_json() for stage in stages],
                "recipe": snippet,
                "advice": advice.to_json(),
            }
        )
        return
    console = results()
    table = Table(title=f"from {trained:,} to {to_length:,} tokens", title_justify="left")
    for name in ("context", "method", "rope_theta", "factor"):
        table.add_column(name, justify="right")
    table.add_column("reason")
    for stage in stages:
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
    for line in (*default_notes(config.defaults, config.config_class), *said):
        console.print(f"note: {line}", markup=False, soft_wrap=True)
    console.print("\nfor a recipe (steps are yours to choose):\n", markup=False)
    console.print(snippet, markup=False, soft_wrap=True, end="")
