"""Write docs/cli.md, the reference of the command line, from the commands' own declarations.

python -m scripts.cli_reference [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from cyclopts import App, Group

from ropewalk.cli.app import SUMMARIES, program
from tests.cli.option_cases import commands

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

BEGINNING = """\
# Command line

Written by `scripts/cli_reference.py` from the commands' own declarations; `ropewalk COMMAND --help` shows the same.

- Lengths are numbers of tokens, and `k` and `M` stand for 1,024 and 1,048,576: `8k` is 8,192. RoPE frequencies are in
  rad/token, shares and probabilities are from 0 to 1, and times are in seconds, unless an option says otherwise.
- If an option is given twice, the last value counts, unless its help says that it may be repeated. `--no-NAME` turns
  off an option that is on by default.
- `--json` prints the result as JSON on stdout and nothing else ([what it holds](files.md#json)); notes, progress and
  errors go to stderr. `--debug`, anywhere on the line, shows the traceback of an error.
- The exit status is 0 if the work is done, 1 if it failed, 2 if the command or its input is refused, 75 if a signal
  stopped work that can be resumed (`extend`, `eval`, `search`, `compare`, `data pack`), and 130 after Ctrl-C.
"""


def escaped(text: str) -> str:
    """A help text as Markdown, on one line of a table; what it has between backticks is code already."""
    plain = r"(`[^`]*`)|([\\*\[\]<>|])"
    return re.sub(plain, lambda found: found[1] or f"\\{found[2]}", " ".join(text.split()))


def is_positional(argument: Any) -> bool:
    return not argument.name.startswith("-")


def written(argument: Any) -> str:
    """An argument or option as it is typed, with a word for its value."""
    shown = argument.parameter
    if is_positional(argument):
        return f"`{shown.metavar}`"
    own = (argument.name, "--no-" + argument.name.removeprefix("--"))
    names = ", ".join(f"`{name}`" for name in own if name in argument.names)
    return names[:-1] + f" {shown.metavar}`".replace("|", r"\|") if shown.metavar else names


def default(argument: Any) -> str:
    if argument.required:
        return "**required**"
    shown = argument.parameter.show_default
    return f"`{shown}`" if shown else ""


def meaning(shown: Any) -> str:
    choices = f" One of {', '.join(f'`{name}`' for name in shown.choices)}." if shown.choices else ""
    return escaped(shown.help) + choices


def tables(command: App) -> list[str]:
    """A table for each heading of the command's help, in the help's order: arguments come first."""
    groups: dict[str, tuple[float, list[str]]] = {}
    for argument in command.assemble_argument_collection():
        # What an option was called before is still read, and not taught.
        if not argument.parameter.show:
            continue
        group = cast("tuple[Group, ...]", argument.parameter.group)[0]
        place = -1 if is_positional(argument) else group.sort_key
        row = f"| {written(argument)} | {default(argument)} | {meaning(argument.parameter)} |"
        groups.setdefault(group.name, (place, []))[1].append(row)
    return [
        "\n".join([f"| {name} | default | meaning |", "| --- | --- | --- |", *rows])
        for name, (_, rows) in sorted(groups.items(), key=lambda item: item[1][0])
    ]


def usage(line: str, command: App) -> str:
    """The command with its arguments; those in brackets can be left out."""
    words = [
        str(argument.parameter.metavar) if argument.required else f"[{argument.parameter.metavar}]"
        for argument in command.assemble_argument_collection()
        if is_positional(argument)
    ]
    return " ".join(["ropewalk", line, *words, "[OPTIONS]"])


def section(line: str, command: App) -> str:
    """One command: what it does, how it is called, its options, and an example."""
    level = "#" * (2 + line.count(" "))
    remarks, examples = [], []
    for paragraph in (command.help_epilogue or "").split("\n\n"):
        text = paragraph.strip()
        if text.startswith("Example: "):
            example, _, more = text.removeprefix("Example: ").partition("   ")
            examples.append(example)
            remarks += [more.strip()] if more.strip() else []
        elif text:
            remarks.append(text)
    parts = [
        f"{level} ropewalk {line}",
        escaped(command.help),
        "\n".join(["```", usage(line, command), *examples, "```"]),
        *(with_commands_as_code(text) for text in remarks),
        *tables(command),
    ]
    return "\n\n".join(parts)


def with_commands_as_code(text: str) -> str:
    """A remark of a help, where a command line stands after a colon or between commas, with it as code."""
    return re.sub(
        r"((?:torchrun|ropewalk) (?:[^,.]|\.(?=\w))+)",
        lambda found: f"`{found[1].strip()}`",
        " ".join(text.split()),
    )


def reference(app: App | None = None) -> str:
    """All commands as Markdown; a group of commands that does nothing by itself has a heading too."""
    app = program() if app is None else app
    parts, seen = [BEGINNING.rstrip()], set()
    for line, command in commands(app):
        first = line.split()[0]
        if first not in seen and line != first:
            parts.append(f"## ropewalk {first}\n\n{escaped(SUMMARIES[first])}")
        seen.add(first)
        parts.append(section(line, command))
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    wanted = reference()
    if "--check" in arguments:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print(
            f"{PAGE.name} is not what the commands declare; run: python -m scripts.cli_reference",
            file=sys.stderr,
        )
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
