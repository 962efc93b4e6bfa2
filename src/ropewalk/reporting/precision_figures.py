"""Pictures of a precision audit: how far attention drifts when only the positions of a row shift.

Nothing here knows how the values come about: every function takes plain numbers and draws them. D is attention,
one unit a query, that lands on other tokens after a shift; a shift is the position of a row's first token. Each
figure has a caption inside the picture. All functions take

* ``path``: ``.png`` or ``.svg``; complete or not written at all,
* ``title``: above the axes,
* ``caption``: a sentence below the axes; a fitting one is made where it is None or empty,

and raise RopewalkError if there is nothing to draw, a value is negative or infinite, or the suffix is another.
NaN stands for what has no value, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import INK, save_figure
from ropewalk.reporting.precision_axes import (
    BLUE,
    D_LABEL,
    MOST_LINES,
    UNIT,
    Floats,
    alone,
    audit_figure,
    checked,
    finish,
    label_ends,
    line_style,
    log_axis,
    on_log,
    settle_ends,
    shift_axis,
    shift_text,
    some_positive,
)
from ropewalk.reporting.precision_bars import first_token_figure, ladder_figure, mends_figure
from ropewalk.reporting.precision_tokens import heads_figure, tokens_figure
from ropewalk.reporting.rope_axes import PAPER, length_axis, shown_name

__all__ = [
    "drift_figure",
    "first_token_figure",
    "heads_figure",
    "ladder_figure",
    "lengths_figure",
    "mends_figure",
    "samples_figure",
    "tokens_figure",
]

RANDOM = "random"
"""In the name of a series: of randomly initialised parameters."""
BROADEST_LINEAR = 8
"""Largest over smallest D up to which the axis of D is linear."""
LEAST_SPAN = 0.25
"""Length of an axis that does not begin at 0, at least, in parts of the largest D."""


def drift_figure(
    series: Mapping[str, Sequence[tuple[int, float, float, float]]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """D against the shift, one line a series, with 95 % intervals.

    Args:
        series: by name ``(delta1, D, low, high)``: tokens, and D with its interval (NaN for none). Names that
            contain ``random`` are open and dashed; ``a, random weights`` has the colour and marker of ``a``.
    """
    rows = _checked_lines("attention difference", series, 4)
    positive = some_positive(D_LABEL, np.concatenate([each[:, 1:].ravel() for each in rows.values()]))
    figure, (axes,) = audit_figure(title, [("", D_LABEL)])
    shift_axis(axes, np.concatenate([each[:, 0] for each in rows.values()]))
    _shift_label(axes, "position of the row's first token, Δ₁")
    # Room above for the words of the shift at which nothing differs.
    log_axis(axes.yaxis, positive.min(), positive.max(), (0.05, 0.12))
    kinds: dict[str, int] = {}
    ends = []
    for name, row in rows.items():
        style = line_style(kinds.setdefault(_kind(name), len(kinds)), RANDOM in name)
        x, d = row[:, 0], on_log(row[:, 1])
        axes.plot(x, d, label=shown_name(name), zorder=3, **style)
        _intervals(axes, x, d, row[:, 2:], style["color"])
        ends += _end(name, x, d, style["color"])
    labels = label_ends(axes, ends)
    same = {float(x) for row in rows.values() for x in row[row[:, 1] == 0, 0]}
    if len(same) == 1:
        _mark_same(axes, same.pop())
    every = np.concatenate([row[:, 1] for row in rows.values()])
    parts = [
        "D is how much the attention that each token receives changes when a row starts at Δ₁ in place of Δ₂, summed "
        "over tokens, heads and layers (bars: 95 % intervals)"
    ]
    if any(RANDOM in name for name in rows):
        parts.append("open and dashed: randomly initialised parameters")
    finish(figure, caption or _sentence(parts, every), 4.3)
    settle_ends(figure, axes, labels)
    save_figure(figure, path)


def samples_figure(
    curves: Sequence[Sequence[tuple[int, float]]],
    sweep: Sequence[tuple[int, int, float]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """D against the shift: of each row with the mean, and beside it the mean for other second shifts.

    Args:
        curves: a row's ``(delta1, D)`` each.
        sweep: ``(delta1, delta2, D)``, a line for each delta2. D is symmetric: a pair that is given in one order
            alone stands for both. Of more than ``MOST_LINES`` delta2, evenly chosen ones are drawn.
    """
    rows = _checked_lines(
        "attention difference", {f"row {n}": each for n, each in enumerate(curves, 1)}, 2, most=None
    )
    pairs = {(b, a): d for a, b, d in sweep} | {(a, b): d for a, b, d in sweep}
    chosen = _evenly(sorted({delta2 for _, delta2 in pairs}))
    lines = _checked_lines(
        "sweep of shifts",
        {shift_text(b): sorted((a, d) for (a, other), d in pairs.items() if other == b) for b in chosen},
        2,
    )
    figure, (left, right) = audit_figure(title, [("", D_LABEL), ("", "")])
    for axes, drawn, words in ((left, rows, "each row"), (right, lines, "mean, by Δ₂")):
        axes.set_title(words, loc="left", fontsize=10, color=INK)
        shift_axis(axes, np.concatenate([each[:, 0] for each in drawn.values()]), most=3)
        _shift_label(axes, "Δ₁")
    _row_curves(left, list(rows.values()))
    ends = []
    for number, (name, row) in enumerate(lines.items()):
        style = line_style(number)
        style["linestyle"] = ("-", "--", "-.", ":")[number % 4]
        d = on_log(row[:, 1])
        right.plot(row[:, 0], d, **{**style, "markersize": 5}, label=name)
        ends += _end(f"Δ₂ = {name}", row[:, 0], d, style["color"])
    labels = label_ends(right, ends)
    every = np.concatenate([row[:, 1] for row in [*rows.values(), *lines.values()]])
    for axes, drawn in ((left, rows), (right, lines)):
        _value_limits(axes, some_positive(D_LABEL, np.concatenate([row[:, 1] for row in drawn.values()])))
    parts = [
        f"attention difference D between a start at Δ₁ and one at Δ₂, on the left {_count(len(rows))}, on "
        "the right for several Δ₂"
    ]
    if len(chosen) < len({delta2 for _, delta2 in pairs}):
        parts[0] += f" ({len(chosen)} of {len({delta2 for _, delta2 in pairs})})"
    finish(figure, caption or _sentence(parts, every), 3.7)
    settle_ends(figure, right, labels)
    save_figure(figure, path)


def lengths_figure(
    series: Mapping[str, Sequence[tuple[int, float, float]]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """D, and how far the first token's score moves, against the row's length; both logarithmic.

    Args:
        series: by name ``(length, D, mean_logit_difference)``: tokens, from 1 on; attention difference; and absolute
            difference of the first token's score before softmax, mean over queries, layers and heads.
    """
    rows = _checked_lines("attention difference by length", series, 3)
    lengths = np.concatenate([each[:, 0] for each in rows.values()])
    if lengths.min() < 1:
        raise RopewalkError(f"a row has at least 1 token, got a length of {lengths.min():g}")
    panels = [("row length (tokens)", D_LABEL), ("row length (tokens)", "")]
    figure, (left, right) = audit_figure(title, panels)
    ends = []
    for column, axes, words in (
        (1, left, D_LABEL),
        (2, right, "mean logit difference of the first token"),
    ):
        axes.set_title(words, loc="left", fontsize=10, color=INK)
        values = some_positive(words, np.concatenate([each[:, column] for each in rows.values()]))
        log_axis(axes.yaxis, values.min(), values.max())
        # Half the ticks of a whole figure fit.
        step = 4.0 if lengths.max() > 16 * lengths.min() else 2.0
        length_axis(axes.xaxis, lengths.min(), lengths.max())
        _thin_ticks(axes.xaxis, step)
        room = max(1.1, (lengths.max() / lengths.min()) ** 0.04)
        axes.set_xlim(lengths.min() / room, lengths.max() * room)
        for number, (name, row) in enumerate(rows.items()):
            style, y = line_style(number), on_log(row[:, column])
            style["linestyle"] = ("-", "--", "-.", ":")[number % 4]
            axes.plot(row[:, 0], y, label=shown_name(name), **style)
            if axes is right:
                ends += _end(name, row[:, 0], y, style["color"])
    left.set_ylabel("")
    # A series without scores has its name on the left.
    named = {end[0] for end in ends}
    beside = [
        end
        for number, (name, row) in enumerate(rows.items())
        for end in _end(name, row[:, 0], on_log(row[:, 1]), line_style(number)["color"])
        if name not in named
    ]
    settled = [(right, label_ends(right, ends)), (left, label_ends(left, beside))]
    every = np.concatenate([row[:, 1:].ravel() for row in rows.values()])
    parts = [
        "how far two shifts of the same rows differ when the rows are cut off at a length, in attention and in the "
        "score that queries give the first token (mean over layers and heads); a steeper line grows faster with length"
    ]
    finish(figure, caption or _sentence(parts, every, "a difference of exactly 0"), 3.5)
    for axes, labels in settled:
        settle_ends(figure, axes, labels)
    save_figure(figure, path)


def _checked_lines(
    what: str, series: Mapping[str, Sequence[tuple[float, ...]]], columns: int, most: int | None = MOST_LINES
) -> dict[str, Floats]:
    """``[points, columns]`` by name, in rising order of the first column, which is not negative."""
    if not series or not all(len(each) for each in series.values()):
        raise RopewalkError(f"there is no {what} to draw")
    if most is not None and len(series) > most:
        raise RopewalkError(f"a figure shows at most {most} series, got {len(series)} of {what}")
    for name, points in series.items():
        if any(len(point) != columns for point in points):
            raise RopewalkError(f"{what} of {name!r}: points of {columns} values are needed")
    rows = {
        name: np.array(sorted(each, key=lambda point: point[0]), dtype=np.float64)
        for name, each in series.items()
    }
    for name, row in rows.items():
        if not np.isfinite(row[:, 0]).all():
            raise RopewalkError(f"{what} of {name!r} has a place that is not finite")
        if (row[:, 0] < 0).any():
            raise RopewalkError(f"{what} of {name!r}: {row[:, 0].min():g} tokens is negative")
    checked(what, np.concatenate([row[:, 1:].ravel() for row in rows.values()]))
    return rows


def _kind(name: str) -> str:
    """The name of a series without the part, between commas, that tells its parameters."""
    parts = [part.strip() for part in name.split(",")]
    return ", ".join(part for part in parts if RANDOM not in part) or name


def _end(name: str, x: Floats, y: Floats, colour: str) -> list[tuple[str, float, float, str]]:
    last = np.flatnonzero(np.isfinite(y))[-1:]
    return [(name, float(x[at]), float(y[at]), colour) for at in last]


def _intervals(axes: Any, x: Floats, d: Floats, ends: Floats, colour: str) -> None:
    known = np.isfinite(ends).all(axis=1) & np.isfinite(d)
    # Rounding may put an end past its D; an end at 0 is drawn to the lower edge.
    low = np.minimum(np.maximum(ends[known, 0], axes.get_ylim()[0]), d[known])
    high = np.maximum(ends[known, 1], d[known])
    axes.errorbar(
        x[known],
        d[known],
        [d[known] - low, high - d[known]],
        fmt="none",
        ecolor=colour,
        elinewidth=1.1,
        capsize=3,
        zorder=2,
    )


def _mark_same(axes: Any, shift: float) -> None:
    axes.axvline(shift, color=INK, linestyle=(0, (1, 3)), linewidth=1, zorder=1)
    axes.annotate(
        "Δ₁ = Δ₂: D = 0",
        (shift, 1),
        xycoords=("data", "axes fraction"),
        xytext=(5, -2),
        textcoords="offset points",
        va="top",
        color=INK,
        fontsize=9,
        bbox=PAPER,
    )


def _row_curves(axes: Any, rows: Sequence[Floats]) -> None:
    for row in rows:
        d = on_log(row[:, 1])
        axes.plot(row[:, 0], d, color="#a3a3a3", linewidth=0.6, zorder=2)
        single = alone(d)
        axes.plot(row[single, 0], d[single], "_", color="#a3a3a3", markersize=5, zorder=2)
    points = sorted((float(x), float(d)) for row in rows for x, d in row if d > 0)
    means = {
        x: float(np.mean([d for _, d in each])) for x, each in groupby(points, key=lambda point: point[0])
    }
    # A place where no row has a D breaks the mean as it breaks the rows.
    places = sorted({float(x) for row in rows for x in row[:, 0]})
    axes.plot(
        places,
        [means.get(x, np.nan) for x in places],
        "-o",
        color=BLUE,
        linewidth=2.4,
        markersize=5,
        zorder=3,
        label="mean",
    )


def _value_limits(axes: Any, values: Floats) -> None:
    """Logarithmic where D spreads; else linear, from 0 where that leaves the differences to be seen."""
    low, high = float(values.min()), float(values.max())
    if high > BROADEST_LINEAR * low:
        log_axis(axes.yaxis, low, high)
        return
    cut = low > 0.7 * high
    # Differences of a few percent must not fill the axis and pass for large ones.
    room = max(0.08 * (high - low), (LEAST_SPAN * high - (high - low)) / 2) if cut else 0.08 * high
    axes.set_ylim(low - room if cut else 0, high + room)
    if cut:
        axes.set_ylabel(
            f"{axes.get_ylabel()} (does not begin at 0)" if axes.get_ylabel() else "(does not begin at 0)",
            color=INK,
        )


def _thin_ticks(axis: Any, step: float) -> None:
    """Leave of a length axis' ticks the largest and those at whole powers of ``step`` below it."""
    ticks = sorted(axis.get_major_locator()())
    at = np.round(np.log(ticks[-1] / np.array(ticks)) / np.log(step), 6)
    axis.set_ticks([tick for tick, power in zip(ticks, at, strict=True) if power == round(power)])


def _shift_label(axes: Any, words: str) -> None:
    smallest = axes.xaxis.get_transform().linthresh
    linear = f"; linear below {shift_text(smallest)}" if axes.get_xlim()[0] < smallest else ""
    axes.set_xlabel(f"{words} (tokens, {UNIT}{linear})", color=INK)


def _evenly(values: Sequence[int]) -> list[int]:
    chosen = np.linspace(0, len(values) - 1, min(MOST_LINES, len(values))).round().astype(int)
    return [values[at] for at in chosen]


def _count(rows: int) -> str:
    return "for the only row" if rows == 1 else f"for each of {rows} rows (thin) and their mean (bold)"


def _sentence(parts: Sequence[str], values: Floats, zero: str = "D = 0 exactly, as at Δ₁ = Δ₂,") -> str:
    """A caption that also says which values have no place in the picture."""
    left_out = [
        words
        for words, found in (
            (zero, (values == 0).any()),
            ("no value", np.isnan(values).any()),
        )
        if found
    ]
    joined = "; ".join([*parts, *([f"points with {' or '.join(left_out)} are left out"] if left_out else [])])
    return f"{joined[0].upper()}{joined[1:]}."
