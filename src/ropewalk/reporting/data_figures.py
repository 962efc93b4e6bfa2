"""Pictures of a corpus: how long the documents of each source are, and what a mixture made of that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ropewalk.errors import RopewalkError
from ropewalk.reporting.data_tables import share_text, source_name
from ropewalk.reporting.evaluation_figures import key_above
from ropewalk.reporting.figures import COLOURS, FILLS, HATCHES, INK, dress_axes, save_figure
from ropewalk.reporting.precision_axes import audit_figure, finish
from ropewalk.reporting.rope_axes import PAPER, length_text, shown_name

MOST_PANELS = 8
"""Sources with panels of their own; the smaller ones share the last."""
COLUMNS = 2
PANEL_INCHES = 1.8
LEAST_INCHES = 2.6
FRAME_INCHES = 0.6
INTERVALS = 12
"""Most intervals between ticks that fit across the whole figure."""
NAME_INCHES = 5.4
"""Room for the names of panels across the whole figure."""
HEAD_ROOM = 1.42
"""Height of a panel over its highest bar, so that two lines have a place above them."""
BOXES = "A box stands for a character that the font of this picture does not have."

Bins = Sequence[tuple[int, int, float]]
"""Lengths from the first to less than the second, and the tokens of the documents of these lengths."""


@dataclass(frozen=True)
class SourceLengths:
    """Lengths of one source's documents in one state of the data.

    Attributes:
        bins: tokens by length; each bin begins and ends at a power of two.
        token_ratio: share of all tokens that are this source's, from 0 to 1.
    """

    bins: Bins
    token_ratio: float


_Panel = tuple[str, list[SourceLengths | None]]
"""The name of a source, and its lengths in each state."""


def source_lengths(report: Mapping[str, Any]) -> dict[str, SourceLengths]:
    """What ``ropewalk data stats --json`` says of each source, for :func:`length_figure`."""
    return {
        name: SourceLengths(
            [(each["start"], each["end"], each["tokens"]) for each in source["histogram"]],
            source["token_ratio"],
        )
        for name, source in report["sources"].items()
    }


def length_figure(
    states: Mapping[str, Mapping[str, SourceLengths]], path: Path, title: str = "", caption: str = ""
) -> None:
    """Length distribution of each source as bars, a panel a source; two states side by side in each bin.

    Bars are shares of the source's own tokens in that state, so that they add up to 100 % in each panel, and
    a small source can be read as well as a large one; its share of all tokens stands above it. A name that is
    wider than its panel loses its middle.

    Args:
        states: by a short name, such as ``before`` and ``after``, the lengths of each source; one or two.
        path: ``.png`` or ``.svg``; complete or not written at all.
        title: above the panels.
        caption: below them.

    Raises:
        RopewalkError: if there is no token to draw, there are more than two states, or the suffix is
            another.

    Source: after figure 8 of arXiv:2411.13476.
    """
    if not 1 <= len(states) <= 2:
        raise RopewalkError(f"a figure of lengths shows one or two states, got {len(states)}")
    panels = _panels(states)
    if not panels:
        raise RopewalkError("there is no token to draw lengths of")
    if _font_lacks(name for name, _ in panels):
        caption = f"{caption} {BOXES}".strip()
    with warnings.catch_warnings():
        # The caption says it; a warning would print lines of code.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
        save_figure(_drawn(panels, list(states), title, caption), path)


def _drawn(panels: Sequence[_Panel], states: Sequence[str], title: str, caption: str) -> Any:
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, (first,) = audit_figure(title, [("", "")])
    first.remove()
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    low, high = _range(panels)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_visible(False)
            continue
        # A panel without another below it has the lengths written out.
        lowest = number + columns >= len(panels)
        dress_axes(axes, "document length (tokens)" if lowest else "", "")
        _bars(axes, panels[number][1], low, high)
        _length_ticks(axes, low, high, INTERVALS // columns)
        _heading(figure, axes, *panels[number], NAME_INCHES / columns)
        axes.tick_params(axis="x", labelbottom=lowest)
    grid[0, 0].set_ylim(0, HEAD_ROOM * max(axes.dataLim.y1 for axes in grid.flat[: len(panels)]))
    figure.supylabel("share of the source's tokens", fontsize=10, color=INK)
    names = [shown_name(name) for name in states]
    handles = [Patch(**_look(number, len(names)), label=name) for number, name in enumerate(names)]
    key_inches = key_above(figure, grid[0, 0], handles) if len(names) > 1 else 0.0
    finish(figure, caption, FRAME_INCHES + max(PANEL_INCHES * rows, LEAST_INCHES) + key_inches)
    return figure


def _panels(states: Mapping[str, Mapping[str, SourceLengths]]) -> list[_Panel]:
    """Names and lengths in each state, the source with most tokens first; the smallest ones together."""
    ratios: dict[str, float] = {}
    for state in states.values():
        for name, each in state.items():
            if any(tokens for _, _, tokens in each.bins):
                ratios[name] = max(ratios.get(name, 0.0), each.token_ratio)
    names = sorted(ratios, key=lambda name: (-ratios[name], name))
    own = names if len(names) <= MOST_PANELS else names[: MOST_PANELS - 1]
    panels: list[_Panel] = [
        (source_name(name), [state.get(name) for state in states.values()]) for name in own
    ]
    others = names[len(own) :]
    if others:
        together = [_together([state[n] for n in others if n in state]) for state in states.values()]
        panels.append((f"{len(others)} other sources", together))
    return panels


def _font_lacks(names: Iterable[str]) -> bool:
    """Whether a name has a character that none of matplotlib's fonts can draw."""
    # Each entry of font.family is one font, and stands in for the ones before it.
    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in rcParams["font.family"]]
    drawable = {code for font in fonts for code in font.get_charmap()}
    return not drawable.issuperset(map(ord, "".join(names)))


def _together(sources: Sequence[SourceLengths]) -> SourceLengths | None:
    if not sources:
        return None
    tokens: dict[tuple[int, int], float] = {}
    for each in sources:
        for start, end, count in each.bins:
            tokens[start, end] = tokens.get((start, end), 0) + count
    bins = [(start, end, count) for (start, end), count in sorted(tokens.items())]
    return SourceLengths(bins, sum(each.token_ratio for each in sources))


def _range(panels: Sequence[_Panel]) -> tuple[int, int]:
    """Powers of two of the first and after the last bin that has a token, over all panels."""
    drawn = [
        start for _, each in panels for state in each if state for start, _, tokens in state.bins if tokens
    ]
    return max(min(drawn), 1).bit_length() - 1, max(drawn).bit_length()


def _bars(axes: Any, states: Sequence[SourceLengths | None], low: int, high: int) -> None:
    width = 0.84 / len(states)
    for number, state in enumerate(states):
        shares = np.zeros(high - low)
        if state is not None:
            for start, _, tokens in state.bins:
                if tokens:
                    shares[start.bit_length() - 1 - low] += tokens
            shares /= shares.sum() or 1.0
        # Bins lie from power to power: each bar stands inside its own.
        left = np.arange(low, high) + 0.08 + number * width
        axes.bar(left, shares, width, align="edge", **_look(number, len(states)))


def _length_ticks(axes: Any, low: int, high: int, intervals: int) -> None:
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(range(high, low - 1, -max(1, -(-(high - low) // intervals)))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: length_text(2.0**power)))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))


def _heading(
    figure: Any, axes: Any, name: str, states: Sequence[SourceLengths | None], room_inches: float
) -> None:
    """The source's name, and below it its shares of all tokens: a name that is read from right to left has a
    line of its own, and turns nothing else around."""
    text = axes.annotate(
        name,
        (0, 1),
        xycoords="axes fraction",
        xytext=(5, -3),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=INK,
        parse_math=False,
        bbox=PAPER,
    )
    # The layout would make panels narrower for words that are wide.
    text.set_in_layout(False)
    renderer = figure.canvas.get_renderer()
    for kept in range(len(name) - 1, 1, -1):
        if text.get_window_extent(renderer).width <= room_inches * figure.dpi:
            break
        text.set_text(f"{name[: kept - kept // 2]}…{name[len(name) - kept // 2 :]}")
    told = " → ".join(share_text(state.token_ratio if state else 0.0) for state in states)
    text.set_text(f"{text.get_text()}\n{told} of tokens")


def _look(number: int, count: int) -> dict[str, Any]:
    """Before: white with grey hatching; after, or alone: plain blue."""
    number = 1 if count == 1 else number
    return {"facecolor": FILLS[number], "edgecolor": COLOURS[number], "hatch": HATCHES[number]}
