"""The picture of the bases that reach a context length, with the holes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.markers import CARETUP
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ropewalk.errors import RopewalkError
from ropewalk.reporting.figures import COLOURS, FILLS, INK, new_figure, save_figure
from ropewalk.reporting.rope_axes import (
    MOST_LENGTH_TICKS,
    Floats,
    add_caption,
    add_key,
    check_finite,
    fix_ticks,
    length_axis,
)

BLUE, VERMILION = COLOURS[1], COLOURS[2]
PIXELS = 500
"""About the height of the axes."""
RASTERISED_BANDS = 1000
"""Intervals from which the bands of an SVG are an image inside it."""


def feasible_bases_figure(
    lengths: Sequence[int],
    feasible: Sequence[Sequence[tuple[float, float]]],
    safe_bases: Sequence[float | None],
    published: Mapping[int, float],
    path: Path,
    ceiling: float,
    title: str = "",
    caption: str | None = None,
) -> None:
    """Base against context length: a column of feasible bands a length, with the holes left blank.

    Args:
        lengths: ``[n]`` tokens, rising.
        feasible: ``[n]`` lists of intervals ``(low, high)`` of bases in rising order; a list may be empty.
        safe_bases: ``[n]`` bases from which all are feasible up to the ceiling; None where there is none.
        published: bases by length, marked with a cross; may be empty.
        ceiling: largest base that was looked at.
    """
    _check_bands(lengths, feasible, safe_bases, published, ceiling)
    figure, axes = new_figure(title, "context length (tokens)", "RoPE base")
    at = np.log2([*lengths])
    half = min(0.3, 0.36 * float(np.diff(at).min())) if len(at) > 1 else 0.3
    polygons = band_polygons(lengths, feasible, half)
    lowest = min([polygons[..., 1].min(), *published.values()]) / 3
    highest = 2 * max([ceiling, *published.values()])
    longest, shortest = max([*lengths, *published]), min([*lengths, *published])
    base_axis(axes, lowest, highest)
    length_axis(axes.xaxis, shortest, longest)
    if len(lengths) <= MOST_LENGTH_TICKS:
        fix_ticks(axes.xaxis, lengths)
    # Room beside a single column, or it would be as wide as the figure.
    room = 2.0 ** (0.6 if longest > shortest else 2)
    axes.set_xlim(shortest / room, longest * room)
    # Without snapping, a band thinner than a pixel is pale instead of gone.
    bands = PolyCollection(list(polygons), facecolors=FILLS[1], edgecolors="none", linewidths=0, snap=False)
    bands.set_rasterized(len(polygons) > RASTERISED_BANDS)
    axes.add_collection(bands, autolim=False)
    axes.axhline(ceiling, color=INK, linestyle=(0, (2, 2)), linewidth=1)
    _feasible_marks(axes, lengths, feasible, safe_bases, published)
    handles, labels = axes.get_legend_handles_labels()
    add_key(figure, [Patch(facecolor=FILLS[1]), *handles], ["feasible bases", *labels])
    narrow = polygons[:, 2, 1] < polygons[:, 0, 1] * (highest / lowest) ** (1 / PIXELS)
    pale = " (paler where bands and holes are too narrow to tell apart)" if narrow.any() else ""
    add_caption(
        figure,
        caption
        or f"Filled: bases whose margin B(m) is nowhere negative up to the context length{pale}; blank gaps in a "
        f"column are holes. From the safe base up to {base_text(ceiling)} (dashed), the largest base examined, "
        "there is no hole.",
        4.6,
    )
    save_figure(figure, path)


def band_polygons(
    lengths: Sequence[int], feasible: Sequence[Sequence[tuple[float, float]]], half_octaves: float
) -> Floats:
    """Corners ``[n, 4, 2]`` (length, base) of one rectangle an interval, ``half_octaves`` to either side."""
    sides = 2.0**half_octaves
    corners = [
        [(left, low), (right, low), (right, high), (left, high)]
        for length, bands in zip(lengths, feasible, strict=True)
        for left, right in [(length / sides, length * sides)]
        for low, high in bands
    ]
    return np.array(corners, dtype=np.float64).reshape(-1, 4, 2)


def base_text(base: float) -> str:
    """``1e4``, ``5e5``, ``1.25e6``: a base with up to three digits."""
    digits, exponent = f"{base:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def base_axis(axes: Any, low: float, high: float) -> None:
    """A vertical logarithmic axis of bases."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: base_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _check_bands(
    lengths: Sequence[int],
    feasible: Sequence[Sequence[tuple[float, float]]],
    safe_bases: Sequence[float | None],
    published: Mapping[int, float],
    ceiling: float,
) -> None:
    if not any(len(bands) for bands in feasible):
        raise RopewalkError("there is no feasible base to draw")
    if not len(lengths) == len(feasible) == len(safe_bases):
        raise RopewalkError(
            f"{len(lengths)} lengths, {len(feasible)} lists of intervals and {len(safe_bases)} safe bases do not match"
        )
    safe = [base for base in safe_bases if base is not None]
    ends = np.array([ends for bands in feasible for ends in bands], dtype=np.float64)
    check_finite(
        "the set of feasible bases", lengths, ends, safe, [*published], [*published.values()], ceiling
    )
    if min(lengths) < 1 or (np.diff(lengths) <= 0).any():
        raise RopewalkError("lengths of feasible bases must be positive and rise")
    if (ends[:, 0] > ends[:, 1]).any() or min(
        ends.min(), ceiling, *safe, *published, *published.values()
    ) <= 0:
        raise RopewalkError("feasible bases must be intervals (low, high) of positive numbers")


def _feasible_marks(
    axes: Any,
    lengths: Sequence[int],
    feasible: Sequence[Sequence[tuple[float, float]]],
    safe_bases: Sequence[float | None],
    published: Mapping[int, float],
) -> None:
    safe = [np.nan if base is None else base for base in safe_bases]
    axes.plot(lengths, safe, "-D", color=BLUE, linewidth=1.4, markersize=5, label="safe base")
    infima = {length: bands[0][0] for length, bands in zip(lengths, feasible, strict=True) if bands}
    axes.plot(
        [*infima],
        [*infima.values()],
        marker=CARETUP,
        linestyle="none",
        color=INK,
        markersize=7,
        zorder=3,
        label="infimum",
    )
    if published:
        axes.plot(
            [*published],
            [*published.values()],
            "x",
            color=VERMILION,
            markersize=8,
            markeredgewidth=2,
            label="published",
        )
