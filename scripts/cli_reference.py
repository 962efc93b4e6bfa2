"""Write docs/cli.md, the list of commands, from the commands' own declarations.

python -m scripts.cli_reference [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ropewalk.cli.app import SUMMARIES
from tests.cli.option_cases import commands

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

BEGINNING = """\
# Command line

`ropewalk COMMAND --help` shows what a command does, its arguments and options with their defaults, and an example.
Of a command with many options, it describes the common ones and names the others, which `--help-all` describes.

- Lengths are numbers of tokens, and `k` and `M` stand for 1,024 and 1,048,576: `8k` is 8,192. RoPE frequencies are in
  rad/token, shares and probabilities are from 0 to 1, and times are in seconds, unless an option says otherwise.
- If an option is given twice, the last value counts, unless its help says that it may be repeated. `--no-NAME` turns
  off an option that is on by default.
- `--json` prints the result as JSON on stdout and nothing else ([what it holds](files.md#json)); notes, progress and
  errors go to stderr. `--debug`, anywhere on the line, shows the traceback of an error.
- The exit status is 0 if the work is done, 1 if it failed, 2 if the command or its input is refused, 75 if a signal
  stopped work that can be resumed (`extend`, `eval`, `search`, `compare`, `data pack`), and 130 after Ctrl-C.
- Most commands need torch. [Some](how-to/evaluate-a-server.md#evaluate) work with `ropewalk-core` alone, and the others
  say what they need.

The commands, as `scripts/cli_reference.py` lists them:

| command | what it does |
| --- | --- |
"""


def page() -> str:
    """The whole page as Markdown; a group of commands that does nothing by itself has a line too."""
    rows: dict[str, str] = {}
    for line, command in commands():
        first = line.split()[0]
        rows.setdefault(first, SUMMARIES[first])
        rows.setdefault(line, " ".join(command.help.split()))
    return BEGINNING + "".join(f"| `ropewalk {line}` | {text} |\n" for line, text in rows.items())


def main(arguments: Sequence[str]) -> int:
    if "--check" in arguments:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
