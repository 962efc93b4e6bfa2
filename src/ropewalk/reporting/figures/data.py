"""Draw the document lengths of each source of a corpus, before and after a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.reporting.data_tables import source_name
from ropewalk.reporting.figures.drawing import Figure, boxes, canvas, complete, heading, scale, series_area
from ropewalk.reporting.figures.prepare import Floats, length_ticks, named
from ropewalk.reporting.style import length_text, percent_text, share_text, tokens_text

MOST_PANELS = 8
"""Largest number of panels. If there are more sources, the smallest share the last panel."""
COLUMNS = 2
PANEL_INCHES = 1.8
LEAST_INCHES = 2.6
FRAME_INCHES = 0.4
INTERVALS = 12
"""Largest number of intervals between ticks that fit across the whole figure."""
HEAD_ROOM = 1.42
"""Height of a panel relative to its highest bar, which leaves room for a two-line heading."""

Bins = Sequence[tuple[int, int, float]]
"""``(start, end, tokens)``: tokens of the documents whose length is at least start and less than end."""


@dataclass(frozen=True)
class SourceLengths:
    """Document lengths of one source, before or after a mixture.

    Attributes:
        bins: tokens by document length. Each bin starts and ends at a power of two.
        token_ratio: this source's share of all tokens, from 0 to 1.
    """

    bins: Bins
    token_ratio: float


_Panel = tuple[str, list[SourceLengths | None]]
"""Name of a source, and its document lengths in each state."""


def source_lengths(report: Mapping[str, Any]) -> dict[str, SourceLengths]:
    """Convert the output of ``ropewalk data stats --json`` for :func:`length_figure`."""
    return {
        name: SourceLengths(
            [(each["start"], each["end"], each["tokens"]) for each in source["histogram"]],
            source["token_ratio"],
        )
        for name, source in report["sources"].items()
    }


def length_figure(
    states: Mapping[str, Mapping[str, SourceLengths]], title: str = "", caption: str = ""
) -> Figure:
    """Draw the length distribution of each source as bars, one panel per source, with up to two states side by side.

    Bars are shares of the source's own tokens in that state. They add up to 100 % in each panel, so small sources are
    as readable as large ones. The heading of a panel gives the source's share of all tokens.

    Args:
        states: document lengths of each source by the name of one or two states, such as ``before`` and ``after``.
        title: title above the panels.
        caption: caption below the panels.

    Raises:
        RopewalkError: if there are no tokens to draw, or more than two states.

    Source: after figure 8 of arXiv:2411.13476.
    """
    if not 1 <= len(states) <= 2:
        raise RopewalkError(
            "a figure of document lengths shows one or two states, such as before and after, got "
            f"{len(states)}"
        )
    sources = _sources(states)
    if not sources:
        raise RopewalkError("the sources have no tokens, so there are no document lengths to draw")
    columns = min(COLUMNS, len(sources))
    low, high = _powers(sources)
    bars = [[_shares(state, low, high) for state in each] for _, each in sources]
    highest = max(float(shares.max()) for each in bars for shares in each)
    # Rounded up, so that no more than INTERVALS fit across the figure.
    step = max(1, -(-(high - low) // (INTERVALS // columns)))
    # Counted down, so that the upper end always has a tick.
    powers = range(high, low - 1, -step)
    ticks = [(power, length_ticks([2.0**power])[0][1]) for power in powers]
    height = FRAME_INCHES + max(PANEL_INCHES * -(-len(sources) // columns), LEAST_INCHES)
    panels = canvas(len(sources), columns, height=height, shared=True)
    for axes, (name, each), states_bars in zip(panels, sources, bars, strict=True):
        # A bin spans one unit of the axis, whose values are exponents of two.
        scale(axes.xaxis, "document length (tokens)", limits=(low, high), ticks=ticks)
        scale(axes.yaxis, limits=(0, HEAD_ROOM * highest), text=percent_text, most=4)
        width = 0.84 / len(each)
        for number, shares in enumerate(states_bars):
            left = np.arange(low, high) + 0.08 + number * width
            options = series_area(number, len(each))
            boxes(axes, left, left + width, 0, shares, options, named(states, number))
        # Two states read as "before → after".
        ratios = " → ".join(share_text(state.token_ratio if state else 0.0) for state in each)
        heading(axes, name, f"{ratios} of tokens")
    told = (_told(name, each, states) for name, each in sources)
    # One key is enough, because it is the same in all panels.
    return complete(panels, title, caption, told, keys=panels[:1], y_label="share of the source's tokens")


def _told(name: str, each: Sequence[SourceLengths | None], states: Mapping[str, Any]) -> str:
    """Where the tokens of a source lie, for a text alternative."""
    words = []
    for state_name, state in zip(states, each, strict=True):
        found = [] if state is None else [(start, end, tokens) for start, end, tokens in state.bins if tokens]
        if not found:
            words.append(f"{state_name} none")
            continue
        start, end, most = max(found, key=lambda bin: bin[2])
        share = share_text(most / sum(tokens for *_, tokens in found))
        words.append(
            f"{state_name} documents of {length_text(found[0][0])} to {tokens_text(found[-1][1])}, most of the tokens "
            f"({share}) in those of {length_text(start)} to {tokens_text(end)}"
        )
    return f"{name}: {', '.join(words)}"


def _sources(states: Mapping[str, Mapping[str, SourceLengths]]) -> list[_Panel]:
    """Names and lengths of the sources in each state, largest first. The smallest sources are combined."""
    ratios: dict[str, float] = {}
    for state in states.values():
        for name, each in state.items():
            if any(tokens for _, _, tokens in each.bins):
                # A source may be large in one of the states alone.
                ratios[name] = max(ratios.get(name, 0.0), each.token_ratio)
    # By size, so that the sources folded into the last panel are the smallest; by name for a stable order.
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


def _together(sources: Sequence[SourceLengths]) -> SourceLengths | None:
    if not sources:
        return None
    tokens: dict[tuple[int, int], float] = {}
    for each in sources:
        for start, end, count in each.bins:
            tokens[start, end] = tokens.get((start, end), 0) + count
    bins = [(start, end, count) for (start, end), count in sorted(tokens.items())]
    return SourceLengths(bins, sum(each.token_ratio for each in sources))


def _powers(panels: Sequence[_Panel]) -> tuple[int, int]:
    """Exponents of two of the start of the first and the end of the last non-empty bin, over all panels."""
    starts = [
        start for _, each in panels for state in each if state for start, _, tokens in state.bins if tokens
    ]
    # The bit length of a power of two is its exponent plus 1; the last bin ends one power above its start.
    return max(min(starts), 1).bit_length() - 1, max(starts).bit_length()


def _shares(state: SourceLengths | None, low: int, high: int) -> Floats:
    """Share of a source's tokens in each bin from ``2**low`` to ``2**high`` tokens."""
    shares = np.zeros(high - low)
    for start, _, tokens in state.bins if state is not None else ():
        if tokens:
            # Bins are powers of two, so the bit length of a bin's start is its column.
            shares[start.bit_length() - 1 - low] += tokens
    found: Floats = shares / (shares.sum() or 1.0)
    return found
