"""Which commands exist; a command's module is imported when the command is asked for."""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "inspect": "Show a checkpoint's RoPE and how far it reaches; with --target, what that length needs.",
    "rope": "RoPE arithmetic: bounds, bases, frequencies, plans, and a probe on a checkpoint.",
    "audit": "Measure how far arithmetic breaks relative positions in a model, which step does it, and what "
    "mitigates it.",
    "data": "Pack documents into rows, and look at them.",
    "search": "Search rescale factors (LongRoPE) for a longer context; show and import tables of them.",
    "extend": "Extend a model's context: measure, change RoPE, train, measure again, save.",
    "export": "Write a checkpoint with a factor table in its config, as longrope, and the weights as they are.",
    "eval": "Measure a checkpoint on long-context and short-context benchmarks; compare two measurements.",
    "verify": "Verify on your model and documents that packing, ranks, checkpoints and RoPE change no number.",
}
"""One line on each command, in the order of the help; it is there before the command's module is imported."""

HOMES = {"eval": "evaluate"}
"""Modules of commands that are not called as the command is."""


def register(app: App) -> None:
    """Add every command to the program."""
    for place, (name, help) in enumerate(COMMANDS.items()):
        app.command(f"ropewalk.cli.{HOMES.get(name, name)}:app", name=name, help=help, sort_key=place)
