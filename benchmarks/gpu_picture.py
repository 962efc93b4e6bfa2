"""The picture of ``python -m benchmarks.gpu``: attention by the length of its rows, and steps beside the plain loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    Axes,
    Figure,
    Options,
    area,
    boxes,
    canvas,
    complete,
    heading,
    look,
    note,
    row_scale,
    scale,
)
from ropewalk.reporting.figures.prepare import length_ticks

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
    drawn = {pattern: found for pattern in PANELS if (found := lines_of(attention, pattern))}
    shown = [row for row in steps if "seconds" in row][:MOST_STEPS]
    count = len(drawn) + bool(shown)
    if not count:
        return None
    panels = canvas(
        count,
        min(2, count),
        height=style.HEIGHT_INCHES * (1.0 if count < 3 else 1.9),
        width=style.WIDTH_INCHES * (1.0 if count == 1 else 1.5),
    )
    for axes, (pattern, lines) in zip(panels, drawn.items(), strict=False):
        draw_attention(axes, lines, pattern)
    if shown:
        draw_steps(panels[-1], shown)
    machine = result.get("machine", {})
    return complete(
        panels,
        f"ropewalk on {machine.get('device', 'this machine')}, {machine.get('date', 'undated')}",
        "Attention, forward and backward: operations of the visible pairs over time, as a share of the rate of a large "
        "matrix product. Bare kernels are dashed. Steps: seconds of one optimizer step of one row.",
        keys=panels,
    )


def lines_of(rows: Iterable[Mapping[str, Any]], pattern: str) -> dict[str, dict[int, float]]:
    """The share of the matrix rate by the length of a row, for each way."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        drawn = row["pattern"] == pattern and row.get("mean_document") in (MEAN, None)
        if drawn and "of_matmul_rate" in row:
            lines.setdefault(row["way"], {})[row["length"]] = row["of_matmul_rate"]
    return lines


def draw_attention(axes: Axes, lines: Mapping[str, Mapping[int, float]], pattern: str) -> None:
    lengths = sorted({length for line in lines.values() for length in line})
    highest = max(value for line in lines.values() for value in line.values())
    scale(axes.xaxis, "tokens of a row", "log2", ticks=length_ticks(lengths))
    scale(axes.yaxis, "share of the matrix rate", limits=(0, 1.25 * highest), text=style.percent_text)
    for way, line in lines.items():
        axes.plot(*zip(*sorted(line.items()), strict=True), label=way, **look_of(way))
    heading(axes, PANELS[pattern], "")


def look_of(way: str) -> Options:
    colour, marker = next(
        (own for word, own in KERNELS.items() if word.lower() in way.lower()), (style.GREY, "*")
    )
    bare = way.startswith("bare")
    return look(colour, "--" if bare else "-", marker, hollow=bare)


def draw_steps(axes: Axes, shown: Sequence[Mapping[str, Any]]) -> None:
    """Bars of the seconds of steps, in the order measured."""
    seconds = [float(row["seconds"]) for row in shown]
    scale(axes.xaxis, "seconds of a step", limits=(0, 1.15 * max(seconds)))
    row_scale(axes, [name_of(row) for row in shown])
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color=style.FAINT, linewidth=0.6)
    for ours, options in (
        (True, area(style.FILLS[1], style.BLUE)),
        (False, area("white", style.GREY, "///")),
    ):
        places = np.array([n for n, row in enumerate(shown) if (row["way"] == "ropewalk") == ours])
        if len(places):
            bars = np.array(seconds)[places]
            boxes(axes, 0, bars, places - 0.38, places + 0.38, options, "ropewalk" if ours else "others")
    for row, value in enumerate(seconds):
        note(axes, f"{value:.2f}", (value, row), (3, -3), size=8)


def name_of(row: Mapping[str, Any]) -> str:
    """A row of the section ``step`` in a few words."""
    switches = [key for key, value in row.items() if value is True and key != "gradient_checkpointing"]
    kept = [] if row["gradient_checkpointing"] else ["all kept"]
    length = style.length_text(row["length"])
    return ", ".join([f"{row['model']} {length} {row['pattern']}", *kept, *switches, row["way"]])
