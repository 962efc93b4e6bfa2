"""Interleaved chunks: the documents of a row are cut, and the parts of all documents shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data.rows.settings import InterleaveSettings

# Third word of the seed, so that no other use of the same seed meets the same random words.
_PURPOSE = 0x696E746C


@dataclass(frozen=True, eq=False)
class Interleaved:
    """A row after interleaving, its anchor and padding left aside.

    Attributes:
        order: int64 ``[sum of lengths]``; at place i stands now the token ``order[i]`` of the row before.
        segment_lengths: tokens of each segment, in storage order.
        segment_documents: the document of each segment, numbered as they came in; neighbours differ.
    """

    order: NDArray[np.int64]
    segment_lengths: list[int]
    segment_documents: list[int]


def interleave(segment_lengths: Sequence[int], settings: InterleaveSettings, row: int) -> Interleaved:
    """Cut documents and shuffle their parts; the order inside each document stays.

    A document of ``min_length`` to ``max_length`` tokens is cut into k parts, k one of ``settings.parts``, at
    distinct whole numbers of tokens between the ``cut_points`` shares of its length; where these are too few,
    into as many parts as they allow. Every arrangement of the parts that keeps the order inside each document
    is as likely. Parts of a document that end up side by side become one segment.

    Args:
        segment_lengths: tokens of each document of the row, in order, all at least 1.
        settings: which documents are cut, where, and the seed.
        row: the row's number, 0 or more; it and the seed decide everything.

    Raises:
        RopewalkError: if a length or the row is out of range.

    Source: AnchorContext, arXiv:2411.13476, "interleaved chunks".
    """
    lengths = [int(length) for length in segment_lengths]
    if not lengths:
        raise RopewalkError("interleaving needs at least one document in the row, got none")
    if min(lengths) < 1:
        raise RopewalkError(f"every document of a row needs at least 1 token, got {min(lengths)}")
    if row < 0:
        raise RopewalkError(f"row must be 0 or more, got {row}")
    random = np.random.Philox(np.random.SeedSequence([settings.seed, row, _PURPOSE]))
    # As many words for each document whatever becomes of it, so that no cut depends on the lengths of others.
    words = random.random_raw(len(lengths) * max(settings.parts)).reshape(len(lengths), -1)
    parts = [_part_lengths(n, settings, own) for n, own in zip(lengths, words.tolist(), strict=True)]
    sizes = np.array([size for own in parts for size in own], np.int64)
    documents = np.repeat(np.arange(len(parts)), [len(own) for own in parts])
    # Sorting by random words is uniform unless two of n agree, which has a chance below n² / 2^65.
    shuffled = documents[np.argsort(random.random_raw(len(sizes)), kind="stable")]
    # Each document's places in ascending order take its parts in their order.
    part_at = np.empty(len(sizes), np.int64)
    part_at[np.argsort(shuffled, kind="stable")] = np.arange(len(sizes))
    return _laid_out(sizes, shuffled, part_at)


def _laid_out(
    sizes: NDArray[np.int64], documents: NDArray[np.int64], part_at: NDArray[np.int64]
) -> Interleaved:
    """The row of parts, ``sizes`` in the order before, ``documents`` and ``part_at`` of each place now."""
    starts = (np.cumsum(sizes) - sizes)[part_at]
    placed = sizes[part_at]
    ends = np.cumsum(placed)
    order = np.repeat(starts - (ends - placed), placed) + np.arange(ends[-1])
    last = np.append(documents[1:] != documents[:-1], True)
    return Interleaved(order, np.diff(ends[last], prepend=0).tolist(), documents[last].tolist())


def _part_lengths(length: int, settings: InterleaveSettings, words: list[int]) -> list[int]:
    """Tokens of each part of one document, from ``max(settings.parts)`` random words."""
    if not settings.min_length <= length <= settings.max_length:
        return [length]
    wanted = settings.parts[_below(len(settings.parts), words[0])]
    low, high = _cut_range(length, settings.cut_points)
    available = max(0, high - low + 1)
    cuts = _distinct(available, min(wanted - 1, available), words[1:])
    bounds = [0, *(low + cut for cut in cuts), length]
    return [end - start for start, end in pairwise(bounds)]


def _cut_range(length: int, shares: tuple[float, float]) -> tuple[int, int]:
    """The first and last place that a cut may have, neither part empty; the last is less if there is none.

    Shares are taken as the decimals that they are written as: 0.29 of 100 tokens are 29, not 28.999….
    """
    (low, low_of), (high, high_of) = map(_ratio, shares)
    return max(1, -(-low * length // low_of)), min(length - 1, high * length // high_of)


@cache
def _ratio(share: float) -> tuple[int, int]:
    """A share as numerator and denominator; reading a decimal takes longer than all else that a document needs."""
    return Fraction(str(float(share))).as_integer_ratio()


def _distinct(population: int, count: int, words: list[int]) -> list[int]:
    """``count`` of the numbers below ``population``, each set as likely, in ascending order.

    Source: R. Floyd, in J. Bentley, "Programming Pearls: A Sample of Brilliance", CACM 30(9), 1987.
    """
    chosen: set[int] = set()
    for top, word in zip(range(population - count, population), words, strict=False):
        number = _below(top + 1, word)
        chosen.add(top if number in chosen else number)
    return sorted(chosen)


def _below(limit: int, word: int) -> int:
    """A number below ``limit`` from a random word; no chance is off by more than 2^-64."""
    return (word * limit) >> 64
