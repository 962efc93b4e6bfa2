"""Compare rules for the base with what published models took: docs/published-bases.json, summed up in docs/theory.md.

python scripts/published_bases.py [--check]

--check computes what needs no map of the feasible bases again, and compares; the maps take some minutes.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from ropewalk.planning.rules import WIDE
from ropewalk.rope.theory import EXTENSIONS, SAFE_CEILING, Extension, feasible_bases, recommended_theta
from ropewalk.rope.theory.scaling import scaled_theta

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, NUMBERS = DOCS / "theory.md", DOCS / "published-bases.json"
BEGIN, END = "<!-- published: written by scripts/published_bases.py -->", "<!-- /published -->"
WIDTHS = (0.05, WIDE, 0.2)
LAW, INFIMUM, SAFE = "law", "infimum", "safe base"
INTERVALS = {f"interval of {width:.0%}": width for width in WIDTHS}
RECOMMENDED = "recommended: larger of law and floor"
RULES = {
    LAW: (LAW,),
    INFIMUM: (INFIMUM,),
    SAFE: (SAFE,),
    f"larger of law and {INFIMUM}": (LAW, INFIMUM),
    **{f"larger of law and {name}": (LAW, name) for name in INTERVALS},
    f"larger of law and {SAFE}": (LAW, SAFE),
}
"""Each rule as the demands that it takes the largest of."""


def mapped(length: int, rotary_dim: int) -> dict[str, float | None]:
    """What the map of feasible bases of a length says."""
    found = feasible_bases(length, rotary_dim, SAFE_CEILING)
    wide = {
        name: next((low for low, high in found.feasible if high >= (1 + width) * low), None)
        for name, width in INTERVALS.items()
    }
    return {INFIMUM: found.infimum, **wide, SAFE: found.safe_base}


def record(each: Extension, maps: dict[str, dict[str, float | None]]) -> dict[str, Any]:
    """One published step with the base of every rule."""
    demands = {
        LAW: scaled_theta(each.rope_theta, each.trained_length, each.target_length),
        **maps[key_of(each)],
    }
    known = {part: base for part, base in demands.items() if base is not None}
    rules = {
        name: max(known[part] for part in parts) if known.keys() >= set(parts) else None
        for name, parts in RULES.items()
    }
    found = recommended_theta(each.rope_theta, each.trained_length, each.target_length, each.rotary_dim)
    return {**vars(each), "rules": {**rules, RECOMMENDED: found.rope_theta}, "rule": found.rule}


def key_of(each: Extension) -> str:
    return f"{each.target_length} tokens, {each.rotary_dim} dimensions"


def summary(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median, spread and ends of each rule's ratio to the published base; the spread is a root mean square factor."""
    summaries = {}
    for name in records[0]["rules"]:
        ratios = [each["rules"][name] / each["new_theta"] for each in records if each["rules"][name]]
        logs = [math.log(ratio) for ratio in ratios]
        summaries[name] = {
            "median": statistics.median(ratios),
            "spread": math.exp(math.sqrt(statistics.fmean(log**2 for log in logs))),
            "least": min(ratios),
            "most": max(ratios),
            "within_2": sum(0.5 <= ratio <= 2 for ratio in ratios),
            "of": len(ratios),
        }
    return summaries


def table(records: list[dict[str, Any]]) -> str:
    """The rules by their distance from the published bases, as Markdown."""
    lines = [
        "| rule | median ratio | typical factor off | smallest ratio | largest ratio | "
        "published bases within a factor of 2 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in sorted(summary(records).items(), key=lambda item: item[1]["spread"]):
        said = f"**{name}**" if name == RECOMMENDED else name
        lines.append(
            f"| {said} | {row['median']:.2f} | {row['spread']:.2f} | {row['least']:.2f} | {row['most']:.1f} | "
            f"{row['within_2']} of {row['of']} |"
        )
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """Numbers with two digits: another processor may round the last one the other way."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return f"{value:.1e}" if isinstance(value, float) else value


def main() -> None:
    check = "--check" in sys.argv[1:]
    stored = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {"maps": {}}
    maps = stored["maps"]
    for each in EXTENSIONS:
        if key_of(each) not in maps:
            if check:
                sys.exit(f"{NUMBERS.name} lacks {key_of(each)}; run python scripts/published_bases.py")
            print(key_of(each), file=sys.stderr, flush=True)
            maps[key_of(each)] = mapped(each.target_length, each.rotary_dim)
            NUMBERS.write_text(json.dumps({"maps": maps}, indent=1) + "\n", encoding="utf-8")
    records = [
        {**record(each, maps), "wide": maps[key_of(each)][f"interval of {WIDE:.0%}"]} for each in EXTENSIONS
    ]
    numbers = {"maps": maps, "summary": summary(records), "extensions": records}
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n\n{table(records)}\n\n{END}{after}"
    if check:
        if wanted != text or rounded(stored.get("extensions", ())) != rounded(records):
            sys.exit(f"{PAGE.name} or {NUMBERS.name} is stale; run python scripts/published_bases.py")
        return
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
