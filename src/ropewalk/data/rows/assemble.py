"""Assemble planned rows into token ids, a range of rows at a time; the range does not change any row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.rows.plan import Pieces, RowPlan, plan_rows
from ropewalk.data.rows.special_tokens import AddedTokens, DocumentEnds, PackingCounts, add_special_tokens
from ropewalk.data.settings import PackingSettings
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data.settings import InterleaveSettings


PADDING = -1
"""Document number of the padding at a row's end."""
PADDING_SOURCE = ""


class Tokens(Protocol):
    """Provides the documents' own tokens."""

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with own tokens of document ``number``, from its token ``first`` on."""
        ...


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row as plain values, before it becomes tensors.

    Attributes:
        input_ids: int32 ``[context]``.
        segment_lengths: tokens of each segment; the anchor stands before the first and is not counted.
        segment_documents: the document of each segment, numbered from 0 in the row.
        sources: the source of each document in the row; the padding comes last, with an empty name.
        numbers: the number of each document in the corpus, PADDING likewise.
        masked: start, stop, start, stop, … of the tokens that are never targets: tags and padding.
    """

    input_ids: NDArray[np.int32]
    segment_lengths: list[int]
    segment_documents: list[int]
    sources: list[str]
    numbers: list[int]
    masked: list[int]


@dataclass(frozen=True, eq=False)
class Packed:
    """A sequence of documents with their special tokens, planned into rows; everything but the tokens themselves.

    Attributes:
        documents: int64, the number of each document in the corpus, in the order of the sequence.
        source_ids: int32, its source.
        sources: the sources' names, by id.
        added: what is added to each and left out of it.
        plan: which piece of which document lies in which row; items count the sequence.
        settings: the policies.
        special: the tokenizer's special tokens.
        tags: the tag of each source; None puts none.
    """

    documents: NDArray[np.int64]
    source_ids: NDArray[np.int32]
    sources: Sequence[str]
    added: AddedTokens
    plan: RowPlan
    settings: PackingSettings
    special: SpecialTokens
    tags: Sequence[NDArray[np.int32]] | None

    @property
    def num_rows(self) -> int:
        return len(self.plan.padding)

    def counts(self, ends: DocumentEnds) -> PackingCounts:
        """Where every token went; ``ends`` as it was packed."""
        added, plan, rows = self.added, self.plan, self.num_rows
        begun = rows if self.settings.bos_policy(self.special) == "row" else 0
        skipped = added.long & (added.own_lengths == 0)
        skipped_bos = int(added.own_starts[skipped].sum())
        return PackingCounts(
            documents=len(self.documents),
            tokens_in=int(ends.lengths.sum()),
            document_tokens=int(added.own_lengths.sum()),
            bos_tokens=int(added.bos.sum()) + begun,
            eos_tokens=int(added.eos.sum()),
            tag_tokens=int(added.tag_lengths.sum()),
            own_bos_tokens=int(added.own_starts.sum()) - skipped_bos,
            padding_tokens=int(plan.padding.sum()),
            rows=rows,
            row_tokens=rows * self.settings.context,
            remainder_tokens=int(plan.remainder.lengths.sum()),
            remainder_documents=len(np.unique(plan.remainder.items)),
            cut_documents=plan.cut,
            empty_documents=int(((added.lengths == 0) & ~added.long).sum()),
            long_documents=int(added.long.sum()),
            dropped_tokens=int(added.dropped.sum()) + skipped_bos,
        )


def pack_documents(
    documents: NDArray[np.int64],
    ends: DocumentEnds,
    sources: Sequence[str],
    settings: PackingSettings,
    special: SpecialTokens,
    tags: Sequence[NDArray[np.int32]] | None = None,
) -> Packed:
    """Add special tokens to a sequence of documents and plan its rows.

    Args:
        documents: their numbers in the corpus, in order; one that is repeated is there several times.
        ends: what special tokens depend on, in the same order.
        sources: the sources' names, by id.
        settings, special, tags: as in :func:`add_special_tokens`.

    Raises:
        RopewalkError: as :func:`add_special_tokens`.
    """
    added = add_special_tokens(ends, settings, special, tags)
    plan = plan_rows(added.lengths, settings.room(special), settings.packing, settings.remainder)
    return Packed(documents, ends.source_ids, sources, added, plan, settings, special, tags)


def assemble_rows(packed: Packed, corpus: Tokens, first: int, stop: int) -> list[PackedRow]:
    """The rows from ``first`` to before ``stop``.

    Args:
        packed: the plan.
        corpus: where the documents' tokens are.
        first, stop: which rows; a few at a time, since all are held in memory.
    """
    plan, settings = packed.plan, packed.settings
    lead = settings.context - settings.room(packed.special)
    bounds = plan.row_starts[first : stop + 1]
    pieces = plan.pieces.select(slice(int(bounds[0]), int(bounds[-1])))
    row_of = np.repeat(np.arange(stop - first), np.diff(bounds))
    before = np.cumsum(pieces.lengths) - pieces.lengths
    positions = before - before[(bounds[:-1] - bounds[0])[row_of]] + row_of * settings.context + lead
    ids = np.empty((stop - first, settings.context), np.int32)
    if lead:
        ids[:, 0] = packed.special.anchor
    _copy(packed, corpus, ids.reshape(-1), pieces, positions)
    tag_spans = _tag_spans(packed.added, pieces, positions - row_of * settings.context)
    rows = []
    for row in range(stop - first):
        within = slice(int(bounds[row] - bounds[0]), int(bounds[row + 1] - bounds[0]))
        rows.append(_row(packed, first + row, ids[row], pieces.select(within), tag_spans[within]))
    return rows


def _row(
    packed: Packed, number: int, ids: NDArray[np.int32], pieces: Pieces, tag_spans: NDArray[np.int64]
) -> PackedRow:
    """Row ``number``, whose tokens stand in ``ids`` in the documents' order; padding and chunks are still to come."""
    settings, padding = packed.settings, int(packed.plan.padding[number])
    segments, documents = pieces.lengths.tolist(), list(range(len(pieces)))
    masked = tag_spans[tag_spans[:, 0] < tag_spans[:, 1]].reshape(-1).tolist() if packed.tags else []
    begin = settings.context - settings.room(packed.special)
    if settings.interleave is not None:
        mixed = interleave(segments, settings.interleave, number)
        content = slice(begin, begin + len(mixed.order))
        ids[content] = ids[content][mixed.order]
        if masked:
            masked = _moved(masked, mixed.order, begin)
        segments, documents = mixed.segment_lengths, mixed.segment_documents
    if begin > settings.anchor_length:
        # A row's BOS without an anchor belongs to the first document.
        segments[0] += begin
    names = [packed.sources[source] for source in packed.source_ids[pieces.items].tolist()]
    numbers = packed.documents[pieces.items].tolist()
    if padding:
        # A document's own EOS would look like an end; where there is none, the anchor stands in.
        fill = packed.special.anchor if packed.special.eos is None else packed.special.eos
        ids[settings.context - padding :] = fill
        segments, documents = [*segments, padding], [*documents, len(names)]
        names, numbers = [*names, PADDING_SOURCE], [*numbers, PADDING]
        masked = [*masked, settings.context - padding, settings.context]
    return PackedRow(ids, segments, documents, names, numbers, masked)


def _moved(masked: list[int], order: NDArray[np.int64], begin: int) -> list[int]:
    """Spans of a row after its tokens took another order."""
    marks = np.zeros(len(order) + 2, np.int8)
    for start, stop in zip(masked[::2], masked[1::2], strict=True):
        marks[start - begin + 1 : stop - begin + 1] = 1
    marks[1:-1] = marks[1:-1][order]
    return [int(edge) + begin for edge in np.flatnonzero(np.diff(marks))]


def _copy(
    packed: Packed,
    corpus: Tokens,
    flat: NDArray[np.int32],
    pieces: Pieces,
    positions: NDArray[np.int64],
) -> None:
    """Fill in the pieces' tokens: BOS, tag, own tokens and EOS, as far as each lies in the piece."""
    items, starts, lengths = pieces.items, pieces.starts, pieces.lengths
    added, special = packed.added, packed.special
    prefix, own = added.prefix_lengths[items], added.own_lengths[items]
    begins = added.bos[items] & (starts == 0)
    if special.bos is not None:
        flat[positions[begins]] = special.bos
    ends = added.eos[items] & (starts + lengths > prefix + own)
    if special.eos is not None:
        flat[(positions + prefix + own - starts)[ends]] = special.eos
    if packed.tags is not None:
        spans = _tag_spans(added, pieces, positions)
        sources = packed.source_ids[items]
        for piece in np.flatnonzero(spans[:, 0] < spans[:, 1]).tolist():
            at, to = spans[piece].tolist()
            skipped = at - int(positions[piece]) + int(starts[piece]) - int(added.bos[items[piece]])
            flat[at:to] = packed.tags[int(sources[piece])][skipped : skipped + to - at]
    # From here on: the part of each piece that is the document's own tokens.
    own_from = np.maximum(starts - prefix, 0)
    counts = np.minimum(starts + lengths - prefix, own) - own_from
    copied = counts > 0
    targets = (positions + np.maximum(prefix - starts, 0))[copied].tolist()
    offsets = (own_from + added.own_starts[items])[copied].tolist()
    for number, offset, count, target in zip(
        packed.documents[items[copied]].tolist(), offsets, counts[copied].tolist(), targets, strict=True
    ):
        corpus.read_tokens(number, offset, flat[target : target + count])


def _tag_spans(added: AddedTokens, pieces: Pieces, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 ``[pieces, 2]``: where each piece's part of its tag lies; empty where it has none."""
    items, starts, lengths = pieces.items, pieces.starts, pieces.lengths
    bos = added.bos[items].astype(np.int64)
    first = np.clip(bos, starts, starts + lengths)
    last = np.clip(bos + added.tag_lengths[items], starts, starts + lengths)
    spans: NDArray[np.int64] = np.stack([first, last], axis=1) + (positions - starts)[:, None]
    return spans


def refuse_no_rows(packed: Packed, counts: PackingCounts, held_out: int) -> None:
    """Refuse a plan without any row.

    Raises:
        RopewalkError: if there is no row; the message gives the available tokens and the row length.
    """
    if packed.num_rows:
        return
    aside = f" ({held_out} more are held out for validation: lower validation_documents)" if held_out else ""
    raise RopewalkError(
        f"the documents do not fill one row: {counts.remainder_tokens} training tokens in {counts.documents} documents"
        f"{aside}, and a row takes {packed.settings.context}; choose shorter rows, or remainder pad"
    )


# Third word of the seed: keeps this random stream apart from other uses of the same seed.
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
    # Draw equally many words for every document, so that its cuts do not depend on the other documents.
    words = random.random_raw(len(lengths) * max(settings.parts)).reshape(len(lengths), -1)
    parts = [_part_lengths(n, settings, own) for n, own in zip(lengths, words.tolist(), strict=True)]
    sizes = np.array([size for own in parts for size in own], np.int64)
    documents = np.repeat(np.arange(len(parts)), [len(own) for own in parts])
    # Sorting by random words is a uniform shuffle unless two words collide (probability below n² / 2^65).
    shuffled = documents[np.argsort(random.random_raw(len(sizes)), kind="stable")]
    # Within each document, parts must keep their order: assign them to its positions in ascending order.
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
