"""The house style: colours that can be told apart in grey, marks, sizes, and how numbers are written.

Plain values, no library for drawing: figures choose from them, and ``drawing`` draws.
"""

from __future__ import annotations

import math

from ropewalk.io.lengths import format_length, parse_length

WIDTH_INCHES = 7.2
HEIGHT_INCHES = 4.2
"""Of the panels of a figure; title, key and caption come on top."""
DPI = 160
TITLE_CHARACTERS = 80
CAPTION_CHARACTERS = 110
KEY_CHARACTERS = 44
NAME_CHARACTERS = 30
"""Width of the name of a row."""
PANEL_CHARACTERS = 24
"""Width of a label beside a line's end, and of the title of a small panel."""

# Okabe and Ito's palette: told apart by readers with any colour vision, and by lightness in grey.
GREY, BLUE, VERMILION, GREEN = COLOURS = ("#7a7a7a", "#0b4f8a", "#d55e00", "#009e73")
LINE_COLOURS = (BLUE, VERMILION, GREEN, GREY, "#8a4b8f", "#111111", "#a6761d", "#3f7f93")
DASHES = ("--", "-", "-.", ":")
LINE_DASHES = ("-", "--", "-.", ":")
HATCHES = ("///", "", "...", "xxx")
BAR_HATCHES = ("", "///", "...", "xxx")
FILLS = ("white", "#9cc3e4", "white", "white")
"""Light enough for an interval to be seen on a bar."""
MARKERS = ("s", "o", "^", "D")
LINE_MARKERS = ("o", "^", "D", "s", "v", "P", "X", "*")
CARET_LEFT, CARET_UP = 4, 6
"""Marks whose tip is the point."""
INK = "#333333"
FAINT = "#dddddd"
SHADE = "#e9eef3"
"""Lighter than every line and mark that may lie on it."""
BAND_ALPHA = 0.18
DOTTED = (0, (2, 2))
LONG_DASHED = (0, (4, 3))

MISSING = "–"
MOST_SERIES = len(COLOURS)
MOST_LINES = len(LINE_MARKERS)
LOG_RATIO = 8
"""Largest over smallest from which an axis is logarithmic."""
CLIP = 1e-6
"""Values below this part of the largest are not worth an axis that reaches them."""


def length_text(tokens: float) -> str:
    """``128k``, ``1.5k`` or ``1M`` where that is short and exact, ``5,437`` otherwise; ``1k`` is 1024 tokens."""
    whole = round(tokens)
    halves = f"{whole / 1024:g}k"
    if 1024 <= whole < 2**20 and len(halves) <= 5 and parse_length(halves) == whole:
        return halves
    short = format_length(whole)
    return f"{whole:,}" if short.isdigit() else short


def shift_text(tokens: float) -> str:
    """``16``, ``1k`` for 1000, ``2.5M``; what is not short so is written out."""
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if tokens >= unit and len(text := f"{tokens / unit:.10g}") <= 4:
            return f"{text}{name}"
    return f"{tokens:,.0f}"


def base_text(base: float) -> str:
    """``1e4``, ``5e5``, ``1.25e6``: a base with up to three digits."""
    digits, exponent = f"{base:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def number_text(value: float) -> str:
    """Three digits: ``0``, ``0.00026``, ``11.4``, ``1,234``, ``1e-12``."""
    if value == 0 or 1e-4 <= value < 1000:
        return f"{value:.3g}"
    if 1000 <= value < 1e6:
        return f"{value:,.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def tick_text(value: float) -> str:
    """A number at a tick as it is: ``0.05``, ``20,000``, ``1e+06``."""
    return f"{value:,.6g}" if value < 1e6 else f"{value:.0e}"


def count_text(value: float) -> str:
    """A whole number: ``12,000``."""
    return f"{value:,.0f}"


def share_text(share: float | None) -> str:
    """A share from 0 to 1 as ``12.3 %``; what is more than nothing never reads as nothing."""
    if share is None or math.isnan(share):
        return MISSING
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def percent_text(share: float) -> str:
    """A share at a tick: ``25 %``, ``2.5 %``."""
    return f"{100 * share:.3g} %"
