"""Style of all figures: colours that stay distinct in greyscale, markers, sizes, and number formats.

Imports no plotting library: figures choose from these values.
"""

from __future__ import annotations

import math

from ropewalk.io.lengths import format_length, parse_length

WIDTH_INCHES = 7.2
HEIGHT_INCHES = 4.2
"""Height of the panels of a figure; title, key and caption add to it."""
DPI = 160
TITLE_CHARACTERS = 80
CAPTION_CHARACTERS = 110
KEY_CHARACTERS = 44
NAME_CHARACTERS = 30
"""Width in characters of a row's name."""
PANEL_CHARACTERS = 24
"""Width in characters of a label at a line's end, and of a small panel's title."""

# Darkened from Okabe and Ito's palette: distinct for readers with any colour vision, and by lightness in grey.
GREY, BLUE, VERMILION, GREEN = COLOURS = ("#7a7a7a", "#0b4f8a", "#d55e00", "#009e73")
LINE_COLOURS = (BLUE, VERMILION, GREEN, GREY, "#8a4b8f", "#111111", "#a6761d", "#3f7f93")
LINE_DASHES = ("-", "--", "-.", ":")
HATCHES = ("///", "", "...", "xxx")
BAR_HATCHES = ("", "///", "...", "xxx")
FILLS = ("white", "#9cc3e4", "white", "white")
"""Light enough for an error bar to be visible on a bar."""
LINE_MARKERS = ("o", "^", "D", "s", "v", "P", "X", "*")
SERIES = (
    (GREY, "--", "s"),
    (BLUE, "-", "o"),
    (VERMILION, "-.", "^"),
    (GREEN, ":", "D"),
    (LINE_COLOURS[4], (0, (8, 2)), "v"),
    (LINE_COLOURS[5], (0, (1, 4)), "P"),
    (LINE_COLOURS[6], (0, (6, 1.5, 1, 1.5, 1, 1.5)), "X"),
    (LINE_COLOURS[7], (0, (2.5, 1.2)), "*"),
)
"""Colour, dash and marker of each line of one figure; none of them occurs twice."""
CARET_LEFT, CARET_UP = 4, 6
"""Markers whose tip is at the point."""
INK = "#333333"
FAINT = "#dddddd"
SHADE = "#e9eef3"
"""Lighter than every line and marker drawn on it."""
BAND_ALPHA = 0.18
DOTTED = (0, (2, 2))
LONG_DASHED = (0, (4, 3))

MISSING = "–"
MOST_SERIES = len(COLOURS)
MOST_LINES = len(LINE_MARKERS)
LOG_RATIO = 8
"""Smallest ratio of the largest to the smallest value for which an axis is logarithmic."""
CLIP = 1e-6
"""A logarithmic axis does not extend to values below this share of the largest."""


def length_text(tokens: float) -> str:
    """Format a length: ``128k``, ``1.5k`` or ``1M`` if that is short and exact, else ``5,437``. ``1k`` is 1024."""
    whole = round(tokens)
    halves = f"{whole / 1024:g}k"
    if 1024 <= whole < 2**20 and len(halves) <= 5 and parse_length(halves) == whole:
        return halves
    short = format_length(whole)
    return f"{whole:,}" if short.isdigit() else short


def tokens_text(tokens: float) -> str:
    """Format a length with its unit: ``128k tokens``, ``5,437 tokens``."""
    return f"{length_text(tokens)} token{'' if tokens == 1 else 's'}"


def shift_text(tokens: float) -> str:
    """Format a position shift: ``16``, ``1k`` for 1000, ``2.5M``; written out if that is not exact and short."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if tokens >= unit and len(text := f"{tokens / unit:.10g}") <= 4:
            return f"{text}{name}"
    return f"{tokens:,.0f}"


def base_text(base: float) -> str:
    """Format a base with up to three digits: ``1e4``, ``5e5``, ``1.25e6``."""
    digits, exponent = f"{base:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def number_text(value: float) -> str:
    """Format a number with about three digits: ``0``, ``0.00026``, ``11.4``, ``1,234``, ``1e-12``."""
    if value == 0 or 1e-4 <= abs(value) < 1000:
        return f"{value:.3g}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def tick_text(value: float) -> str:
    """Format a tick's number without rounding: ``0.05``, ``20,000``, ``1e+06``."""
    return f"{value:,.6g}" if value < 1e6 else f"{value:.0e}"


def count_text(value: float) -> str:
    """Format an integer: ``12,000``."""
    return f"{value:,.0f}"


def share_text(share: float | None) -> str:
    """Format a share from 0 to 1 as ``12.3 %``. A positive share never appears as 0; None and NaN are a dash."""
    if share is None or math.isnan(share):
        return MISSING
    # From 0.0005 on, one decimal gives 0.1 % or more.
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def percent_text(share: float) -> str:
    """Format a share at a tick: ``25 %``, ``2.5 %``."""
    return f"{100 * share:.3g} %"
