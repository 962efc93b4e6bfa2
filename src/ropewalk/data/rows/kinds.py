"""Rows of short and of long documents in one training: how many of each there are, and how short rows are packed."""

from __future__ import annotations

from fractions import Fraction

from ropewalk.data.settings import PackingSettings


def short_rows_of(share: float, rows: int) -> int:
    """Number of rows of short documents among the first ``rows`` rows of a training, rounded down."""
    # The share as written in decimal: 0.29 of 100 rows are 29, whereas the nearest float64 gives 28.999….
    return int(rows * Fraction(str(share)))


def short_kind(settings: PackingSettings, length: int, bos: str) -> PackingSettings:
    """Settings of rows of short documents: each is as alone in its row.

    Args:
        settings: those of the rows of long documents.
        length: most tokens of a short document.
        bos: the policy of rows without an anchor.
    """
    values = {
        **dict(settings),
        "pattern": "intra_document",
        "positions": "reset",
        "bos": bos,
        "anchor_token": None,
        "documents_up_to": length,
        "documents_above": None,
    }
    return PackingSettings.model_validate(values)


def long_kind(settings: PackingSettings, length: int) -> PackingSettings:
    """Settings of the rows of all longer documents."""
    return settings.model_copy(update={"documents_above": length})
