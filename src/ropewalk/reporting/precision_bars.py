"""Bars of a precision audit: the ladder of steps, what mends the drift, and what the first token does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.markers import CARETLEFT
from matplotlib.patches import Patch

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import INK, save_figure
from ropewalk.reporting.precision_axes import (
    BLUE,
    CLIP,
    D_LABEL,
    GREY,
    VERMILION,
    Floats,
    audit_figure,
    checked,
    finish,
    log_axis,
    number_text,
    some_positive,
)

FLOOR = ("none",)
TOGETHER = ("all", "all together")
"""Names of rungs that are not one step: float64 throughout, and the audited arithmetic."""
NAME_CHARACTERS = 30
BAR_FILLS = ("#dcdcdc", "white", "white", "#b5b5b5")
STRONG_FILLS = ("#9cc3e4", "white", "white", "#5e97c6")
BAR_HATCHES = ("", "///", "...", "xxx")
MOST_BARS = len(BAR_HATCHES)
BROADEST_LINEAR = 30
"""Largest over smallest bar up to which an axis is linear."""
ROW_INCHES = 0.34


class Scale(NamedTuple):
    """The axis of bars: its ends, and whether it is logarithmic."""

    low: float
    high: float
    logarithmic: bool

    def shown(self, value: float) -> bool:
        """Whether a bar of this value has a length."""
        return value > self.low or (value == self.low and not self.logarithmic)


def ladder_figure(
    rungs: Sequence[tuple[str, Sequence[float]]],
    shifts: Sequence[str],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """D when one step alone is in low precision, as bars on a logarithmic axis; the largest step is emphasised.

    Args:
        rungs: ``(step, [shifts] D)``. ``none`` (float64 throughout, also a dashed line) and ``all together``, or
            ``all``, are no single steps and come last.
        shifts: names of the shifts as the legend shows them, such as ``shift 1M``.
    """
    if not rungs or not shifts:
        raise RopewalkError("there is no step to draw")
    ranks = {**dict.fromkeys(TOGETHER, 1), **dict.fromkeys(FLOOR, 2)}
    rows = sorted(rungs, key=lambda rung: ranks.get(rung[0], 0))
    values = _table("attention difference by step", [row[1] for row in rows], len(shifts))
    names = [name for name, _ in rows]
    largest = [
        np.nanmax(each, initial=-1) if name not in ranks else -1
        for name, each in zip(names, values, strict=True)
    ]
    best = int(np.argmax(largest)) if max(largest) > 0 else None
    figure, (axes,) = audit_figure(title, [(f"{D_LABEL} (logarithmic)", "")])
    scale = _scale(values, logarithmic=True)
    _grouped(axes, names, values, scale, best, shifts)
    dashed = ""
    for row, name in enumerate(names):
        if name in FLOOR and (floor := np.nanmax(values[row], initial=-1)) > scale.low:
            axes.axvline(floor, color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=3)
            dashed = ", dashed where nothing is in low precision"
    clipped = bool(((values > 0) & (values <= scale.low)).any())
    beyond = " (arrow heads: left of the axis)" if clipped else ""
    step = "" if best is None else f"; the strongest single step is “{names[best]}”"
    finish(
        figure,
        caption
        or f"How far attention drifts when everything but the named step is computed in float64{dashed}{beyond}{step}.",
        1.25 + ROW_INCHES * len(names) * (0.45 + 0.55 * len(shifts)),
    )
    save_figure(figure, path)


def mends_figure(
    mends: Sequence[tuple[str, float, float, float | None]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """D with each mend, near and far, as points on a logarithmic axis, with the time it costs at the right.

    Args:
        mends: ``(name, D, far_D, time_ratio)``; the first is what the others are compared with, and a dashed
            line. ``time_ratio``: time of a forward pass over one with fused attention; None if not measured.
    """
    if not mends:
        raise RopewalkError("there is no mend to draw")
    values = _table("attention difference by mend", [each[1:3] for each in mends], 2)
    figure, (axes,) = audit_figure(title, [(f"{D_LABEL} (logarithmic)", "")])
    scale = _scale(values, logarithmic=True)
    _rows(axes, [each[0] for each in mends], scale)
    axes.get_yticklabels()[0].set_fontweight("bold")
    if values[0, 0] > scale.low:
        axes.axvline(values[0, 0], color=INK, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
    for row, (near, far) in enumerate(values):
        both = [value for value in (near, far) if scale.shown(value)]
        if len(both) == 2:
            axes.plot(both, [row, row], color=GREY, linewidth=1.2, zorder=2)
        # The far point lies beneath and is larger, so that both are seen where they fall together.
        for value, marker, size, face, colour in (
            (far, "D", 9, "white", VERMILION),
            (near, "o", 5, BLUE, BLUE),
        ):
            if scale.shown(value):
                axes.plot(
                    value,
                    row,
                    marker,
                    color=colour,
                    markerfacecolor=face,
                    markersize=size,
                    markeredgewidth=1.4,
                )
        _beyond(axes, row, {n: v for n, v in (("near", near), ("far", far)) if not scale.shown(v)}, scale)
        _right(axes, row, "–" if mends[row][3] is None else f"{mends[row][3]:.2f}x time")
    style: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 1.4}
    marks = [
        Line2D([], [], marker="o", color=BLUE, markersize=5, label="near shift", **style),
        Line2D(
            [],
            [],
            marker="D",
            color=VERMILION,
            markerfacecolor="white",
            markersize=8,
            label="far shift",
            **style,
        ),
    ]
    _key(
        axes,
        [
            *marks,
            Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="first row, near shift"),
        ],
    )
    finish(
        figure,
        caption
        or "Attention that still drifts with each change, against the first row (dashed): the further left a point, "
        "the more is mended; at the right, time of a forward pass relative to the model’s usual attention "
        "(–: not measured).",
        1.3 + ROW_INCHES * len(mends),
    )
    save_figure(figure, path)


def first_token_figure(
    effects: Sequence[tuple[str, float, float, float]],
    path: Path,
    title: str = "",
    caption: str | None = None,
) -> None:
    """What moving the first token, the others, or the whole row does, and how much of it is arithmetic.

    Args:
        effects: ``(moved tokens, D, D_exact, D_arithmetic)``: attention difference in low precision, in float64,
            and between the two.
    """
    if not effects:
        raise RopewalkError("there is no moved token to draw")
    values = _table("attention difference by moved tokens", [each[1:] for each in effects], 3)
    # What is 0 but for rounding does not ask for a logarithmic axis.
    seen = values[values > CLIP * np.nanmax(values)]
    logarithmic = bool(len(seen)) and bool(seen.max() > BROADEST_LINEAR * seen.min())
    figure, (axes,) = audit_figure(
        title, [(f"{D_LABEL}{' (logarithmic)' if logarithmic else ''}", "moved tokens")]
    )
    names = ["in low precision", "in float64", "caused by arithmetic"]
    _grouped(axes, [each[0] for each in effects], values, _scale(values, logarithmic), None, names)
    finish(
        figure,
        caption
        or "How attention drifts when only some tokens of a row change position: exact RoPE itself drifts where "
        "relative positions change (in float64), and the rest is caused by low-precision arithmetic.",
        1.3 + 2.1 * ROW_INCHES * len(effects),
    )
    save_figure(figure, path)


def _table(what: str, rows: Sequence[Sequence[float]], columns: int) -> Floats:
    """``[rows, columns]``; RopewalkError if it is none, or a value is negative or infinite."""
    if any(len(row) != columns for row in rows):
        raise RopewalkError(f"{what}: a row has not {columns} values")
    if columns > MOST_BARS:
        raise RopewalkError(f"a figure shows at most {MOST_BARS} bars a row, got {columns} of {what}")
    return checked(what, rows)


def _scale(values: Floats, logarithmic: bool) -> Scale:
    """From a decade below the smallest value that is not clipped up to the largest."""
    if not logarithmic:
        return Scale(0.0, float(np.nanmax(values)) or 1.0, False)
    positive = some_positive(D_LABEL, values)
    high = float(positive.max())
    least = float(positive[positive >= CLIP * high].min())
    return Scale(max(CLIP * high, 10.0 ** math.floor(math.log10(0.7 * least))), high, True)


def _rows(axes: Any, names: Sequence[str], scale: Scale) -> None:
    """Names down the left side, the first at the top, and the axis of values with room for their words."""
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), [fill(name, NAME_CHARACTERS) for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    if scale.logarithmic:
        log_axis(axes.xaxis, scale.low, scale.high, (0, 0.14))
        axes.set_xlim(left=scale.low)
    else:
        axes.set_xlim(0, 1.14 * scale.high)


def _grouped(
    axes: Any, names: Sequence[str], values: Floats, scale: Scale, best: int | None, labels: Sequence[str]
) -> None:
    """Bars of ``[rows, columns]`` with their values; the columns differ in hatch, the best row in colour."""
    _rows(axes, names, scale)
    count = values.shape[1]
    height = 0.78 / count
    for column in range(count):
        hatch = BAR_HATCHES[column]
        for row, value in enumerate(values[:, column]):
            y = row + (column - (count - 1) / 2) * height
            strong = row == best
            if not scale.shown(value) or value == 0:
                _beyond(axes, y, {"": value}, scale)
            else:
                axes.barh(
                    y,
                    value - scale.low,
                    0.88 * height,
                    left=scale.low,
                    facecolor=(STRONG_FILLS if strong else BAR_FILLS)[column],
                    edgecolor=BLUE if strong else "#555555",
                    hatch=hatch,
                    linewidth=1.6 if strong else 0.8,
                    zorder=2,
                )
                _words(axes, value, y, number_text(value), 4, strong)
    if best is not None:
        axes.get_yticklabels()[best].set_fontweight("bold")
    if count > 1:
        _key(
            axes,
            [
                Patch(
                    facecolor=BAR_FILLS[column], edgecolor="#555555", hatch=BAR_HATCHES[column], label=label
                )
                for column, label in enumerate(labels)
            ],
        )


def _beyond(axes: Any, y: float, values: Mapping[str, float], scale: Scale) -> None:
    """Values that have no place on the axis, at its left edge; an arrow head where there is one below it."""
    if not values:
        return
    texts = {name: "not finite" if np.isnan(each) else number_text(each) for name, each in values.items()}
    below = any(each > 0 for each in values.values())
    if below:
        axes.plot(scale.low, y, marker=CARETLEFT, color=INK, markersize=7, clip_on=False, zorder=4)
    alike = len(values) == 2 and len(set(texts.values())) == 1
    words = [texts.popitem()[1]] if alike else [f"{name} {text}".strip() for name, text in texts.items()]
    _words(axes, scale.low, y, ", ".join(words), 9 if below else 4)


def _words(axes: Any, x: float, y: float, text: str, points: float, strong: bool = False) -> None:
    axes.annotate(
        text,
        (x, y),
        xytext=(points, 0),
        textcoords="offset points",
        va="center_baseline",
        color=INK,
        fontsize=8.5,
        fontweight="bold" if strong else "normal",
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
    )


def _right(axes: Any, row: float, text: str) -> None:
    axes.annotate(
        text,
        (1, row),
        xycoords=("axes fraction", "data"),
        xytext=(6, 0),
        textcoords="offset points",
        va="center_baseline",
        color=INK,
        fontsize=9,
    )


def _key(axes: Any, handles: Sequence[Any]) -> None:
    """A legend just above the axes."""
    legend = axes.legend(
        handles=[*handles],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        borderaxespad=0.2,
        borderpad=0.2,
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
