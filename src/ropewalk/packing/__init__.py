"""Documents to packed rows: the layout that every other room reads."""

from ropewalk.packing.layout import NO_DOCUMENT, PATTERNS, POSITIONS, PackedLayout, Pattern, Positions
from ropewalk.packing.row import IGNORED, Row, next_token_labels

__all__ = [
    "IGNORED",
    "NO_DOCUMENT",
    "PATTERNS",
    "POSITIONS",
    "PackedLayout",
    "Pattern",
    "Positions",
    "Row",
    "next_token_labels",
]
