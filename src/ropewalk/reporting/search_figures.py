"""Pictures of a search for rescale factors: what its candidates reached, and the factors against rules.

Plain numbers come in; nothing here knows how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import (
    COLOURS,
    INK,
    SIZE_INCHES,
    dress_axes,
    new_figure,
    save_figure,
    value_axis,
)
from ropewalk.reporting.rope_axes import (
    CAPTION_SIZE,
    LINE_INCHES,
    PAPER,
    check_count,
    check_finite,
    length_text,
)

WIDTHS = {1: SIZE_INCHES[0], 2: 11.0}
"""Inches of a picture, by its panels."""
HEIGHT = 4.4
CHARACTERS_PER_INCH = 16
"""Of a caption."""
SHOWN_SHARE = 0.9
"""Of all candidates: the worst ones would flatten the others, and are drawn at the upper edge."""
NEAR = 1.5
"""Times the lowest value: baselines up to there are always within the axes."""
MOST_MARKED_PAIRS = 24
"""Pairs up to which each one carries a marker."""
RULES: tuple[tuple[str, Any], ...] = ((COLOURS[0], "--"), (COLOURS[2], "-."), (COLOURS[3], ":"))
FOUND: tuple[tuple[str, Any, str], ...] = ((COLOURS[1], "-", "o"), (COLOURS[1], (0, (1, 1)), "s"))


@dataclass(frozen=True)
class SearchCurve:
    """What a search measured.

    Attributes:
        points: by candidate, in order: the forwards that the search had cost by then, and its perplexity; None
            where that is infinite.
        baselines: perplexity by name of what needs no search, at most three; None where infinite.
        target_length: tokens.
    """

    points: Sequence[tuple[int, float | None]]
    baselines: Mapping[str, float | None]
    target_length: int


@dataclass(frozen=True)
class FactorLines:
    """Rescale factors over the pairs.

    Attributes:
        found: ``[pairs]`` by name, one or two lists.
        rules: ``[pairs]`` by name, at most three lists.
        periods: ``[pairs]`` tokens that a pair takes for a full turn, unscaled.
        original_length: tokens that the model was trained for before it was extended.
    """

    found: Mapping[str, Sequence[float]]
    rules: Mapping[str, Sequence[float]]
    periods: Sequence[float]
    original_length: int


def search_figure(
    path: Path, curve: SearchCurve | None = None, lines: FactorLines | None = None, title: str = ""
) -> None:
    """The course of a search, the factors over the pairs, or both side by side.

    Args:
        path: ``.png`` or ``.svg``; complete or not written at all.
        curve, lines: what to draw, at least one.
        title: above the picture.

    Raises:
        RopewalkError: if there is nothing to draw, a factor is no finite number, or the suffix is another.
    """
    count = (curve is not None) + (lines is not None)
    check_count("search and no factors", count)
    figure, first = new_figure("", "", "")
    first.remove()
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    captions = []
    if curve is not None:
        captions.append(_search_panel(panels[0], curve))
    if lines is not None:
        captions.append(_factors_panel(panels[-1], lines))
    if title:
        figure.suptitle(
            fill(title, round(WIDTHS[count] * 11)),
            x=0.014,
            ha="left",
            fontsize=11,
            color=INK,
            parse_math=False,
        )
    told = fill(" ".join(captions), round(WIDTHS[count] * CHARACTERS_PER_INCH))
    figure.supxlabel(
        told, x=0.014, ha="left", multialignment="left", linespacing=1.25, fontsize=CAPTION_SIZE, color=INK
    )
    figure.set_size_inches(WIDTHS[count], HEIGHT + LINE_INCHES * (told.count("\n") + 1))
    save_figure(figure, path)


def _search_panel(axes: Any, curve: SearchCurve) -> str:
    """Every candidate, the best so far and the baselines; returns the caption."""
    finite = [(forwards, value) for forwards, value in curve.points if value is not None]
    if not finite:
        raise RopewalkError("there is no candidate with a finite perplexity to draw")
    if len(curve.baselines) > len(RULES):
        raise RopewalkError(f"a figure shows at most {len(RULES)} baselines, got {len(curve.baselines)}")
    x, y = np.array(finite, dtype=np.float64).T
    check_finite("perplexity", y)
    baselines = {name: value for name, value in curve.baselines.items() if value is not None}
    low = min([y.min(), *baselines.values()])
    near = [value for value in baselines.values() if value <= NEAR * low]
    # The room above the nearer baselines is for most candidates.
    top = max([float(np.quantile(y, SHOWN_SHARE, method="lower")), *near, y.min()])
    room = (top / low) ** 0.06
    low, top = low / room, top * room
    dress_axes(
        axes, "forwards (one candidate on one document)", f"perplexity at {curve.target_length:,} tokens"
    )
    inside = y <= top
    axes.plot(
        x[inside],
        y[inside],
        "o",
        color="#9cc3e4",
        markersize=3,
        linestyle="none",
        label="a candidate",
        zorder=2,
    )
    if not inside.all():
        edge = np.full((~inside).sum(), top)
        axes.plot(
            x[~inside],
            edge,
            "^",
            color="#9cc3e4",
            markersize=4,
            linestyle="none",
            clip_on=False,
            label="↑ above the axes",
            zorder=2,
        )
    best = np.minimum.accumulate(y)
    end = max(float(x[-1]), float(curve.points[-1][0]))
    axes.step(
        [*x, end],
        [*best, best[-1]],
        where="post",
        color=COLOURS[1],
        linewidth=2,
        label="best so far",
        zorder=4,
    )
    for (name, value), (colour, line_style) in zip(baselines.items(), RULES, strict=False):
        above = " ↑" if value > top else ""
        label = f"{_named(name)} {_short(value)}{above}"
        axes.axhline(value, color=colour, linestyle=line_style, linewidth=1.6, label=label, zorder=3)
    axes.set_xlim(0, end)
    value_axis(axes, low, top)
    axes.set_ylim(low, top)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _key(axes, 3)
    infinite = [name for name, value in curve.baselines.items() if value is None]
    missing = f" Infinite, and not shown: {', '.join(map(_named, infinite))}." if infinite else ""
    return (
        f"Perplexity on the search documents of each candidate measured on all of them; the best, {_short(best[-1])}, "
        f"came after {int(x[int(np.argmin(y))]):,} forwards.{missing}"
    )


def _factors_panel(axes: Any, lines: FactorLines) -> str:
    """Factors found and those of rules, with the pairs that never turn fully in training; returns the caption."""
    if not 1 <= len(lines.found) <= len(FOUND) or len(lines.rules) > len(RULES):
        raise RopewalkError(
            f"a figure shows one or two lists of factors and at most {len(RULES)} rules, got {len(lines.found)} "
            f"and {len(lines.rules)}"
        )
    drawn = {**lines.found, **lines.rules}
    for name, factors in drawn.items():
        check_finite(f"rescale factor of {name!r}", factors)
        if len(factors) != len(lines.periods):
            raise RopewalkError(f"{name!r} has {len(factors)} factors for {len(lines.periods)} pairs")
    dress_axes(axes, "pair of dimensions (0 turns fastest)", "rescale factor λ")
    pairs = np.arange(len(lines.periods))
    unseen = np.flatnonzero(np.asarray(lines.periods, dtype=np.float64) > lines.original_length)
    for (name, factors), (colour, line_style) in zip(lines.rules.items(), RULES, strict=False):
        axes.plot(pairs, factors, color=colour, linestyle=line_style, linewidth=1.6, label=_named(name))
    size = 5.0 if len(pairs) <= MOST_MARKED_PAIRS else 2.8
    for (name, factors), (colour, line_style, marker) in zip(lines.found.items(), FOUND, strict=False):
        axes.plot(
            pairs,
            factors,
            color=colour,
            linestyle=line_style,
            marker=marker,
            markersize=size,
            linewidth=1.8,
            label=name,
            zorder=4,
        )
    low, high = min(min(each) for each in drawn.values()), max(max(each) for each in drawn.values())
    value_axis(axes, low, high)
    margin = 0.03 * len(pairs)
    axes.set_xlim(-margin, len(pairs) - 1 + margin)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if len(unseen):
        at = unseen[0] - 0.5
        axes.axvline(at, color=INK, linestyle=(0, (2, 2)), linewidth=1)
        late = at > 0.6 * len(pairs)
        axes.annotate(
            f"period > {length_text(lines.original_length)} →",
            (at, 0),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if late else 5, 4),
            textcoords="offset points",
            ha="right" if late else "left",
            color=INK,
            fontsize=9,
            bbox=PAPER,
        )
    _key(axes, 4 if len(drawn) <= 4 else 3)
    return (
        f"Factors that the frequencies are divided by; pairs right of the dashed line ({len(unseen)} of {len(pairs)}) "
        f"complete no full turn within the original {lines.original_length:,} tokens."
    )


def _key(axes: Any, columns: int) -> None:
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=2.6,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _named(name: str) -> str:
    return {"pi": "PI", "ntk": "NTK", "yarn": "YaRN"}.get(name, name)


def _short(value: float) -> str:
    return f"{value:#.4g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"
