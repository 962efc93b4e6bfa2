"""Figures of a precision audit: how far attention drifts when only the positions of a row shift.

Nothing here knows how the values come about: every function takes plain numbers. D is attention, one unit a query,
that lands on other tokens after a shift; a shift is the position of a row's first token. All take ``title``, above the
panels, and ``caption``, a sentence below them (a fitting one is made where it is None or empty), and raise
RopewalkError if there is nothing to draw, or a value is negative or infinite. NaN stands for what has no value, and is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style
from ropewalk.reporting.primitives import (
    Axis,
    Boxes,
    Figure,
    Fill,
    Floats,
    HeatMap,
    Line,
    Look,
    Mark,
    Note,
    Panel,
    Rule,
    alone,
    check_amounts,
    check_count,
    length_ticks,
    log_axis,
    positive,
    power_ticks,
    row_axis,
    whiskers,
)
from ropewalk.reporting.style import BLUE, CLIP, GREY, INK, VERMILION, number_text, shift_text

D_LABEL = "attention difference D"
RANDOM = "random"
"""In the name of a series: of randomly initialised parameters."""
UNIT = "1k = 1,000"
"""Shifts are round numbers of tokens; in lengths, ``1k`` is 1024."""
LEAST_SPAN = 0.25
"""Length of an axis that does not begin at 0, at least, in parts of the largest D."""
BROADEST_BARS = 30
"""Largest over smallest bar up to which an axis is linear; for heads, largest over median."""
FLOOR = ("none",)
TOGETHER = ("all", "all together")
"""Names of rows that are not one operation: float64 throughout, and the audited arithmetic."""
BAR_FILLS = ("#dcdcdc", "white", "white", "#b5b5b5")
STRONG_FILLS = ("#9cc3e4", "white", "white", "#5e97c6")
ROW_INCHES = 0.34
EACH_POINT = 300
"""Tokens up to which each has a mark that can be told from its neighbours."""
RASTERISED_POINTS = 1000
"""Tokens from which the points of an SVG are an image inside it."""
MEDIAN_BINS_A_DECADE = 12
FEWEST_FOR_MEDIAN = 5
NUMBERED_CELLS = 64
MOST_TICKS = 16


def drift_figure(
    series: Mapping[str, Sequence[tuple[int, float, float, float]]],
    title: str = "",
    caption: str | None = None,
) -> Figure:
    """D against the shift, one line a series, with 95 % intervals.

    Args:
        series: by name ``(delta1, D, low, high)``: tokens, and D with its interval (NaN for none). Names that
            contain ``random`` are open and dashed; ``a, random weights`` has the colour and marker of ``a``.
    """
    rows = _checked_lines("attention difference", series, 4)
    drawn = positive(D_LABEL, np.concatenate([each[:, 1:].ravel() for each in rows.values()]))
    # Room above for the words of the shift at which nothing differs.
    y = log_axis(D_LABEL, drawn.min(), drawn.max(), (0.05, 0.12))
    assert y.limits is not None
    marks: list[Mark] = []
    kinds: dict[str, int] = {}
    for name, row in rows.items():
        is_random = RANDOM in name
        look = _look(kinds.setdefault(_kind(name), len(kinds)), "--" if is_random else "-", hollow=is_random)
        x, d = row[:, 0], _on_log(row[:, 1])
        known = np.isfinite(row[:, 2:]).all(axis=1) & np.isfinite(d)
        # An end at 0 is drawn to the lower edge.
        low = np.maximum(row[known, 2], y.limits[0])
        marks += [
            Line(x, d, look, name, end=name if np.isfinite(d).any() else ""),
            whiskers(x[known], d[known], low, row[known, 3], colour=look.colour, caps=3, order=2),
        ]
    same = {float(x) for row in rows.values() for x in row[row[:, 1] == 0, 0]}
    if len(same) == 1:
        marks.append(Rule(same.pop(), words="Δ₁ = Δ₂: D = 0", dash=(0, (1, 3)), order=1))
    every = np.concatenate([row[:, 1] for row in rows.values()])
    parts = [
        "D is how much the attention that each token receives changes when a row starts at Δ₁ in place of Δ₂, summed "
        "over tokens, heads and layers (bars: 95 % intervals)"
    ]
    if any(RANDOM in name for name in rows):
        parts.append("open and dashed: randomly initialised parameters")
    x_axis = shift_axis("position of the row's first token, Δ₁", [each[:, 0] for each in rows.values()])
    return Figure((Panel(tuple(marks), x_axis, y),), caption or _sentence(parts, every), title, 4.3)


def samples_figure(
    curves: Sequence[Sequence[tuple[int, float]]],
    sweep: Sequence[tuple[int, int, float]],
    title: str = "",
    caption: str | None = None,
) -> Figure:
    """D against the shift: of each row with the mean, and beside it the mean for other second shifts.

    Args:
        curves: a row's ``(delta1, D)`` each.
        sweep: ``(delta1, delta2, D)``, a line for each delta2. D is symmetric: a pair that is given in one order
            alone stands for both. Of more than ``MOST_LINES`` delta2, evenly chosen ones are drawn.
    """
    by_number = {f"row {n}": each for n, each in enumerate(curves, 1)}
    rows = list(_checked_lines("attention difference", by_number, 2, most=len(curves)).values())
    pairs = {(b, a): d for a, b, d in sweep} | {(a, b): d for a, b, d in sweep}
    seconds = sorted({delta2 for _, delta2 in pairs})
    chosen = _evenly(seconds)
    lines = _checked_lines(
        "sweep of shifts",
        {shift_text(b): sorted((a, d) for (a, other), d in pairs.items() if other == b) for b in chosen},
        2,
    )
    right: list[Mark] = []
    for number, (name, row) in enumerate(lines.items()):
        look = _look(number, style.LINE_DASHES[number % 4], size=5)
        d = _on_log(row[:, 1])
        right.append(Line(row[:, 0], d, look, name, end=f"Δ₂ = {name}" if np.isfinite(d).any() else ""))
    panels = tuple(
        Panel(
            tuple(marks),
            shift_axis("Δ₁", [each[:, 0] for each in drawn], 3),
            _d_axis(label, positive(D_LABEL, np.concatenate([each[:, 1] for each in drawn]))),
            words,
        )
        for marks, drawn, words, label in (
            (_row_curves(rows), rows, "each row", D_LABEL),
            (right, list(lines.values()), "mean, by Δ₂", ""),
        )
    )
    count = (
        "for the only row" if len(rows) == 1 else f"for each of {len(rows)} rows (thin) and their mean (bold)"
    )
    some = f" ({len(chosen)} of {len(seconds)})" if len(chosen) < len(seconds) else ""
    part = (
        f"attention difference D between a start at Δ₁ and one at Δ₂, on the left {count}, on the right for "
        f"several Δ₂{some}"
    )
    every = np.concatenate([row[:, 1] for row in [*rows, *lines.values()]])
    return Figure(panels, caption or _sentence([part], every), title, 3.7, columns=2)


def lengths_figure(
    series: Mapping[str, Sequence[tuple[int, float, float]]], title: str = "", caption: str | None = None
) -> Figure:
    """D, and how far the first token's score moves, against the row's length; both logarithmic.

    Args:
        series: by name ``(length, D, mean_logit_difference)``: tokens, from 1 on; attention difference; and absolute
            difference of the first token's score before softmax, mean over queries, layers and heads.
    """
    rows = _checked_lines("attention difference by length", series, 3)
    lengths = np.concatenate([each[:, 0] for each in rows.values()])
    low, high = float(lengths.min()), float(lengths.max())
    if low < 1:
        raise RopewalkError(f"a row has at least 1 token, got a length of {low:g}")
    room = max(1.1, (high / low) ** 0.04)
    # Half the ticks of a whole figure fit.
    ticks = _thinned(power_ticks(low, high), 4.0 if high > 16 * low else 2.0)
    x = Axis("row length (tokens)", "log2", (low / room, high * room), ticks)
    panels = []
    for column, words in ((1, D_LABEL), (2, "mean logit difference of the first token")):
        values = positive(words, np.concatenate([each[:, column] for each in rows.values()]))
        marks = []
        for number, (name, row) in enumerate(rows.items()):
            # Names stand on the right; a series without scores has its name on the left.
            has_score = bool((row[:, 2] > 0).any())
            end = name if (column == 2) == has_score and (row[:, column] > 0).any() else ""
            look = _look(number, style.LINE_DASHES[number % 4])
            marks.append(Line(row[:, 0], _on_log(row[:, column]), look, name, end=end))
        panels.append(Panel(tuple(marks), x, log_axis("", values.min(), values.max()), words))
    every = np.concatenate([row[:, 1:].ravel() for row in rows.values()])
    part = (
        "how far two shifts of the same rows differ when the rows are cut off at a length, in attention and in the "
        "score that queries give the first token (mean over layers and heads); a steeper line grows faster with length"
    )
    sentence = _sentence([part], every, "a difference of exactly 0")
    return Figure(tuple(panels), caption or sentence, title, 3.5, columns=2)


def tokens_figure(
    per_token: Sequence[float], sink: int, title: str = "", caption: str | None = None
) -> Figure:
    """Each token's part of D against its place in the row, with the first token's and the sink's share.

    Args:
        per_token: ``[length]`` parts of D.
        sink: index, from 0, of the token that receives most attention.
    """
    parts = check_amounts("part of D of a token", per_token)
    if not 0 <= sink < len(parts):
        raise RopewalkError(f"the sink {sink} is none of {len(parts)} tokens")
    drawn = positive("part of D of a token", parts)
    floor = float(drawn[drawn >= CLIP * drawn.max()].min())
    place = np.arange(1, len(parts) + 1, dtype=np.float64)
    # What is too small for the axis is left out, zeros with it.
    seen = np.where(parts >= floor, parts, np.nan)
    x = Axis(
        "token of the row (1 is the first)", "log", (0.8, max(1.25 * len(parts), 10)), text=style.count_text
    )
    y = log_axis("token’s part of D", floor, float(drawn.max()), (0.05, 0.1))
    size, raster = (3 if len(parts) <= EACH_POINT else 1.3), len(parts) > RASTERISED_POINTS
    marks: list[Mark] = [
        Line(place, seen, Look("#9a9a9a", "", "o", size=size, edge="none"), "tokens", raster=raster, order=2)
    ]
    marked = list(dict.fromkeys((0, sink)))
    median = _running_median(np.where(np.isin(np.arange(len(parts)), marked), np.nan, seen))
    if len(median):
        marks.append(Line(median[:, 0], median[:, 1], Look(width=2), "median"))
    total = float(np.nansum(parts))
    for at in marked:
        # Two labels point away from each other, or one would lie on the other's mark.
        lower = len(marked) == 2 and not parts[at] >= np.nanmax(parts[marked])
        rise = 0 if len(marked) == 1 else -10 if lower else 10
        assert x.limits is not None
        marks += _marked_token(at, seen[at], parts[at] / total, at == sink, (rise, at > 0.3 * x.limits[1]))
    left_out = int(len(parts) - np.isfinite(seen).sum())
    missing = f"; {left_out:,} of {len(parts):,} tokens with less than {number_text(floor)} or no value are left out"
    words = (
        "Each point is the part of D that one token loses or wins (line: median of neighbours), and the marked "
        f"tokens have the named share of the whole{missing if left_out else ''}."
    )
    return Figure((Panel(tuple(marks), x, y),), caption or words, title, 3.9)


def heads_figure(heads: Sequence[Sequence[float]], title: str = "", caption: str | None = None) -> Figure:
    """D of each head as a heat map, the darker the larger; heads without a value are hatched.

    Args:
        heads: ``[layers][heads]`` D; as many heads in each layer.
    """
    if not heads or any(len(layer) != len(heads[0]) for layer in heads):
        raise RopewalkError("there is no D of heads to draw, or not as many heads in each layer")
    values = check_amounts(f"{D_LABEL} by head", heads)
    layers, count = values.shape
    high, above = float(np.nanmax(values)), values[values > 0]
    # Logarithmic where heads differ much.
    spread = bool(len(above)) and bool(high > BROADEST_BARS * np.median(above))
    low = max(float(above.min()), CLIP * high) if spread else 0.0
    few = layers * count <= NUMBERED_CELLS
    cells = HeatMap(
        tuple(map(tuple, values.tolist())),
        "dark",
        low,
        high or 1.0,
        f"D{' (logarithmic)' if spread else ''}",
        number_text,
        spread,
        0 if not few else 8 if count <= 10 else 6.5,
    )
    x, y = (
        Axis(words, limits=(-0.5, each - 0.5), ticks=tuple((float(n), str(n)) for n in _every(each)))
        for words, each in (("head", count), ("layer (0 at the bottom)", layers))
    )
    hatched = "; hatched: no value" if np.isnan(values).any() else ""
    top = np.unravel_index(int(np.nanargmax(values)), values.shape)
    words = (
        f"How far attention drifts in each head, the darker the further; furthest in head {top[1]} of layer {top[0]} "
        f"(D = {number_text(float(values[top]))}){hatched}."
    )
    height = min(6.4, max(2.9, 1.2 + (0.34 if few else 0.15) * layers))
    return Figure((Panel((cells,), x, y, grid=""),), caption or words, title, height)


def ablation_figure(
    operations: Sequence[tuple[str, Sequence[float]]],
    shifts: Sequence[str],
    title: str = "",
    caption: str | None = None,
) -> Figure:
    """D when one operation alone is in low precision, as bars on a logarithmic axis; the largest is emphasised.

    Args:
        operations: ``(operation, [shifts] D)``. ``none`` (float64 throughout, also a dashed line) and ``all
            together``, or ``all``, are no single operations and come last.
        shifts: names of the shifts as the key shows them, such as ``shift 1M``.
    """
    if not operations or not shifts:
        raise RopewalkError("there is no step to draw")
    ranks = {**dict.fromkeys(TOGETHER, 1), **dict.fromkeys(FLOOR, 2)}
    rows = sorted(operations, key=lambda row: ranks.get(row[0], 0))
    values = _table("attention difference by step", [row[1] for row in rows], len(shifts))
    names = [name for name, _ in rows]
    largest = [
        np.nanmax(each, initial=-1) if name not in ranks else -1
        for name, each in zip(names, values, strict=True)
    ]
    best = int(np.argmax(largest)) if max(largest) > 0 else None
    scale = _scale(values, logarithmic=True)
    marks = _grouped_bars(values, scale, best, shifts)
    dashed = ""
    for name, row in zip(names, values, strict=True):
        if name in FLOOR and (floor := np.nanmax(row, initial=-1)) > scale.low:
            marks.append(Rule(floor, dash=style.LONG_DASHED, order=3))
            dashed = ", dashed where nothing is in low precision"
    clipped = bool(((values > 0) & (values <= scale.low)).any())
    beyond = " (arrow heads: left of the axis)" if clipped else ""
    strongest = "" if best is None else f"; the strongest single step is “{names[best]}”"
    words = (
        f"How far attention drifts when everything but the named step is computed in float64{dashed}{beyond}"
        f"{strongest}."
    )
    panel = Panel(
        tuple(marks),
        scale.axis(f"{D_LABEL} (logarithmic)"),
        row_axis(names, [] if best is None else [best]),
        key=len(shifts) > 1,
        grid="x",
    )
    height = 1.0 + ROW_INCHES * len(names) * (0.45 + 0.55 * len(shifts))
    return Figure((panel,), caption or words, title, height)


def mitigations_figure(
    mitigations: Sequence[tuple[str, float, float, float | None]], title: str = "", caption: str | None = None
) -> Figure:
    """D with each mitigation, near and far, as points on a logarithmic axis, with the time it costs at the right.

    Args:
        mitigations: ``(name, D, far_D, time_ratio)``; the first is what the others are compared with, and a dashed
            line. ``time_ratio``: time of a forward pass over one with fused attention; None if not measured.
    """
    if not mitigations:
        raise RopewalkError("there is no mitigation to draw")
    values = _table("attention difference by mitigation", [each[1:3] for each in mitigations], 2)
    scale = _scale(values, logarithmic=True)
    near_look = Look(BLUE, "", "o", size=5, stroke=1.4)
    far_look = Look(VERMILION, "", "D", hollow=True, size=9, stroke=1.4)
    marks: list[Mark] = [Line([], [], near_look, "near shift"), Line([], [], far_look, "far shift")]
    if values[0, 0] > scale.low:
        marks.append(Rule(values[0, 0], dash=style.LONG_DASHED, name="first row, near shift", order=1))
    for row, (near, far) in enumerate(values):
        both = [value for value in (near, far) if scale.shown(value)]
        if len(both) == 2:
            marks.append(Line(both, [row, row], Look(GREY, width=1.2), order=2))
        # The far point lies beneath and is larger, so that both are seen where they fall together.
        marks += [
            Line([value], [row], look, order=4)
            for value, look in ((far, far_look), (near, near_look))
            if scale.shown(value)
        ]
        marks += _beyond(row, {n: v for n, v in (("near", near), ("far", far)) if not scale.shown(v)}, scale)
        ratio = mitigations[row][3]
        marks.append(Note(style.MISSING if ratio is None else f"{ratio:.2f}x time", None, row, 6))
    words = (
        "Attention that still drifts with each change, against the first row (dashed): the further left a point, "
        "the smaller the drift; at the right, time of a forward pass relative to the model’s usual attention "
        "(–: not measured)."
    )
    panel = Panel(
        tuple(marks),
        scale.axis(f"{D_LABEL} (logarithmic)"),
        row_axis([each[0] for each in mitigations], [0]),
        key=True,
        grid="x",
    )
    return Figure((panel,), caption or words, title, 1.05 + ROW_INCHES * len(mitigations))


def first_token_figure(
    effects: Sequence[tuple[str, float, float, float]], title: str = "", caption: str | None = None
) -> Figure:
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
    logarithmic = bool(len(seen)) and bool(seen.max() > BROADEST_BARS * seen.min())
    scale = _scale(values, logarithmic)
    names = ["in low precision", "in float64", "caused by arithmetic"]
    panel = Panel(
        tuple(_grouped_bars(values, scale, None, names)),
        scale.axis(f"{D_LABEL}{' (logarithmic)' if logarithmic else ''}"),
        row_axis([each[0] for each in effects], label="moved tokens"),
        key=True,
        grid="x",
    )
    words = (
        "How attention drifts when only some tokens of a row change position: exact RoPE itself drifts where "
        "relative positions change (in float64), and the rest is caused by low-precision arithmetic."
    )
    return Figure((panel,), caption or words, title, 1.0 + 2.1 * ROW_INCHES * len(effects))


class _Scale(NamedTuple):
    """The axis of bars: its ends, and whether it is logarithmic."""

    low: float
    high: float
    logarithmic: bool

    def shown(self, value: float) -> bool:
        """Whether a bar of this value has a length."""
        return value > self.low or (value == self.low and not self.logarithmic)

    def axis(self, label: str) -> Axis:
        """The axis with room for words behind the longest bar."""
        if not self.logarithmic:
            return Axis(label, limits=(0, 1.14 * self.high))
        axis = log_axis(label, self.low, self.high, (0, 0.14))
        assert axis.limits is not None
        return replace(axis, limits=(self.low, axis.limits[1]))


def _scale(values: Floats, logarithmic: bool) -> _Scale:
    """From a decade below the smallest value that is not clipped up to the largest."""
    if not logarithmic:
        return _Scale(0.0, float(np.nanmax(values)) or 1.0, False)
    drawn = positive(D_LABEL, values)
    high = float(drawn.max())
    least = float(drawn[drawn >= CLIP * high].min())
    return _Scale(max(CLIP * high, 10.0 ** math.floor(math.log10(0.7 * least))), high, True)


def _table(what: str, rows: Sequence[Sequence[float]], columns: int) -> Floats:
    """``[rows, columns]``; RopewalkError if it is none, or a value is negative or infinite."""
    if any(len(row) != columns for row in rows):
        raise RopewalkError(f"{what}: a row has not {columns} values")
    check_count(what, columns, len(style.BAR_HATCHES), "bars a row")
    return check_amounts(what, rows)


def _grouped_bars(values: Floats, scale: _Scale, best: int | None, names: Sequence[str]) -> list[Mark]:
    """Bars of ``[rows, columns]`` with their values; the columns differ in hatch, the best row in colour."""
    count = values.shape[1]
    height = 0.78 / count
    marks: list[Mark] = []
    for column in range(count):
        hatch = style.BAR_HATCHES[column]
        plain = Fill(BAR_FILLS[column], "#555555", hatch, 0.8)
        strong = Fill(STRONG_FILLS[column], BLUE, hatch, 1.6)
        marks.append(Boxes([], [], [], [], plain, names[column]))
        for row, value in enumerate(values[:, column]):
            y = row + (column - (count - 1) / 2) * height
            if not scale.shown(value) or value == 0:
                marks += _beyond(y, {"": value}, scale)
                continue
            edges = [y - 0.44 * height], [y + 0.44 * height]
            marks += [
                Boxes([scale.low], [value], *edges, strong if row == best else plain),
                Note(number_text(value), value, y, 4, size=8.5, bold=row == best, paper=True),
            ]
    return marks


def _beyond(y: float, values: Mapping[str, float], scale: _Scale) -> list[Mark]:
    """Values that have no place on the axis, at its left edge; an arrow head where there is one below it."""
    if not values:
        return []
    texts = {name: "not finite" if np.isnan(each) else number_text(each) for name, each in values.items()}
    below = any(each > 0 for each in values.values())
    alike = len(values) == 2 and len(set(texts.values())) == 1
    words = [texts.popitem()[1]] if alike else [f"{name} {text}".strip() for name, text in texts.items()]
    arrow = Line([scale.low], [y], Look(INK, "", style.CARET_LEFT, size=7), clip=False, order=4)
    note = Note(", ".join(words), scale.low, y, 9 if below else 4, size=8.5, paper=True)
    return [arrow, note] if below else [note]


def shift_axis(words: str, shifts: Sequence[Any], most: int = 9) -> Axis:
    """A horizontal axis of shifts, logarithmic from the smallest positive one on and linear from 0 to it.

    Args:
        words: its label; what is linear, and the unit, is added.
        shifts: arrays of all that are drawn, tokens, none negative.
        most: ticks at powers of ten that fit.
    """
    at = np.unique(np.concatenate([np.asarray(each, dtype=np.float64) for each in shifts]))
    above = at[at > 0]
    smallest, largest = (float(above[0]), float(above[-1])) if len(above) else (1.0, 1.0)
    if at[0] == 0:
        limits = -0.15 * smallest, largest * (largest / smallest) ** 0.03 * 1.1
    else:
        room = max(1.3, (largest / smallest) ** 0.05)
        limits = smallest / room, largest * room
    low, high = math.ceil(math.log10(2.5 * smallest)), math.floor(math.log10(largest) + 1e-9)
    # Counted from the largest, which a reader looks for.
    powers = range(high, low - 1, -max(1, math.ceil((high - low + 1) / most)))
    ends = [smallest, *([largest] if not powers else [])] if len(above) else []
    ticks = sorted({0.0, *ends, *(10.0**power for power in powers)})
    linear = f"; linear below {shift_text(smallest)}" if limits[0] < smallest else ""
    return Axis(
        f"{words} (tokens, {UNIT}{linear})",
        "symlog",
        limits,
        tuple((tick, shift_text(tick)) for tick in ticks if limits[0] <= tick <= limits[1]),
        linear_to=smallest,
    )


def _d_axis(label: str, values: Floats) -> Axis:
    """Logarithmic where D spreads; else linear, from 0 where that leaves the differences to be seen."""
    low, high = float(values.min()), float(values.max())
    if high > style.LOG_RATIO * low:
        return log_axis(label, low, high)
    if low <= 0.7 * high:
        return Axis(label, limits=(0, 1.08 * high))
    # Differences of a few percent must not fill the axis and pass for large ones.
    room = max(0.08 * (high - low), (LEAST_SPAN * high - (high - low)) / 2)
    return Axis(f"{label} (does not begin at 0)".strip(), limits=(low - room, high + room))


def _row_curves(rows: Sequence[Floats]) -> list[Mark]:
    """Each row thin, and their mean."""
    marks: list[Mark] = []
    for row in rows:
        d = _on_log(row[:, 1])
        single = alone(d)
        marks += [
            Line(row[:, 0], d, Look("#a3a3a3", width=0.6), order=2),
            Line(row[single, 0], d[single], Look("#a3a3a3", "", "_", size=5), order=2),
        ]
    points = sorted((float(x), float(d)) for row in rows for x, d in row if d > 0)
    means = {
        x: float(np.mean([d for _, d in each])) for x, each in groupby(points, key=lambda point: point[0])
    }
    # A place where no row has a D breaks the mean as it breaks the rows.
    places = sorted({float(x) for row in rows for x in row[:, 0]})
    mean = [means.get(x, np.nan) for x in places]
    return [*marks, Line(places, mean, Look(BLUE, "-", "o", width=2.4, size=5), "mean")]


def _marked_token(
    at: int, value: float, share: float, is_sink: bool, place: tuple[float, bool]
) -> list[Mark]:
    """A mark at a token and its share of D; ``place``: the points that the words rise, and whether they stand left."""
    rise, far = place
    name = "first token" if at == 0 else f"token {at + 1:,}"
    name += ", most attended" if is_sink else ""
    percent = f"{100 * share:.2g}" if 0 < share < 0.1 else f"{100 * share:.0f}"
    words = f"{name}: {percent} % of D" if np.isfinite(share) else f"{name}: no value"
    offset = -8 if far else 8
    anchor: Literal["left", "right"] = "right" if far else "left"
    known = bool(np.isfinite(value))
    note = Note(words, at + 1, value if known else None, offset, rise if known else 8, anchor, paper=True)
    look = Look(VERMILION if at == 0 else BLUE, "", "D" if at == 0 else "s", size=7, edge=INK)
    return [Line([at + 1], [value], look, name, order=5), note] if known else [note]


def _running_median(values: Floats) -> Floats:
    """``[n, 2]`` (place, median) of bins of equal width in log place, where they hold enough tokens."""
    place = np.arange(1, len(values) + 1)
    finite = np.isfinite(values)
    number = np.floor(np.log10(place) * MEDIAN_BINS_A_DECADE).astype(np.int64)
    found = []
    for each in np.unique(number[finite]):
        held = finite & (number == each)
        if held.sum() >= FEWEST_FOR_MEDIAN:
            found.append((float(np.exp(np.log(place[held]).mean())), float(np.median(values[held]))))
    return np.array(found).reshape(-1, 2)


def _checked_lines(
    what: str,
    series: Mapping[str, Sequence[tuple[float, ...]]],
    columns: int,
    most: int = style.MOST_LINES,
) -> dict[str, Floats]:
    """``[points, columns]`` by name, in rising order of the first column, which is not negative."""
    if not all(len(each) for each in series.values()):
        raise RopewalkError(f"there is no {what} to draw")
    check_count(what, len(series), most)
    rows = {}
    for name, points in series.items():
        if any(len(point) != columns for point in points):
            raise RopewalkError(f"{what} of {name!r}: points of {columns} values are needed")
        row = np.array(sorted(points, key=lambda point: point[0]), dtype=np.float64)
        if not np.isfinite(row[:, 0]).all():
            raise RopewalkError(f"{what} of {name!r} has a place that is not finite")
        if (row[:, 0] < 0).any():
            raise RopewalkError(f"{what} of {name!r}: {row[:, 0].min():g} tokens is negative")
        rows[name] = row
    check_amounts(what, np.concatenate([row[:, 1:].ravel() for row in rows.values()]))
    return rows


def _look(number: int, dash: str, size: float = 6.0, hollow: bool = False) -> Look:
    """Of one of up to eight lines: no two have the same marker."""
    at = number % style.MOST_LINES
    return Look(style.LINE_COLOURS[at], dash, style.LINE_MARKERS[at], hollow, 1.5, size)


def _on_log(values: Floats) -> Floats:
    """NaN in place of 0, so that a line is broken there and not drawn through."""
    return np.where(values > 0, values, np.nan)


def _kind(name: str) -> str:
    """The name of a series without the part, between commas, that tells its parameters."""
    parts = [part.strip() for part in name.split(",")]
    return ", ".join(part for part in parts if RANDOM not in part) or name


def _thinned(ticks: tuple[tuple[float, str], ...], step: float) -> tuple[tuple[float, str], ...]:
    """The largest tick and those at whole powers of ``step`` below it."""
    largest = ticks[-1][0]
    kept = [tick for tick, _ in ticks if round(p := math.log(largest / tick, step), 6) == round(p)]
    return length_ticks(kept)


def _evenly(values: Sequence[int]) -> list[int]:
    chosen = np.linspace(0, len(values) - 1, min(style.MOST_LINES, len(values))).round().astype(int)
    return [values[at] for at in chosen]


def _every(count: int) -> list[int]:
    """0 and multiples of a power of two below ``count``."""
    step = 1
    while count > MOST_TICKS * step:
        step *= 2
    return list(range(0, count, step))


def _sentence(parts: Sequence[str], values: Floats, zero: str = "D = 0 exactly, as at Δ₁ = Δ₂,") -> str:
    """A caption that also says which values have no place in the picture."""
    found = ((zero, (values == 0).any()), ("no value", np.isnan(values).any()))
    left_out = [words for words, is_there in found if is_there]
    joined = "; ".join([*parts, *([f"points with {' or '.join(left_out)} are left out"] if left_out else [])])
    return f"{joined[0].upper()}{joined[1:]}."
