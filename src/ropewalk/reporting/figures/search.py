"""The figure of a search for rescale factors: what its candidates reached, and the factors against rules.

Plain numbers come in; nothing here knows how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style
from ropewalk.reporting.primitives import (
    Axis,
    Figure,
    Line,
    Look,
    Mark,
    Panel,
    Rule,
    Steps,
    beside,
    check_count,
    check_finite,
    value_axis,
)
from ropewalk.reporting.style import BLUE, GREEN, GREY, VERMILION, length_text

WIDTHS = {1: style.WIDTH_INCHES, 2: 11.0}
"""Inches of a picture, by its panels."""
SHOWN_SHARE = 0.9
"""Of all candidates: the worst ones would flatten the others, and are drawn at the upper edge."""
NEAR = 1.5
"""Times the lowest value: baselines up to there are always within the axes."""
MOST_MARKED_PAIRS = 24
"""Pairs up to which each one carries a large marker."""
RULES = ((GREY, "--"), (VERMILION, "-."), (GREEN, ":"))
FOUND = (Look(BLUE, "-", "o"), Look(BLUE, (0, (1, 1)), "s"))
CANDIDATE = "#9cc3e4"


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
    curve: SearchCurve | None = None, lines: FactorLines | None = None, title: str = ""
) -> Figure:
    """The course of a search, the factors over the pairs, or both side by side.

    Args:
        curve, lines: what to draw, at least one.
        title: above the picture.

    Raises:
        RopewalkError: if there is nothing to draw, or a factor is no finite number.
    """
    found = [
        *([_search_panel(curve)] if curve is not None else []),
        *([_factors_panel(lines)] if lines is not None else []),
    ]
    check_count("search and no factors", len(found))
    caption = " ".join(words for _, words in found)
    panels = tuple(panel for panel, _ in found)
    return Figure(panels, caption, title, 4.1, WIDTHS[len(found)], len(found))


def _search_panel(curve: SearchCurve) -> tuple[Panel, str]:
    """Every candidate, the best so far, and what needs no search; and the caption."""
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
    inside, best = y <= top, np.minimum.accumulate(y)
    end = max(float(x[-1]), float(curve.points[-1][0]))
    marks: list[Mark] = [
        Line(x[inside], y[inside], Look(CANDIDATE, "", "o", size=3), "a candidate", order=2),
        Steps([*x, end], best, Look(width=2), "best so far", order=4),
    ]
    if not inside.all():
        edge = np.full((~inside).sum(), top)
        beyond = Look(CANDIDATE, "", "^", size=4)
        marks.insert(1, Line(x[~inside], edge, beyond, "↑ above the axes", clip=False, order=2))
    for (name, value), (colour, dash) in zip(baselines.items(), RULES, strict=False):
        words = f"{_named(name)} {_short(value)}{' ↑' if value > top else ''}"
        if value > top:
            # In the key alone: a line there would make the axis as high.
            marks.append(Line([], [], Look(colour, dash, width=1.6), words))
        else:
            marks.append(Rule(value, "y", colour=colour, dash=dash, width=1.6, name=words, order=3))
    panel = Panel(
        tuple(marks),
        Axis(
            "forwards (one candidate on one document)",
            limits=(0, end),
            text=style.count_text,
            most_ticks=6,
            whole=True,
        ),
        value_axis(f"perplexity at {curve.target_length:,} tokens", low, top, (low, top)),
        key=True,
    )
    infinite = [name for name, value in curve.baselines.items() if value is None]
    missing = f" Infinite, and not shown: {', '.join(map(_named, infinite))}." if infinite else ""
    return panel, (
        f"Perplexity on the search documents of each candidate measured on all of them; the best, {_short(best[-1])}, "
        f"came after {int(x[int(np.argmin(y))]):,} forwards.{missing}"
    )


def _factors_panel(lines: FactorLines) -> tuple[Panel, str]:
    """Factors found and those of rules, with the pairs that never turn fully in training; and the caption."""
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
    pairs = np.arange(len(lines.periods))
    marks: list[Mark] = [
        Line(pairs, factors, Look(colour, dash, width=1.6), _named(name))
        for (name, factors), (colour, dash) in zip(lines.rules.items(), RULES, strict=False)
    ]
    size = 5.0 if len(pairs) <= MOST_MARKED_PAIRS else 2.8
    for (name, factors), found in zip(lines.found.items(), FOUND, strict=False):
        look = Look(found.colour, found.dash, found.marker, size=size)
        marks.append(Line(pairs, factors, look, name, order=4))
    unseen = np.flatnonzero(np.asarray(lines.periods, dtype=np.float64) > lines.original_length)
    if len(unseen):
        at = unseen[0] - 0.5
        marks.append(
            Rule(
                at,
                words=f"period > {length_text(lines.original_length)} →",
                side=beside(at > 0.6 * len(pairs)),
                foot=True,
            )
        )
    margin = 0.03 * len(pairs)
    limits = -margin, len(pairs) - 1 + margin
    low, high = min(min(each) for each in drawn.values()), max(max(each) for each in drawn.values())
    panel = Panel(
        tuple(marks),
        Axis("pair of dimensions (0 turns fastest)", limits=limits, most_ticks=8, whole=True),
        value_axis("rescale factor λ", low, high),
        key=True,
    )
    return panel, (
        f"Factors that the frequencies are divided by; pairs right of the dashed line ({len(unseen)} of {len(pairs)}) "
        f"complete no full turn within the original {lines.original_length:,} tokens."
    )


def _named(name: str) -> str:
    return {"pi": "PI", "ntk": "NTK", "yarn": "YaRN"}.get(name, name)


def _short(value: float) -> str:
    return f"{value:#.4g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"
