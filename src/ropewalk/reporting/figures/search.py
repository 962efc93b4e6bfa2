"""Draw a search for rescale factors: perplexity of its candidates, and the factors found beside those of rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting import style
from ropewalk.reporting.figures.drawing import (
    Axes,
    Dash,
    Figure,
    beside,
    canvas,
    complete,
    label,
    look,
    rule,
    scale,
    value_scale,
)
from ropewalk.reporting.figures.prepare import check_finite, tell
from ropewalk.reporting.style import BLUE, GREEN, GREY, VERMILION, length_text

WIDTHS = {1: style.WIDTH_INCHES, 2: 11.0}
"""Width of a figure in inches, by number of panels."""
SHOWN_SHARE = 0.9
"""Share of candidates inside the axes. The worst ones would flatten the others, so they are at the upper edge."""
NEAR = 1.5
"""Baselines up to this multiple of the lowest perplexity are always inside the axes."""
MOST_MARKED_PAIRS = 24
"""Largest number of pairs for which each has a large marker."""
RULES = ((GREY, "--"), (VERMILION, "-."), (GREEN, ":"))
FOUND: tuple[tuple[str, Dash, str], ...] = ((BLUE, "-", "o"), (BLUE, (0, (1, 1)), "s"))
CANDIDATE = "#9cc3e4"
_Described = tuple[str, list[str]]
"""Caption of a panel, and the parts of its text alternative."""


@dataclass(frozen=True)
class SearchCurve:
    """Measurements of a search.

    Attributes:
        points: one ``(forward passes so far, perplexity)`` per candidate, in order. A perplexity of None is infinite.
        baselines: perplexity by name of at most three rules that need no search. None is infinite.
        target_length: tokens.
    """

    points: Sequence[tuple[int, float | None]]
    baselines: Mapping[str, float | None]
    target_length: int


@dataclass(frozen=True)
class FactorLines:
    """Rescale factors per rotary pair.

    Attributes:
        found: factors ``[pairs]`` by name, one or two lists.
        rules: factors ``[pairs]`` of rules by name, at most three lists.
        periods: period of each pair ``[pairs]`` before scaling, tokens.
        original_length: trained length of the model before its context was extended, tokens.
        critical_pair: first pair with a factor of its own; the factors before it follow from it. None or 0 if every
            pair has one.
    """

    found: Mapping[str, Sequence[float]]
    rules: Mapping[str, Sequence[float]]
    periods: Sequence[float]
    original_length: int
    critical_pair: int | None = None


def search_figure(
    curve: SearchCurve | None = None, lines: FactorLines | None = None, title: str = ""
) -> Figure:
    """Draw the progress of a search, the factors per pair, or both side by side.

    Args:
        curve, lines: panels to draw, at least one.
        title: title above the panels.

    Raises:
        RopewalkError: if there is nothing to draw, or a factor is not finite.
    """
    count = (curve is not None) + (lines is not None)
    if not count:
        raise RopewalkError("a search figure needs curve, lines, or both, got neither")
    panels = canvas(count, count, height=4.1, width=WIDTHS[count])
    found = [
        *([_draw_search(panels[0], curve)] if curve is not None else []),
        *([_draw_factors(panels[-1], lines)] if lines is not None else []),
    ]
    told = (part for _, parts in found for part in parts)
    return complete(panels, title, " ".join(caption for caption, _ in found), told, keys=panels)


def _draw_search(axes: Axes, curve: SearchCurve) -> _Described:
    """Draw the panel of candidates, the best perplexity so far and the baselines."""
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
    # Show most candidates and the near baselines; the rest is drawn at the edge or named in the key.
    top = max([float(np.quantile(y, SHOWN_SHARE, method="lower")), *near, y.min()])
    room = (top / low) ** 0.06
    low, top = low / room, top * room
    inside, best = y <= top, np.minimum.accumulate(y)
    # Candidates with an infinite perplexity took forward passes as well.
    end = max(float(x[-1]), float(curve.points[-1][0]))
    x_words = "forward passes (one candidate on one search row)"
    scale(axes.xaxis, x_words, limits=(0, end), text=style.count_text, most=6, whole=True)
    value_scale(axes.yaxis, f"perplexity at {curve.target_length:,} tokens", low, top, (low, top))
    axes.plot(x[inside], y[inside], label="candidate", **look(CANDIDATE, "", "o", size=3, order=2))
    if not inside.all():
        beyond = look(CANDIDATE, "", "^", size=4, order=2)
        edge = np.full((~inside).sum(), top)
        axes.plot(x[~inside], edge, label="↑ candidate above the axis", clip_on=False, **beyond)
    # Without a baseline, no vertical lines run down to 0 at the two ends.
    best_look = {"color": BLUE, "linewidth": 2, "zorder": 4}
    axes.stairs(best, [*x, end], baseline=None, label="best so far", **best_look)
    # Not strict: there are styles for as many baselines as a figure can have.
    for (name, value), (colour, dash) in zip(baselines.items(), RULES, strict=False):
        words = f"{_named(name)} {_short(value)}{' ↑' if value > top else ''}"
        if value > top:
            # Only in the key: a line would lie outside the axes.
            axes.plot([], [], label=words, **look(colour, dash, width=1.6))
        else:
            rule(axes, value, across=True, colour=colour, dash=dash, width=1.6, name=words, order=3)
    infinite = [name for name, value in curve.baselines.items() if value is None]
    missing = f" Not shown because infinite: {', '.join(map(_named, infinite))}." if infinite else ""
    told = [
        tell("best perplexity so far", x, best, lambda at: f"{at:,.0f} forward passes"),
        *(f"{_named(name)}: perplexity {_short(value)}" for name, value in baselines.items()),
    ]
    caption = (
        f"Perplexity on all search documents of each fully evaluated candidate. The best, {_short(best[-1])}, was "
        f"found after {int(x[int(np.argmin(y))]):,} forward passes.{missing}"
    )
    return caption, told


def _draw_factors(axes: Axes, lines: FactorLines) -> _Described:
    """Draw the panel of factors, with the pairs that complete no turn in training."""
    if not 1 <= len(lines.found) <= len(FOUND) or len(lines.rules) > len(RULES):
        raise RopewalkError(
            f"a figure shows one or two lists of searched factors and at most {len(RULES)} lists of factors by "
            f"rules, got {len(lines.found)} searched and {len(lines.rules)} by rules"
        )
    plotted = {**lines.found, **lines.rules}
    for name, factors in plotted.items():
        check_finite(f"rescale factor of {name!r}", factors)
        if len(factors) != len(lines.periods):
            raise RopewalkError(
                f"{name!r} must have one factor for each of {len(lines.periods)} rotary pairs, got "
                f"{len(factors)}"
            )
    pairs = np.arange(len(lines.periods))
    margin = 0.03 * len(pairs)
    limits = -margin, len(pairs) - 1 + margin
    scale(axes.xaxis, "rotary pair (0 turns fastest)", limits=limits, most=8, whole=True)
    low, high = min(min(each) for each in plotted.values()), max(max(each) for each in plotted.values())
    value_scale(axes.yaxis, "rescale factor λ", low, high)
    for (name, factors), (colour, dash) in zip(lines.rules.items(), RULES, strict=False):
        axes.plot(pairs, factors, label=label(_named(name)), **look(colour, dash, width=1.6))
    size = 5.0 if len(pairs) <= MOST_MARKED_PAIRS else 2.8
    for (name, factors), found in zip(lines.found.items(), FOUND, strict=False):
        axes.plot(pairs, factors, label=label(name), **look(*found, size=size, order=4))
    unseen = np.flatnonzero(np.asarray(lines.periods, dtype=np.float64) > lines.original_length)
    if len(unseen):
        # Periods grow with the index, so one line separates the pairs.
        at = unseen[0] - 0.5
        words = f"period > {length_text(lines.original_length)} →"
        rule(axes, at, words, beside(at > 0.6 * len(pairs)), foot=True)
    derived = ""
    if lines.critical_pair:
        at = lines.critical_pair - 0.5
        # On the left, where the factors found lie lower, if there is room.
        rule(axes, at, f"critical pair {lines.critical_pair}", beside(at > 0.3 * len(pairs)), colour=BLUE)
        derived = " The factors found left of the blue line follow from that of the critical pair."
    told = [
        tell(f"factors {_named(name)}", pairs, each, lambda n: f"pair {n:.0f}")
        for name, each in plotted.items()
    ]
    caption = (
        f"Rescale factors divide the frequencies. The pairs right of the dashed line ({len(unseen)} of {len(pairs)}) "
        f"do not complete a turn within the original {lines.original_length:,} tokens.{derived}"
    )
    return caption, told


def _named(name: str) -> str:
    return {"pi": "PI", "ntk": "NTK", "yarn": "YaRN"}.get(name, name)


def _short(value: float) -> str:
    return f"{value:#.4g}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"
