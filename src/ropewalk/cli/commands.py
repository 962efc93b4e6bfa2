"""Which commands exist; each module is imported here, so ``--help`` of one loads no other's libraries."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add every command to the program, once."""
    if app.registered_commands or app.registered_groups:
        return
    from ropewalk.cli import audit, data, evaluate, export, extend, inspect, rope, search, verify

    inspect.register(app)
    rope.register(app)
    audit.register(app)
    data.register(app)
    search.register(app)
    extend.register(app)
    export.register(app)
    evaluate.register(app)
    verify.register(app)
