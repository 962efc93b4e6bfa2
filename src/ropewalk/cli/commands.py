"""Which commands exist; a command's module is imported when the command is asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer
from cyclopts import App

COMMANDS = {
    "inspect": "Show a checkpoint's RoPE and how far it reaches; with --target, what that length needs.",
    "rope": "RoPE arithmetic: bounds, bases, frequencies, plans, and a probe on a checkpoint.",
    "audit": "Audit the precision of a checkpoint's attention and of its RoPE.",
    "data": "Pack documents into rows, and look at them.",
    "search": "Search rescale factors (LongRoPE) for a longer context; show and import tables of them.",
    "extend": "Extend a model's context as a recipe says.",
    "export": "Write a checkpoint with another RoPE.",
    "eval": "Measure a checkpoint on long-context and short-context benchmarks; compare two measurements.",
    "verify": "Check on this machine that training computes what it should.",
}
"""One line on each command, in the order of the help."""

HOMES = {
    "audit": "ropewalk.cli.audit:app",
    "data": "ropewalk.cli.data:app",
    "inspect": "ropewalk.cli.inspect:app",
    "rope": "ropewalk.cli.rope:app",
    "search": "ropewalk.cli.search:app",
    "export": "ropewalk.cli.export:app",
    "eval": "ropewalk.cli.evaluate:app",
    "verify": "ropewalk.cli.verify:app",
}
TYPER_COMMANDS = frozenset(COMMANDS) - frozenset(HOMES)


def register(app: App) -> None:
    """Add every command to the program."""
    for place, (name, help) in enumerate(COMMANDS.items()):
        if name in HOMES:
            app.command(HOMES[name], name=name, help=help, sort_key=place)
        else:
            app.command(App(name=name, help=help, sort_key=place))


@cache
def typer_program() -> Any:
    """The commands that typer runs."""
    from ropewalk.cli import extend

    app = typer.Typer(
        name="ropewalk",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for module in (extend,):
        module.register(app)
    return typer.main.get_command(app)
