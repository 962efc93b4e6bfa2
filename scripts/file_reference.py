"""Write the tables of JSON keys into docs/files.md, from the classes that are written and what commands print.

python scripts/file_reference.py [--check]
"""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

from ropewalk.cli.app import main as ropewalk
from ropewalk.evaluation.comparison import ScoreDifference
from ropewalk.evaluation.predictions import Prediction
from ropewalk.evaluation.results import PositionBin, TaskResult
from ropewalk.experiments.run import Cell, ExperimentResult, Failure
from ropewalk.search.factor_table import Factors, SearchRecord
from ropewalk.training.summary import RunResult
from ropewalk.verification.result import Check, Outcome, VerifyResult

PAGE = Path(__file__).resolve().parents[1] / "docs" / "files.md"

TABLES: dict[str, tuple[type, ...]] = {
    "summary": (RunResult,),
    "result": (TaskResult,),
    "position": (PositionBin,),
    "prediction": (Prediction,),
    "difference": (ScoreDifference,),
    "comparison": (ExperimentResult,),
    "cell": (Cell,),
    "failure": (Failure,),
    "factors": (Factors,),
    "search": (SearchRecord,),
    "verify": (VerifyResult,),
    "check": (Check, Outcome),
}
"""Parts of the page, and the classes whose docstrings say their keys."""

COMMANDS = (
    "inspect embedded",
    "models llama",
    "rope bound --rope-theta 10000 --rotary-dim 64",
    "rope base --length 1k --rotary-dim 64",
    "rope theta --rope-theta 10000 --from 4k --to 16k --rotary-dim 64",
    "rope frequencies --method yarn --rope-theta 10000 --rotary-dim 64 --from 4k --to 16k",
    "rope plan embedded --to 512",
)
"""Commands that are quick enough to be run for the keys of what they print."""

IN_JSON = {
    "None, and left out of JSON,": "Left out",
    "Empty, and left out of JSON,": "Left out",
    "NaN (null in JSON)": "null",
    "``[pairs]`` ": "",
}
"""What docstrings say of Python values, and what of it concerns a reader of the JSON files."""

NAMES = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def attributes(kind: type) -> Iterator[tuple[list[str], str]]:
    """Names and meanings in the ``Attributes`` of a class's docstring, in its order."""
    text = inspect.getdoc(kind) or ""
    found: list[tuple[list[str], str]] = []
    for line in text.partition("Attributes:\n")[2].split("\n"):
        if line.startswith("        "):
            names, meaning = found.pop()
            found.append((names, f"{meaning} {line.strip()}"))
        elif line.startswith("    ") and (said := NAMES.match(line.strip())):
            found.append((said[1].split(", "), said[2]))
        else:
            break
    return iter(found)


def plain(meaning: str) -> str:
    """A meaning as one cell of Markdown: roles and double backticks become code, brackets no links."""
    for said, shown in IN_JSON.items():
        meaning = meaning.replace(said, shown)
    text = re.sub(r":\w+:`~?([\w.]*?)(\w+)`", r"`\2`", meaning).replace("``", "`")
    text = re.sub(r"(`[^`]*`)|([\[\]|])", lambda found: found[1] or f"\\{found[2]}", text)
    return text.replace("None", "null")


def keys_of(kinds: tuple[type, ...]) -> set[str]:
    """What objects of the first class have."""
    model = getattr(kinds[0], "model_fields", None)
    return set(model) if model is not None else {each.name for each in fields(kinds[0])}


def table(kinds: tuple[type, ...]) -> str:
    """The keys of a class, as its docstring and those of its bases say them."""
    said = [entry for kind in kinds for entry in attributes(kind)]
    silent = keys_of(kinds) - {name for names, _ in said for name in names} - {"format"}
    if silent:
        sys.exit(f"the docstring of {kinds[0].__name__} does not say what {', '.join(sorted(silent))} is")
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {plain(meaning)} |" for names, meaning in said]
    return "\n".join(["| key | meaning |", "| --- | --- |", *rows])


def printed(line: str) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    out = io.StringIO()
    with redirect_stdout(out):
        status = ropewalk([*line.split(), "--json"])
    if status:
        sys.exit(f"ropewalk {line} --json ended with {status}")
    values: dict[str, Any] = json.loads(out.getvalue())
    return values


def command_table() -> str:
    rows = []
    for line in COMMANDS:
        words = line.split()
        name = " ".join(words[: 2 if words[0] == "rope" else 1])
        rows.append(f"| `{name}` | {', '.join(f'`{key}`' for key in printed(line))} |")
    return "\n".join(["| command | keys |", "| --- | --- |", *rows])


def with_part(text: str, name: str, part: str) -> str:
    """The page with one part written anew."""
    begin, end = f"<!-- {name}: written by scripts/file_reference.py -->", f"<!-- /{name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"


def main() -> None:
    text = wanted = PAGE.read_text(encoding="utf-8")
    for name, kinds in TABLES.items():
        wanted = with_part(wanted, name, table(kinds))
    wanted = with_part(wanted, "commands", command_table())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.exit(f"the tables in {PAGE.name} are stale; run python scripts/file_reference.py")


if __name__ == "__main__":
    main()
