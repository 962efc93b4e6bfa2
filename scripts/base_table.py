"""Write the table of RoPE bases by context length into docs/theory.md, and its numbers into docs/bases.json.

python scripts/base_table.py [--check]

--check computes the shorter lengths again and compares; the longest takes a minute.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from ropewalk.io.lengths import format_length
from ropewalk.rope.theory import SAFE_CEILING, FeasibleBases, feasible_bases
from ropewalk.rope.theory.published import LOWER_BOUNDS, LOWER_BOUNDS_DIM

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, NUMBERS = DOCS / "theory.md", DOCS / "bases.json"
BEGIN, END = "<!-- bases: written by scripts/base_table.py -->", "<!-- /bases -->"
CHECKED_LENGTH = 16384
LISTED = 3
"""Intervals of a length that the table shows, the widest ones below the safe base."""


def record(found: FeasibleBases, published: float) -> dict[str, Any]:
    """What the table says of one length; all intervals are in the JSON file."""
    assert found.infimum is not None
    assert found.safe_base is not None
    below = [ends for ends in found.feasible if ends[0] < found.safe_base]
    covered = sum(math.log(high / low) for low, high in below)
    span = math.log(found.safe_base / found.infimum)
    holds = next((ends for ends in found.feasible if ends[0] <= published <= ends[1]), None)
    return {
        "length": found.length,
        "infimum": found.infimum,
        "safe_base": found.safe_base,
        "intervals": len(found.feasible),
        "feasible_share_below_safe_base": covered / span if span else 1.0,
        "published": published,
        "published_is_feasible": holds is not None,
        "feasible": [list(ends) for ends in found.feasible],
    }


def table(records: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [
        "| length in tokens | published | infimum | feasible intervals | feasible share from infimum to safe base | "
        "safe base | widest intervals below the safe base |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in records:
        below = [ends for ends in each["feasible"] if ends[0] < each["safe_base"]]
        widest = sorted(sorted(below, key=lambda ends: ends[0] / ends[1])[:LISTED])
        mark = "" if each["published_is_feasible"] else " ✗"
        lines.append(
            f"| {format_length(each['length'])} | {number(each['published'], 2)}{mark} | "
            f"**{number(each['infimum'], 4)}** | {each['intervals']:,} | "
            f"{100 * each['feasible_share_below_safe_base']:.0f} % | **{number(each['safe_base'], 4)}** | "
            + ", ".join(f"{number(low, 4)}–{number(high, 4)}" for low, high in widest)
            + " |"
        )
    return "\n".join(lines)


def number(value: float, digits: int) -> str:
    """``4.206e3``, as the paper writes it."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def main() -> None:
    check = "--check" in sys.argv[1:]
    records = json.loads(NUMBERS.read_text()) if check else []
    for number_, (length, published) in enumerate(LOWER_BOUNDS.items()):
        if check and length > CHECKED_LENGTH:
            break
        print(f"{length} tokens", file=sys.stderr)
        now = record(feasible_bases(length, LOWER_BOUNDS_DIM, SAFE_CEILING), published)
        if not check:
            records.append(now)
        elif not same(now, records[number_]):
            sys.exit(f"{NUMBERS.name} is stale at {length} tokens; run python scripts/base_table.py")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n\n{table(records)}\n\n{END}{after}"
    if check and wanted != text:
        sys.exit(f"the table in {PAGE.name} is stale; run python scripts/base_table.py")
    if not check:
        NUMBERS.write_text(json.dumps(records) + "\n", encoding="utf-8")
        PAGE.write_text(wanted, encoding="utf-8")


def same(now: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Equal but for the last of nine digits, which another processor may round the other way."""
    flat = [[*each["feasible"], [each["infimum"], each["safe_base"]]] for each in (now, stored)]
    return len(flat[0]) == len(flat[1]) and all(
        math.isclose(a, b, rel_tol=1e-8)
        for old, new in zip(*flat, strict=True)
        for a, b in zip(old, new, strict=True)
    )


if __name__ == "__main__":
    main()
