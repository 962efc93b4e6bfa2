"""The picture of ``python -m benchmarks.gpu``: attention by the length of its rows, and steps beside the plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ropewalk.reporting import style
from ropewalk.reporting.figures.primitives import (
    Axis,
    Boxes,
    Figure,
    Fill,
    Line,
    Look,
    Mark,
    Note,
    Panel,
    length_ticks,
    row_axis,
)

MEAN = 2048
"""Mean length of the documents of the rows that are drawn."""
MOST_STEPS = 12
PANELS = {
    "full": "full attention",
    "intra_document": f"documents of {MEAN:,} tokens",
    "anchor": f"documents of {MEAN:,} tokens and an anchor",
}
KERNELS = {
    "FA4": (style.LINE_COLOURS[4], "P"),
    "FA3": (style.LINE_COLOURS[6], "v"),
    "varlen": (style.BLUE, "o"),
    "flex": (style.GREEN, "^"),
    "cuDNN": (style.LINE_COLOURS[7], "X"),
    "sdpa": (style.VERMILION, "s"),
    "segments": (style.VERMILION, "D"),
}
"""Colour and marker of a way by the first of these words in its name."""


def figure(result: Mapping[str, Any]) -> Figure | None:
    """The picture of a result file; None if it has neither attention nor steps."""
    sections = result["sections"]
    attention, steps = (sections.get(name, {}).get("rows", []) for name in ("attention", "step"))
    panels = [panel for pattern in PANELS if (panel := attention_panel(attention, pattern)) is not None]
    panels += [panel] if (panel := step_panel(steps)) is not None else []
    if not panels:
        return None
    machine = result.get("machine", {})
    return Figure(
        tuple(panels),
        title=f"ropewalk on {machine.get('device', 'this machine')}, {machine.get('date', 'undated')}",
        caption="Attention, forward and backward: operations of the visible pairs over time, as a share of the rate "
        "of a large matrix product. Bare kernels are dashed. Steps: seconds of one optimizer step of one row.",
        columns=min(2, len(panels)),
        height=style.HEIGHT_INCHES * (1.0 if len(panels) < 3 else 1.9),
        width=style.WIDTH_INCHES * (1.0 if len(panels) == 1 else 1.5),
    )


def attention_panel(rows: Iterable[Mapping[str, Any]], pattern: str) -> Panel | None:
    """The share of the matrix rate by the length of a row, a line for each way."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        drawn = row["pattern"] == pattern and row.get("mean_document") in (MEAN, None)
        if drawn and "of_matmul_rate" in row:
            lines.setdefault(row["way"], {})[row["length"]] = row["of_matmul_rate"]
    if not lines:
        return None
    lengths = sorted({length for line in lines.values() for length in line})
    marks = tuple(
        Line([*line], [*line.values()], look_of(way), way)
        for way, line in ((way, dict(sorted(line.items()))) for way, line in lines.items())
    )
    highest = max(value for line in lines.values() for value in line.values())
    return Panel(
        marks,
        Axis("tokens of a row", "log2", ticks=length_ticks(lengths)),
        Axis("share of the matrix rate", limits=(0, 1.25 * highest), text=style.percent_text),
        heading=(PANELS[pattern], ""),
        key=True,
    )


def look_of(way: str) -> Look:
    colour, marker = next(
        (look for word, look in KERNELS.items() if word.lower() in way.lower()), (style.GREY, "*")
    )
    bare = way.startswith("bare")
    return Look(colour, "--" if bare else "-", marker, hollow=bare)


def step_panel(rows: Sequence[Mapping[str, Any]]) -> Panel | None:
    """Bars of the seconds of steps, in the order measured."""
    shown = [row for row in rows if "seconds" in row][:MOST_STEPS]
    if not shown:
        return None
    names = [name_of(row) for row in shown]
    seconds = [float(row["seconds"]) for row in shown]
    marks: list[Mark] = []
    for ours, fill in ((True, Fill(style.FILLS[1], style.BLUE)), (False, Fill("white", style.GREY, "///"))):
        places = [n for n, row in enumerate(shown) if (row["way"] == "ropewalk") == ours]
        bars = [seconds[n] for n in places]
        low, high = [n - 0.38 for n in places], [n + 0.38 for n in places]
        if places:
            marks.append(Boxes([0.0] * len(bars), bars, low, high, fill, "ropewalk" if ours else "others"))
    marks += [Note(f"{value:.2f}", value, float(n), 3, -3, size=8) for n, value in enumerate(seconds)]
    return Panel(
        tuple(marks),
        Axis("seconds of a step", limits=(0, 1.15 * max(seconds))),
        row_axis(names),
        grid="x",
        key=True,
    )


def name_of(row: Mapping[str, Any]) -> str:
    """A row of the section ``step`` in a few words."""
    switches = [key for key, value in row.items() if value is True and key != "gradient_checkpointing"]
    kept = [] if row["gradient_checkpointing"] else ["all kept"]
    length = style.length_text(row["length"])
    return ", ".join([f"{row['model']} {length} {row['pattern']}", *kept, *switches, row["way"]])
