"""Draw a precision audit: how much attention changes when all positions of a sequence shift by a constant.

A shift is the position of a sequence's first token. D, the attention difference, is the attention (one unit per query)
that lands on other tokens after a change of shift. All functions take plain numbers and a ``title`` above the panels.
Each raises RopewalkError if there is nothing to draw, or a value is negative or infinite. NaN marks a missing value,
which is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    PAPER,
    Axes,
    Figure,
    Options,
    area,
    boxes,
    canvas,
    complete,
    end_label,
    heat_map,
    label,
    log_scale,
    look,
    note,
    panel_title,
    row_scale,
    rule,
    scale,
    whiskers,
)
from ropewalk.reporting.figures.prepare import (
    Floats,
    alone,
    check_amounts,
    check_count,
    length_ticks,
    positive,
    power_ticks,
    tell,
)
from ropewalk.reporting.style import BLUE, CLIP, GREY, INK, VERMILION, number_text, shift_text, tokens_text

D_LABEL = "attention difference D"
RANDOM = "random"
"""Part of a series' name that marks randomly initialised parameters."""
UNIT = "1k = 1,000"
"""Unit of shifts, which are round numbers of tokens. In lengths, ``1k`` is 1024."""
LEAST_SPAN = 0.25
"""Smallest length of an axis that does not start at 0, as a share of the largest D."""
BROADEST_BARS = 30
"""Largest ratio of the largest to the smallest bar on a linear axis; for heads, of the largest to the median."""
FLOOR = ("none",)
TOGETHER = ("all", "all together")
"""Names of rows that are not a single operation: float64 throughout, and the full audited arithmetic."""
BAR_FILLS = ("#dcdcdc", "white", "white", "#b5b5b5")
STRONG_FILLS = ("#9cc3e4", "white", "white", "#5e97c6")
ROW_INCHES = 0.34
EACH_POINT = 300
"""Largest number of tokens whose markers are large enough to tell apart."""
RASTERISED_POINTS = 1000
"""Number of tokens above which an SVG stores the points as an image."""
MEDIAN_BINS_A_DECADE = 12
FEWEST_FOR_MEDIAN = 5
NUMBERED_CELLS = 64
MOST_TICKS = 16


def drift_figure(series: Mapping[str, Sequence[tuple[int, float, float, float]]], title: str = "") -> Figure:
    """Draw D against the shift, one line per series, with 95 % intervals.

    Args:
        series: ``(delta1, D, low, high)`` by name: shift in tokens, and D with its interval (NaN for none). Series
            whose name contains ``random`` are hollow and dashed; ``a, random weights`` has the colour and marker of
            ``a``.
    """
    rows = _checked_lines("attention difference", series)
    plotted = positive(D_LABEL, np.concatenate([each[:, 1:].ravel() for each in rows.values()]))
    (axes,) = canvas(height=4.3)
    words = "position of the sequence's first token, Δ₁"
    shift_scale(axes.xaxis, words, [each[:, 0] for each in rows.values()])
    # Leave room above the lines for the label of the shift at which D is 0.
    log_scale(axes.yaxis, D_LABEL, plotted.min(), plotted.max(), (0.05, 0.12))
    bottom = axes.get_ylim()[0]
    kinds: dict[str, int] = {}
    for name, row in rows.items():
        is_random = RANDOM in name
        # The random control gets the colour of the pretrained series it belongs to and differs by dash and marker.
        number = kinds.setdefault(_kind(name), len(kinds))
        options = _look(number, "--" if is_random else "-", hollow=is_random)
        x, d = row[:, 0], _on_log(row[:, 1])
        axes.plot(x, d, label=label(name), **options)
        end_label(axes, name, x, d, options["color"])
        known = np.isfinite(row[:, 2:]).all(axis=1) & np.isfinite(d)
        # A logarithmic axis cannot show 0, so an interval that reaches 0 ends at the lower edge.
        low = np.maximum(row[known, 2], bottom)
        ends = low, row[known, 3]
        whiskers(axes, x[known], d[known], *ends, colour=options["color"], caps=3, order=2)
    # D is 0 where Δ₁ equals Δ₂; only a shift that all series agree on is marked.
    same = {float(x) for row in rows.values() for x in row[row[:, 1] == 0, 0]}
    if len(same) == 1:
        rule(axes, same.pop(), "Δ₁ = Δ₂: D = 0", dash=(0, (1, 3)), order=1)
    every = np.concatenate([row[:, 1] for row in rows.values()])
    parts = [
        "D measures how much the attention that each token receives changes if the sequence starts at position Δ₁ "
        "instead of Δ₂, summed over tokens, heads and layers (bars: 95 % intervals)"
    ]
    if any(RANDOM in name for name in rows):
        parts.append("hollow and dashed: randomly initialised parameters")
    told = (tell(name, row[:, 0], row[:, 1], _at_shift) for name, row in rows.items())
    return complete([axes], title, _sentence(parts, every), told)


def samples_figure(
    curves: Sequence[Sequence[tuple[int, float]]],
    sweep: Sequence[tuple[int, int, float]],
    title: str = "",
) -> Figure:
    """Draw D against the shift: on the left each sequence and their mean, on the right the mean for several delta2.

    Args:
        curves: ``(delta1, D)`` points of each sequence.
        sweep: ``(delta1, delta2, D)`` points, one line per delta2. D is symmetric, so each pair is needed in one order
            only. If there are more than ``MOST_LINES`` values of delta2, an evenly spaced selection is drawn.
    """
    by_number = {f"sequence {n}": each for n, each in enumerate(curves, 1)}
    # The lines of sequences need not be told apart, so their number has no limit.
    rows = list(_checked_lines("attention difference", by_number, len(curves)).values())
    # In both orders, because D is symmetric; a pair that is given in both keeps its own values.
    pairs = {(b, a): d for a, b, d in sweep} | {(a, b): d for a, b, d in sweep}
    seconds = sorted({delta2 for _, delta2 in pairs})
    chosen = _evenly(seconds)
    lines = _checked_lines(
        "attention difference between two shifts",
        {shift_text(b): sorted((a, d) for (a, other), d in pairs.items() if other == b) for b in chosen},
    )
    panels = canvas(2, 2, height=3.7)
    for axes, drawn, words, y_words in (
        (panels[0], rows, "each sequence", D_LABEL),
        (panels[1], list(lines.values()), "mean, by Δ₂", ""),
    ):
        shift_scale(axes.xaxis, "Δ₁", [each[:, 0] for each in drawn], 3)
        _d_scale(axes.yaxis, y_words, positive(D_LABEL, np.concatenate([each[:, 1] for each in drawn])))
        panel_title(axes, words)
    mean = _draw_rows(panels[0], rows)
    for number, (name, row) in enumerate(lines.items()):
        options, d = _look(number, style.LINE_DASHES[number % 4], size=5), _on_log(row[:, 1])
        panels[1].plot(row[:, 0], d, label=name, **options)
        end_label(panels[1], f"Δ₂ = {name}", row[:, 0], d, options["color"])
    count = (
        "for the only sequence"
        if len(rows) == 1
        else f"for each of {len(rows)} sequences (thin) and their mean (bold)"
    )
    some = f" ({len(chosen)} of {len(seconds)})" if len(chosen) < len(seconds) else ""
    part = (
        f"attention difference D between a sequence that starts at Δ₁ and one that starts at Δ₂: left, {count}; "
        f"right, the mean for several Δ₂{some}"
    )
    every = np.concatenate([row[:, 1] for row in [*rows, *lines.values()]])
    told = (
        tell("mean of the sequences", *mean, _at_shift),
        *(tell(f"mean at Δ₂ = {name}", row[:, 0], row[:, 1], _at_shift) for name, row in lines.items()),
    )
    return complete(panels, title, _sentence([part], every), told)


def lengths_figure(series: Mapping[str, Sequence[tuple[int, float, float]]], title: str = "") -> Figure:
    """Draw D and the change of the first token's attention score against sequence length, on logarithmic axes.

    Args:
        series: ``(length, D, mean_logit_difference)`` by name: length in tokens, at least 1; attention difference; and
            absolute difference of the first token's score before softmax, averaged over queries, layers and heads.
    """
    rows = _checked_lines("attention difference by length", series)
    lengths = np.concatenate([each[:, 0] for each in rows.values()])
    low, high = float(lengths.min()), float(lengths.max())
    room = max(1.1, (high / low) ** 0.04)
    # Each of the two panels has room for half the ticks.
    ticks = _thinned(power_ticks(low, high), 4.0 if high > 16 * low else 2.0)
    panels = canvas(2, 2, height=3.5)
    for axes, column, words in zip(
        panels, (1, 2), (D_LABEL, "mean logit difference of the first token"), strict=True
    ):
        values = positive(words, np.concatenate([each[:, column] for each in rows.values()]))
        scale(axes.xaxis, "sequence length (tokens)", "log2", (low / room, high * room), ticks)
        log_scale(axes.yaxis, "", values.min(), values.max())
        panel_title(axes, words)
        for number, (name, row) in enumerate(rows.items()):
            options, y = _look(number, style.LINE_DASHES[number % 4]), _on_log(row[:, column])
            axes.plot(row[:, 0], y, label=label(name), **options)
            # Series are labelled in the right panel, or in the left one if they have no points in the right one.
            if (column == 2) == bool((row[:, 2] > 0).any()):
                end_label(axes, name, row[:, 0], y, options["color"])
    every = np.concatenate([row[:, 1:].ravel() for row in rows.values()])
    part = (
        "difference between two shifts of the same sequences, truncated to a length: left in attention, right in the "
        "first token's attention score before softmax (mean over layers and heads); a steeper line grows faster with "
        "length"
    )
    told = (
        tell(f"{words} in {name}", row[:, 0], row[:, column], tokens_text)
        for column, words in ((1, "D"), (2, "difference of the first token's score"))
        for name, row in rows.items()
    )
    return complete(panels, title, _sentence([part], every, "a difference of 0"), told)


def tokens_figure(per_token: Sequence[float], sink: int, title: str = "") -> Figure:
    """Draw each token's contribution to D against its position, labelling the shares of the first token and the sink.

    Args:
        per_token: ``[length]`` contributions to D.
        sink: index, from 0, of the attention sink, the token that receives the most attention.
    """
    parts = check_amounts("contribution of a token to D", per_token)
    plotted = positive("contribution of a token to D", parts)
    floor = float(plotted[plotted >= CLIP * plotted.max()].min())
    # From 1, because a logarithmic axis cannot show 0.
    place = np.arange(1, len(parts) + 1, dtype=np.float64)
    # Values too small for the axis, including 0, are left out and counted in the caption.
    seen = np.where(parts >= floor, parts, np.nan)
    (axes,) = canvas(height=3.9)
    end = max(1.25 * len(parts), 10)
    x_words = "position of the token (1 is the first)"
    scale(axes.xaxis, x_words, "log", (0.8, end), text=style.count_text)
    log_scale(axes.yaxis, "token’s contribution to D", floor, float(plotted.max()), (0.05, 0.1))
    size = 3 if len(parts) <= EACH_POINT else 1.3
    points = look("#9a9a9a", "", "o", size=size, edge="none", order=2)
    axes.plot(place, seen, label="tokens", rasterized=len(parts) > RASTERISED_POINTS, **points)
    marked = list(dict.fromkeys((0, sink)))
    # Without the marked tokens, whose large values would bend the line.
    median = _running_median(np.where(np.isin(np.arange(len(parts)), marked), np.nan, seen))
    if len(median):
        axes.plot(*median.T, label="median", **look(width=2))
    total = float(np.nansum(parts))
    for at in marked:
        # Two labels move apart vertically, so that neither covers the other's marker.
        lower = len(marked) == 2 and not parts[at] >= np.nanmax(parts[marked])
        rise = 0 if len(marked) == 1 else -10 if lower else 10
        words = f"{_token_name(at, at == sink)}: {_share(parts[at] / total)}"
        _mark_token(axes, at, seen[at], words, rise, at > 0.3 * end)
    left_out = int(len(parts) - np.isfinite(seen).sum())
    missing = f" {left_out:,} of {len(parts):,} tokens with less than {number_text(floor)} or no value are left out."
    words = (
        "Each point is the attention that one token gains or loses, as its contribution to D; the line is the median "
        f"of neighbouring tokens. Labels give the share of D of the marked tokens.{missing if left_out else ''}"
    )
    told = (
        *(
            f"{_token_name(at, at == sink)}: contribution {_number(parts[at])}, {_share(parts[at] / total)}"
            for at in marked
        ),
        tell("median of the others", median[:, 0], median[:, 1], lambda at: f"position {at:,.0f}"),
    )
    return complete([axes], title, words, told)


def heads_figure(heads: Sequence[Sequence[float]], title: str = "", caption: str | None = None) -> Figure:
    """Draw D of each head as a heat map; darker is larger. Heads without a value are hatched.

    Args:
        heads: D as ``[layers][heads]``, with the same number of heads in each layer.
        caption: caption below the panel. None or an empty string means the default one.
    """
    values = check_amounts(f"{D_LABEL} by head", heads)
    layers, count = values.shape
    high, above = float(np.nanmax(values)), values[values > 0]
    # On a linear scale a few strong heads would make all others look alike.
    spread = bool(len(above)) and bool(high > BROADEST_BARS * np.median(above))
    low = max(float(above.min()), CLIP * high) if spread else 0.0
    few = layers * count <= NUMBERED_CELLS
    (axes,) = canvas(height=min(6.4, max(2.9, 1.2 + (0.34 if few else 0.15) * layers)), grid="")
    for axis, words, each in (
        (axes.xaxis, "head", count),
        (axes.yaxis, "layer (0 at the bottom)", layers),
    ):
        scale(axis, words, limits=(-0.5, each - 0.5), ticks=[(n, str(n)) for n in _every(each)])
    words = f"D{' (logarithmic)' if spread else ''}"
    numbers = 0 if not few else 8 if count <= 10 else 6.5
    top_value = high or 1.0
    heat_map(*(axes, values, "dark", low, top_value, words, number_text), logarithmic=spread, numbers=numbers)
    hatched = "; hatched: no value" if np.isnan(values).any() else ""
    top = np.unravel_index(int(np.nanargmax(values)), values.shape)
    words = (
        f"Attention difference D of each head; darker is larger. The largest is in head {top[1]} of layer {top[0]} "
        f"(D = {number_text(float(values[top]))}){hatched}."
    )
    told = (
        f"layer {n}: "
        + (
            "no value"
            if np.isnan(row).all()
            else f"up to {number_text(np.nanmax(row))} in head {np.nanargmax(row)}"
        )
        for n, row in enumerate(values)
    )
    return complete([axes], title, caption or words, told)


def ablation_figure(
    operations: Sequence[tuple[str, Sequence[float]]],
    shifts: Sequence[str],
    title: str = "",
) -> Figure:
    """Draw D for each operation computed alone in low precision, as bars on a logarithmic axis.

    The operation with the largest D is emphasised.

    Args:
        operations: ``(operation, [shifts] D)``. The rows ``none`` (float64 throughout, also drawn as a dashed line)
            and ``all together`` or ``all`` are not single operations and come last.
        shifts: names of the shifts in the key, such as ``shift 1M``.
    """
    ranks = {**dict.fromkeys(TOGETHER, 1), **dict.fromkeys(FLOOR, 2)}
    rows = sorted(operations, key=lambda row: ranks.get(row[0], 0))
    check_count("attention difference by operation", len(shifts), len(style.BAR_HATCHES), "bars a row")
    values = check_amounts("attention difference by operation", [row[1] for row in rows])
    names = [name for name, _ in rows]
    largest = [
        # `initial` lets a row without a value pass, below all others.
        np.nanmax(each, initial=-1) if name not in ranks else -1
        for name, each in zip(names, values, strict=True)
    ]
    best = int(np.argmax(largest)) if max(largest) > 0 else None
    ends = _ends(values, logarithmic=True)
    (axes,) = canvas(height=1.0 + ROW_INCHES * len(names) * (0.45 + 0.55 * len(shifts)), grid="x")
    _row_axes(axes, ends, f"{D_LABEL} (logarithmic)", names, [] if best is None else [best])
    _grouped_bars(axes, values, ends, best, shifts)
    dashed = ""
    for name, row in zip(names, values, strict=True):
        if name in FLOOR and (floor := np.nanmax(row, initial=-1)) > ends.low:
            rule(axes, floor, dash=style.LONG_DASHED, order=3)
            dashed = " The dashed line is D with everything in float64."
    clipped = bool(((values > 0) & (values <= ends.low)).any())
    beyond = " Arrow heads mark values left of the axis." if clipped else ""
    strongest = "" if best is None else f" The operation with the largest effect is “{names[best]}”."
    words = (
        "Attention difference D if only the named operation is computed in low precision and everything else in "
        f"float64.{strongest}{dashed}{beyond}"
    )
    keys = [axes] if len(shifts) > 1 else []
    return complete([axes], title, words, _told_rows(names, shifts, values), keys=keys)


def mitigations_figure(mitigations: Sequence[tuple[str, float, float]], title: str = "") -> Figure:
    """Draw D with each mitigation at a near and a far shift, as points on a logarithmic axis.

    Args:
        mitigations: ``(name, D, far_D)``. The first one is the baseline and also a dashed line.
    """
    values = check_amounts("attention difference by mitigation", [each[1:] for each in mitigations])
    ends, names = _ends(values, logarithmic=True), [each[0] for each in mitigations]
    (axes,) = canvas(height=1.05 + ROW_INCHES * len(mitigations), grid="x")
    _row_axes(axes, ends, f"{D_LABEL} (logarithmic)", names, [0])
    near_look = look(BLUE, "", "o", size=5, stroke=1.4, order=4)
    far_look = look(VERMILION, "", "D", hollow=True, size=9, stroke=1.4, order=4)
    # Lines without points make the entries of the key.
    axes.plot([], [], label="near shift", **near_look)
    axes.plot([], [], label="far shift", **far_look)
    if values[0, 0] > ends.low:
        rule(axes, values[0, 0], dash=style.LONG_DASHED, name="baseline, near shift", order=1)
    for row, (near, far) in enumerate(values):
        both = [value for value in (near, far) if ends.shown(value)]
        if len(both) == 2:
            axes.plot(both, [row, row], **look(GREY, width=1.2, order=2))
        # The far point is larger and drawn first, so that both stay visible where they coincide.
        for value, options in ((far, far_look), (near, near_look)):
            if ends.shown(value):
                axes.plot([value], [row], **options)
        _beyond(axes, row, {n: v for n, v in (("near", near), ("far", far)) if not ends.shown(v)}, ends)
    words = (
        "Attention difference D with each mitigation; further left is better. The dashed line is the baseline in the "
        "first row."
    )
    return complete([axes], title, words, _told_rows(names, ["near", "far"], values), keys=[axes])


def first_token_figure(effects: Sequence[tuple[str, float, float, float]], title: str = "") -> Figure:
    """Draw D if only the first token, all others, or the whole sequence shift, and the part that rounding causes.

    Args:
        effects: ``(shifted tokens, D, D_exact, D_arithmetic)``: attention difference in low precision, in float64,
            and between the two.
    """
    values = check_amounts("attention difference by shifted tokens", [each[1:] for each in effects])
    # A value that is 0 up to rounding must not force a logarithmic axis.
    seen = values[values > CLIP * np.nanmax(values)]
    logarithmic = bool(len(seen)) and bool(seen.max() > BROADEST_BARS * seen.min())
    ends = _ends(values, logarithmic)
    columns, rows = ["in low precision", "in float64", "caused by rounding"], [each[0] for each in effects]
    (axes,) = canvas(height=1.0 + 2.1 * ROW_INCHES * len(effects), grid="x")
    x_words = f"{D_LABEL}{' (logarithmic)' if logarithmic else ''}"
    _row_axes(axes, ends, x_words, rows, y_words="shifted tokens")
    _grouped_bars(axes, values, ends, None, columns)
    words = (
        "Attention difference D if only some tokens of a sequence change position. The change in float64 is the true "
        "effect of new relative positions; the rest is rounding in low precision."
    )
    return complete([axes], title, words, _told_rows(rows, columns, values), keys=[axes])


def _told_rows(rows: Sequence[str], columns: Sequence[str], values: Floats) -> tuple[str, ...]:
    """Say all values ``[rows, columns]`` of a chart with named rows."""
    return tuple(
        f"{name}: {', '.join(f'{_number(value)} {column}' for column, value in zip(columns, row, strict=True))}"
        for name, row in zip(rows, values, strict=True)
    )


def _number(value: float) -> str:
    return "not finite" if np.isnan(value) else number_text(value)


def _at_shift(shift: float) -> str:
    return f"shift {shift_text(shift)}"


class _Ends(NamedTuple):
    """Axis of a bar chart: its ends, and whether it is logarithmic."""

    low: float
    high: float
    logarithmic: bool

    def shown(self, value: float) -> bool:
        """Whether a bar of this value is visible."""
        return value > self.low or (value == self.low and not self.logarithmic)


def _ends(values: Floats, logarithmic: bool) -> _Ends:
    """Choose an axis from about a decade below the smallest unclipped value to the largest value."""
    if not logarithmic:
        return _Ends(0.0, float(np.nanmax(values)) or 1.0, False)
    plotted = positive(D_LABEL, values)
    high = float(plotted.max())
    least = float(plotted[plotted >= CLIP * high].min())
    # Down to a power of ten somewhat below the least value, so that its bar has a length.
    return _Ends(max(CLIP * high, 10.0 ** math.floor(math.log10(0.7 * least))), high, True)


def _row_axes(
    axes: Axes, ends: _Ends, words: str, names: Sequence[str], bold: Sequence[int] = (), y_words: str = ""
) -> None:
    """Set axes of named rows, with room for the number after the longest bar."""
    if ends.logarithmic:
        log_scale(axes.xaxis, words, ends.low, ends.high, (0, 0.14))
        axes.set_xlim(left=ends.low)
    else:
        scale(axes.xaxis, words, limits=(0, 1.14 * ends.high))
    row_scale(axes, names, bold, y_words)


def _grouped_bars(axes: Axes, values: Floats, ends: _Ends, best: int | None, names: Sequence[str]) -> None:
    """Draw ``[rows, columns]`` as grouped bars with numbers. Columns differ in hatch, and row ``best`` in colour."""
    count = values.shape[1]
    height = 0.78 / count
    for column in range(count):
        hatch = style.BAR_HATCHES[column]
        plain = area(BAR_FILLS[column], "#555555", hatch, width=0.8)
        strong = area(STRONG_FILLS[column], BLUE, hatch, width=1.6)
        # Boxes without a bar make the entry of the key, in the colour of ordinary rows.
        boxes(axes, [], [], [], [], plain, names[column])
        for row, value in enumerate(values[:, column]):
            y = row + (column - (count - 1) / 2) * height
            # A linear axis can show 0, but a bar of no length needs its number in words.
            if not ends.shown(value) or value == 0:
                _beyond(axes, y, {"": value}, ends)
                continue
            options = strong if row == best else plain
            boxes(axes, [ends.low], value, y - 0.44 * height, y + 0.44 * height, options)
            weight = "bold" if row == best else "normal"
            note(axes, number_text(value), (value, y), (4, 0), size=8.5, weight=weight, bbox=PAPER)


def _beyond(axes: Axes, y: float, values: Mapping[str, float], ends: _Ends) -> None:
    """Write values that the axis cannot show at its left edge, with an arrow head if one lies below the axis."""
    if not values:
        return
    texts = {name: _number(each) for name, each in values.items()}
    # A positive value lies beyond the axis and gets an arrow; 0 and NaN lie nowhere on it.
    below = any(each > 0 for each in values.values())
    alike = len(values) == 2 and len(set(texts.values())) == 1
    words = [texts.popitem()[1]] if alike else [f"{name} {text}".strip() for name, text in texts.items()]
    if below:
        arrow = look(INK, "", style.CARET_LEFT, size=7, order=4)
        axes.plot([ends.low], [y], clip_on=False, **arrow)
    note(axes, ", ".join(words), (ends.low, y), (9 if below else 4, 0), size=8.5, bbox=PAPER)


def shift_scale(axis: Any, words: str, shifts: Sequence[Any], most: int = 9) -> None:
    """Set an axis of shifts: linear from 0 to the smallest positive shift and logarithmic above.

    Args:
        words: label, to which the unit and the linear range are added.
        shifts: arrays of all shifts to draw, non-negative, in tokens.
        most: largest number of ticks at powers of ten.
    """
    at = np.unique(np.concatenate([np.asarray(each, dtype=np.float64) for each in shifts]))
    above = at[at > 0]
    smallest, largest = (float(above[0]), float(above[-1])) if len(above) else (1.0, 1.0)
    if at[0] == 0:
        # Some room left of 0, so that the point at a shift of 0 does not lie on the frame.
        limits = -0.15 * smallest, largest * (largest / smallest) ** 0.03 * 1.1
    else:
        room = max(1.3, (largest / smallest) ** 0.05)
        limits = smallest / room, largest * room
    # Powers far enough from the smallest shift for its label; 1e-9 keeps a largest shift that is itself a power.
    low, high = math.ceil(math.log10(2.5 * smallest)), math.floor(math.log10(largest) + 1e-9)
    # Counted down from the largest power, so that it always has a tick.
    powers = range(high, low - 1, -max(1, math.ceil((high - low + 1) / most)))
    # If no power of ten lies between, the largest shift gets a tick.
    ends = [smallest, *([largest] if not powers else [])] if len(above) else []
    ticks = sorted({0.0, *ends, *(10.0**power for power in powers)})
    linear = f"; linear below {shift_text(smallest)}" if limits[0] < smallest else ""
    named = [(tick, shift_text(tick)) for tick in ticks if limits[0] <= tick <= limits[1]]
    scale(axis, f"{words} (tokens, {UNIT}{linear})", "symlog", limits, named, linear_to=smallest)


def _d_scale(axis: Any, words: str, values: Floats) -> None:
    """Set an axis for D: logarithmic if D spreads far; otherwise linear, from 0 if differences stay visible."""
    low, high = float(values.min()), float(values.max())
    if high > style.LOG_RATIO * low:
        log_scale(axis, words, low, high)
    elif low <= 0.7 * high:
        scale(axis, words, limits=(0, 1.08 * high))
    else:
        # A minimum span keeps differences of a few percent from looking large.
        room = max(0.08 * (high - low), (LEAST_SPAN * high - (high - low)) / 2)
        scale(axis, f"{words} (does not start at 0)".strip(), limits=(low - room, high + room))


def _draw_rows(axes: Axes, rows: Sequence[Floats]) -> tuple[list[float], list[float]]:
    """Draw a thin line per sequence and a bold line for their mean; returns the points of the mean."""
    for row in rows:
        d = _on_log(row[:, 1])
        single = alone(d)
        axes.plot(row[:, 0], d, **look("#a3a3a3", width=0.6, order=2))
        axes.plot(row[single, 0], d[single], **look("#a3a3a3", "", "_", size=5, order=2))
    points = sorted((float(x), float(d)) for row in rows for x, d in row if d > 0)
    means = {
        x: float(np.mean([d for _, d in each])) for x, each in groupby(points, key=lambda point: point[0])
    }
    # Where no sequence has a D, NaN breaks the mean as well.
    places = sorted({float(x) for row in rows for x in row[:, 0]})
    mean = [means.get(x, np.nan) for x in places]
    axes.plot(places, mean, label="mean", **look(BLUE, "-", "o", width=2.4, size=5))
    return places, mean


def _mark_token(axes: Axes, at: int, value: float, words: str, rise: float, is_far: bool) -> None:
    """Mark a token; its label is ``rise`` points above, at the left if the token is far to the right."""
    known = bool(np.isfinite(value))
    if known:
        options = look(VERMILION if at == 0 else BLUE, "", "D" if at == 0 else "s", size=7, edge=INK, order=5)
        axes.plot([at + 1], [value], **options)
    offset = (-8 if is_far else 8, rise if known else 8)
    side = "right" if is_far else "left"
    note(axes, words, (at + 1, value if known else None), offset, ha=side, bbox=PAPER)


def _token_name(at: int, is_sink: bool) -> str:
    name = "first token" if at == 0 else f"token {at + 1:,}"
    return f"{name}, most attended" if is_sink else name


def _share(share: float) -> str:
    if not np.isfinite(share):
        return "no value"
    return f"{100 * share:.2g} % of D" if 0 < share < 0.1 else f"{100 * share:.0f} % of D"


def _running_median(values: Floats) -> Floats:
    """Medians as ``[n, 2]`` (position, median) over bins of equal width in log position that hold enough tokens."""
    place = np.arange(1, len(values) + 1)
    finite = np.isfinite(values)
    # Bins of equal width on the logarithmic axis hold ever more tokens, so the line stays equally smooth.
    number = np.floor(np.log10(place) * MEDIAN_BINS_A_DECADE).astype(np.int64)
    found = []
    for each in np.unique(number[finite]):
        held = finite & (number == each)
        if held.sum() >= FEWEST_FOR_MEDIAN:
            # The geometric mean is the middle of the bin on a logarithmic axis.
            found.append((float(np.exp(np.log(place[held]).mean())), float(np.median(values[held]))))
    return np.array(found).reshape(-1, 2)


def _checked_lines(
    what: str, series: Mapping[str, Sequence[tuple[float, ...]]], most: int = style.MOST_LINES
) -> dict[str, Floats]:
    """Convert series to ``[points, columns]`` by name, sorted by the first column, which is a shift or a length."""
    check_count(what, len(series), most)
    rows = {
        name: np.array(sorted(points, key=lambda point: point[0]), dtype=np.float64)
        for name, points in series.items()
    }
    check_amounts(what, np.concatenate([row[:, 1:].ravel() for row in rows.values()]))
    return rows


def _look(number: int, dash: str, size: float = 6.0, hollow: bool = False) -> Options:
    """Options of one of up to eight lines, each with its own marker."""
    at = number % style.MOST_LINES
    return look(style.LINE_COLOURS[at], dash, style.LINE_MARKERS[at], hollow=hollow, width=1.5, size=size)


def _on_log(values: Floats) -> Floats:
    """Replace 0 with NaN. A logarithmic axis cannot show 0, so the line must break there."""
    return np.where(values > 0, values, np.nan)


def _kind(name: str) -> str:
    """Name of a series without its comma-separated part about random parameters."""
    parts = [part.strip() for part in name.split(",")]
    return ", ".join(part for part in parts if RANDOM not in part) or name


def _thinned(ticks: tuple[tuple[float, str], ...], step: float) -> tuple[tuple[float, str], ...]:
    """Keep the largest tick and those below it at whole powers of ``step``."""
    largest = ticks[-1][0]
    # Rounded, because log gives whole powers only up to its error.
    kept = [tick for tick, _ in ticks if round(p := math.log(largest / tick, step), 6) == round(p)]
    return length_ticks(kept)


def _evenly(values: Sequence[int]) -> list[int]:
    chosen = np.linspace(0, len(values) - 1, min(style.MOST_LINES, len(values))).round().astype(int)
    return [values[at] for at in chosen]


def _every(count: int) -> list[int]:
    """At most ``MOST_TICKS`` multiples of a power of two from 0 to below ``count``."""
    step = 1
    while count > MOST_TICKS * step:
        step *= 2
    return list(range(0, count, step))


def _sentence(parts: Sequence[str], values: Floats, zero: str = "D = 0 (as at Δ₁ = Δ₂)") -> str:
    """Join the parts of a caption and add which values the figure leaves out."""
    found = ((zero, (values == 0).any()), ("no value", np.isnan(values).any()))
    left_out = [words for words, is_there in found if is_there]
    joined = "; ".join([*parts, *([f"points with {' or '.join(left_out)} are left out"] if left_out else [])])
    return f"{joined[0].upper()}{joined[1:]}."
