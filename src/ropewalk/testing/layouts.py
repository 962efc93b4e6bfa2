"""Random packed layouts for property tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ropewalk.attention.layout import PATTERNS, POSITIONS, PackedLayout


def cut_row(total: int, documents: int, rng: random.Random) -> list[int]:
    """Lengths of ``documents`` documents, at least 1 token each, that add up to ``total``."""
    documents = min(documents, total)
    cuts = sorted(rng.sample(range(1, total), documents - 1))
    return [after - before for before, after in zip([0, *cuts], [*cuts, total], strict=True)]


def random_layout(
    total: int,
    rng: random.Random,
    max_documents: int = 8,
    patterns: Sequence[str] = PATTERNS,
    interleaved: bool = False,
    max_anchor: int = 1,
) -> PackedLayout:
    """A random layout of a row of ``total`` tokens, the anchor included.

    Args:
        total: tokens of the row, more than ``max_anchor``.
        rng: source of randomness; the same state gives the same layout.
        max_documents: at most this many documents (or segments).
        patterns: patterns to choose from.
        interleaved: whether segments may share documents in any order.
        max_anchor: longest anchor.
    """
    anchor = rng.randint(0, max_anchor)
    lengths = cut_row(total - anchor, rng.randint(1, max_documents), rng)
    documents = list(range(len(lengths)))
    if interleaved:
        documents = [rng.randrange(max(1, len(lengths) // 2)) for _ in lengths]
    pattern, positions = rng.choice(list(patterns)), rng.choice(list(POSITIONS))
    return PackedLayout.from_segments(lengths, documents, pattern, anchor, positions)  # type: ignore[arg-type]
