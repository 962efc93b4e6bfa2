"""Write docs/readers.md's table: published configs through every reader.

python scripts/readers_page.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ropewalk.readers import READERS, Reading
from ropewalk.readers.table import checkpoint_of, readings_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/readers.md"
SOURCES = "<!-- sources: written by scripts/readers_page.py -->", "<!-- /sources -->"
PUBLISHED = "<!-- published: written by scripts/readers_page.py -->", "<!-- /published -->"
WITHOUT_ROPE = ("nemotron-3-nano-30b-a3b",)
CELLS = {"same": "same", "with an option": "**option**", "differs": "**differs**", "refuses": "**refuses**",
    "not known": "–"}  # fmt: skip


def configs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Published configs with RoPE by name, as the tests have them."""
    for path in sorted((ROOT / "tests/configs").glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))
    more = json.loads((ROOT / "tests/planning/published.json").read_text(encoding="utf-8"))
    for name, entry in more.items():
        if name not in WITHOUT_ROPE:
            yield name, entry["config"]


def cell(reading: Reading, length: int) -> str:
    """The verdict, and the length that the program serves by itself where it is not the config's."""
    served = "" if reading.served in (None, length) else f", serves {reading.served:,}"
    return CELLS[reading.verdict] + served


def sources() -> str:
    """The table of programs with the files that were read."""
    rows = [f"| {each.program} | `{each.key}` | {each.source} |" for each in READERS]
    return "\n".join(["| program | `--for` | rules read from |", "| --- | --- | --- |", *rows])


def published() -> str:
    """The table of published configs, and every difference in words."""
    # transformers 5 defines what a config means.
    others = [each for each in READERS if each.key != "transformers"]
    rows, told = [], []
    for name, raw in configs():
        checkpoint = checkpoint_of(raw, name)
        found = {each.key: each for each in readings_of(checkpoint, name)}
        cells = [cell(found[each.key], checkpoint.length) for each in others]
        rows.append(f"| {name} | {checkpoint.length:,} | {' | '.join(cells)} |")
        told += [
            f"- {name}, {each.program}: {found[each.key].detail}"
            for each in others
            if found[each.key].verdict in ("with an option", "differs", "refuses")
        ]
    head = ["model", "tokens", *(each.program for each in others)]
    table = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |", *rows]
    return "\n".join([*table, "", "The differences:", "", *told])


def replaced(text: str, marks: tuple[str, str], content: str) -> str:
    """The text with other content between two marks."""
    before, rest = text.split(marks[0])
    return f"{before}{marks[0]}\n\n{content}\n\n{marks[1]}{rest.split(marks[1])[1]}"


def main() -> int:
    """Write the page, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    wanted = replaced(replaced(text, SOURCES, sources()), PUBLISHED, published())
    if "--check" in sys.argv[1:]:
        return 0 if wanted == text else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
