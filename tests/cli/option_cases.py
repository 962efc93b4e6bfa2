"""Every command's arguments and options, as the program itself declares them.

``python -m tests.cli.option_cases > tests/cli/options.txt`` writes the list anew that the tests compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cyclopts import App

from ropewalk.cli.app import program

KEPT = Path(__file__).with_name("options.txt")


def commands(app: App | None = None, prefix: str = "") -> Iterator[tuple[str, App]]:
    """Command lines such as ``rope bound`` with their commands; what runs where none is named stands with its group."""
    app = program() if app is None else app
    if app.default_command is not None and app.show:
        yield prefix, app
    for name in app:
        if not name.startswith("-"):
            yield from commands(app[name], f"{prefix} {name}".strip())


def listing() -> str:
    """A line for each argument and option below its command: names, value or choices, default or "required"."""
    lines = []
    for line, command in commands():
        lines.append(f"ropewalk {line}")
        # Options by their names: in which order a help shows them is no promise.
        arguments = command.assemble_argument_collection()
        for argument in sorted(arguments, key=lambda each: each.name if each.name.startswith("-") else ""):
            shown = argument.parameter
            default = f"[{shown.show_default}]" if shown.show_default else ""
            words = [
                ", ".join(argument.names) if argument.name.startswith("-") else "",
                "|".join(shown.choices or ()) or shown.metavar or "",
                "required" if argument.required else default,
                "" if shown.show else "(former name)",
            ]
            lines.append("  " + " ".join(word for word in words if word))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
