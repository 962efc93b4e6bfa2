"""Assemble planned rows from token ids, a range of rows at a time. A row does not depend on the range it is part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.report import either
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
"""Source of the padding at a row's end."""


class Tokens(Protocol):
    """Provides the documents' own tokens, without special tokens."""

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with own tokens of document ``number``, starting at its token ``first``."""
        ...


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row as plain values, before it becomes tensors.

    Attributes:
        input_ids: int32 ``[context]``.
        segment_lengths: tokens of each segment, without the anchor, which precedes the first one.
        segment_documents: the document of each segment, numbered from 0 within the row.
        sources: the source of each document in the row; PADDING_SOURCE for padding, which comes last.
        numbers: the number of each document in the corpus; PADDING for padding.
        masked: start, stop, start, stop, … of the tokens that are never targets: tags, padding, all of a
            chat but the assistant's turns, and what lies outside spans of loss.
    """

    input_ids: NDArray[np.int32]
    segment_lengths: list[int]
    segment_documents: list[int]
    sources: list[str]
    numbers: list[int]
    masked: list[int]


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """Documents with their special tokens, planned into rows; everything but the token ids themselves.

    Attributes:
        documents: int64 ``[documents]``, the number of each document in the corpus, in reading order.
        source_ids: int32 ``[documents]``, the source of each document.
        sources: the sources' names, by id.
        added: the tokens added to and removed from each document.
        plan: the pieces of documents in each row; its items are indices into ``documents``.
        settings: the policies.
        special: the tokenizer's special tokens.
        tags: token ids of each source's tag; None for no tags.
        first_row: number of the first row, if these are some rows of a larger plan.
    """

    documents: NDArray[np.int64]
    source_ids: NDArray[np.int32]
    sources: Sequence[str]
    added: AddedTokens
    plan: RowPlan
    settings: PackingSettings
    special: SpecialTokens
    tags: Sequence[NDArray[np.int32]] | None
    first_row: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.plan.padding)

    def rows(self, first: int, stop: int) -> PlannedRows:
        """The rows ``first <= row < stop`` alone, with only the documents that lie in them."""
        bounds = self.plan.row_starts[first : stop + 1]
        pieces = self.plan.pieces.select(slice(int(bounds[0]), int(bounds[-1])))
        used, items = np.unique(pieces.items, return_inverse=True)
        added = AddedTokens(*(getattr(self.added, field.name)[used] for field in fields(self.added)))
        plan = replace(
            self.plan,
            row_starts=bounds - bounds[0],
            pieces=replace(pieces, items=items),
            padding=self.plan.padding[first:stop],
            remainder=pieces.select(slice(0)),
        )
        return replace(
            self,
            documents=self.documents[used],
            source_ids=self.source_ids[used],
            added=added,
            plan=plan,
            first_row=self.first_row + first,
        )

    def counts(self, ends: DocumentEnds) -> PackingCounts:
        """Count what became of every token; ``ends`` must be those that the documents were packed with."""
        added, plan, rows = self.added, self.plan, self.num_rows
        row_bos = rows if self.settings.bos_policy(self.special) == "row" else 0
        # A skipped document loses its own BOS with all other tokens, so that BOS counts as dropped, not as replaced.
        skipped = added.long & (added.own_lengths == 0)
        skipped_bos = int(added.own_starts[skipped].sum())
        return PackingCounts(
            documents=len(self.documents),
            tokens_in=int(ends.lengths.sum()),
            document_tokens=int(added.own_lengths.sum()),
            bos_tokens=int(added.bos.sum()) + row_bos,
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
) -> PlannedRows:
    """Add special tokens to documents and plan their rows.

    Args:
        documents: int64 ``[documents]``, numbers in the corpus in reading order; a repeated document appears several
            times.
        ends: lengths, first and last ids and sources of the same documents, in the same order.
        sources: the sources' names, by id.
        settings, special, tags: as in :func:`add_special_tokens`.

    Raises:
        RopewalkError: as in :func:`add_special_tokens`.
    """
    added = add_special_tokens(ends, settings, special, tags)
    plan = plan_rows(added.lengths, settings.room(special), settings.packing, settings.remainder)
    return PlannedRows(documents, ends.source_ids, sources, added, plan, settings, special, tags)


def assemble_rows(packed: PlannedRows, corpus: Tokens, first: int, stop: int) -> list[PackedRow]:
    """Assemble the rows ``first <= row < stop``.

    Args:
        packed: the plan.
        corpus: provides the documents' tokens.
        first, stop: range of rows; all of them are held in memory.
    """
    plan, settings = packed.plan, packed.settings
    # 1 if every row begins with BOS, otherwise 0.
    lead = settings.context - settings.room(packed.special)
    bounds = plan.row_starts[first : stop + 1]
    pieces = plan.pieces.select(slice(int(bounds[0]), int(bounds[-1])))
    # All rows of the range are filled in one vectorised pass: a row may have thousands of pieces.
    row_of = np.repeat(np.arange(stop - first), np.diff(bounds))
    before = np.cumsum(pieces.lengths) - pieces.lengths
    # Offset within the row = tokens before the piece minus tokens before its row's first piece.
    positions = before - before[(bounds[:-1] - bounds[0])[row_of]] + row_of * settings.context + lead
    # Not initialised: pieces fill everything but the padding, which _row writes.
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
    packed: PlannedRows, number: int, ids: NDArray[np.int32], pieces: Pieces, tag_spans: NDArray[np.int64]
) -> PackedRow:
    """Finish row ``number``: interleave the documents' tokens in ``ids``, which are in order, and add padding."""
    settings, padding = packed.settings, int(packed.plan.padding[number])
    segments, documents = pieces.lengths.tolist(), list(range(len(pieces)))
    masked = tag_spans[tag_spans[:, 0] < tag_spans[:, 1]].reshape(-1).tolist() if packed.tags else []
    begin = settings.context - settings.room(packed.special)
    if settings.interleave is not None:
        # The number of the row, not of the range, seeds the shuffle, so that rows are equal however they are divided.
        mixed = interleave(segments, settings.interleave, packed.first_row + number)
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
    silent = ids < 0
    if silent.any():
        # Tokens outside the assistant's turns of a chat, or outside spans of loss, are stored as ~id.
        ids[silent] = ~ids[silent]
        for start, stop in zip(masked[::2], masked[1::2], strict=True):
            silent[start:stop] = True
        masked = np.flatnonzero(np.diff(silent, prepend=False, append=False)).tolist()
    return PackedRow(ids, segments, documents, names, numbers, masked)


def _moved(masked: list[int], order: NDArray[np.int64], begin: int) -> list[int]:
    """Spans of masked tokens after the tokens of a row have been reordered; ``begin`` is the first reordered token."""
    # A mark at either end makes spans that touch the first or last token show up as differences too.
    marks = np.zeros(len(order) + 2, np.int8)
    for start, stop in zip(masked[::2], masked[1::2], strict=True):
        marks[start - begin + 1 : stop - begin + 1] = 1
    marks[1:-1] = marks[1:-1][order]
    return [int(edge) + begin for edge in np.flatnonzero(np.diff(marks))]


def _copy(
    packed: PlannedRows,
    corpus: Tokens,
    flat: NDArray[np.int32],
    pieces: Pieces,
    positions: NDArray[np.int64],
) -> None:
    """Write the pieces' tokens into ``flat``: the parts of BOS, tag, own tokens and EOS that each piece contains."""
    items, starts, lengths = pieces.items, pieces.starts, pieces.lengths
    added, special = packed.added, packed.special
    prefix, own = added.prefix_lengths[items], added.own_lengths[items]
    begins = added.bos[items] & (starts == 0)
    if special.bos is not None:
        flat[positions[begins]] = special.bos
    # EOS lies behind the own tokens, so only a piece that reaches beyond these has it.
    ends = added.eos[items] & (starts + lengths > prefix + own)
    if special.eos is not None:
        flat[(positions + prefix + own - starts)[ends]] = special.eos
    if packed.tags is not None:
        spans = _tag_spans(added, pieces, positions)
        sources = packed.source_ids[items]
        for piece in np.flatnonzero(spans[:, 0] < spans[:, 1]).tolist():
            at, to = spans[piece].tolist()
            # Where a tag is cut by the end of a row, this piece begins in the middle of it.
            skipped = at - int(positions[piece]) + int(starts[piece]) - int(added.bos[items[piece]])
            flat[at:to] = packed.tags[int(sources[piece])][skipped : skipped + to - at]
    # The rest of each piece is the document's own tokens. They are copied last because this is the only step that
    # reads files.
    own_from = np.maximum(starts - prefix, 0)
    counts = np.minimum(starts + lengths - prefix, own) - own_from
    copied = counts > 0
    targets = (positions + np.maximum(prefix - starts, 0))[copied].tolist()
    # own_starts skips a BOS that the document already had, which the packing replaces by its own.
    offsets = (own_from + added.own_starts[items])[copied].tolist()
    for number, offset, count, target in zip(
        packed.documents[items[copied]].tolist(), offsets, counts[copied].tolist(), targets, strict=True
    ):
        corpus.read_tokens(number, offset, flat[target : target + count])
    if special.eos is not None:
        # The EOS that packing adds after a chat whose last token is not trained is not the assistant's either.
        added_eos = (positions + prefix + own - starts)[ends & copied]
        flat[added_eos[flat[added_eos - 1] < 0]] = ~special.eos


def _tag_spans(added: AddedTokens, pieces: Pieces, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 ``[pieces, 2]``: start and stop of the tag's tokens in each piece; equal if the piece has none."""
    items, starts, lengths = pieces.items, pieces.starts, pieces.lengths
    bos = added.bos[items].astype(np.int64)
    # Clipped to the piece, so that a tag in another piece gives an empty span.
    first = np.clip(bos, starts, starts + lengths)
    last = np.clip(bos + added.tag_lengths[items], starts, starts + lengths)
    spans: NDArray[np.int64] = np.stack([first, last], axis=1) + (positions - starts)[:, None]
    return spans


def refuse_no_rows(packed: PlannedRows, counts: PackingCounts, held_out: int) -> None:
    """Raise if a plan has no row.

    Raises:
        RopewalkError: with the number of available tokens and the length of a row.
    """
    if packed.num_rows:
        return
    why, advice = "", ["choose shorter rows", "set remainder (--remainder) to pad"]
    if not counts.remainder_tokens and counts.long_documents:
        why = f" ({counts.long_documents} longer documents were skipped)"
        advice = ["choose longer rows", "set long_documents (--long-documents) to truncate"]
    elif not counts.remainder_tokens:
        advice = ["give more documents"]
    if held_out:
        advice.append(f"hold out fewer documents for validation (now {held_out})")
    which = packed.settings.kind or "documents"
    raise RopewalkError(
        f"the documents do not fill one row: {counts.remainder_tokens} training tokens in {counts.documents} {which}, "
        f"but a row takes {packed.settings.context} tokens{why}; {either(advice)}"
    )


# Third word of the seed: keeps this random stream apart from other uses of the same seed.
_PURPOSE = 0x696E746C


@dataclass(frozen=True, eq=False)
class Interleaved:
    """New order of a row's tokens after interleaving, without anchor and padding.

    Attributes:
        order: int64 ``[tokens]``: position i now holds the token that was at position ``order[i]``.
        segment_lengths: tokens of each segment, in storage order.
        segment_documents: the document of each segment, numbered in the given order; neighbours differ.
    """

    order: NDArray[np.int64]
    segment_lengths: list[int]
    segment_documents: list[int]


def interleave(segment_lengths: Sequence[int], settings: InterleaveSettings, row: int) -> Interleaved:
    """Cut the documents of a row into parts and shuffle the parts, keeping the order within each document.

    A document of ``min_length`` to ``max_length`` tokens is cut into k parts, where k is drawn from
    ``settings.parts``. The cuts are distinct positions between the fractions ``cut_points`` of its length; if there
    are fewer than k - 1 such positions, the document is cut at all of them. All arrangements that keep the order
    within each document are equally likely. Adjacent parts of one document become one segment.

    Args:
        segment_lengths: tokens of each document of the row, in order, all at least 1.
        settings: lengths of the documents to cut, numbers of parts, cut points and seed.
        row: number of the row, 0 or more; with the seed it determines the result.

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
    """Order of the tokens, given the parts' ``sizes`` before and the document and part at each position after."""
    starts = (np.cumsum(sizes) - sizes)[part_at]
    placed = sizes[part_at]
    ends = np.cumsum(placed)
    # Repeat each part's start less the tokens placed before it; adding the positions then counts through each part.
    order = np.repeat(starts - (ends - placed), placed) + np.arange(ends[-1])
    # A segment ends where the next part belongs to another document.
    last = np.append(documents[1:] != documents[:-1], True)
    return Interleaved(order, np.diff(ends[last], prepend=0).tolist(), documents[last].tolist())


def _part_lengths(length: int, settings: InterleaveSettings, words: list[int]) -> list[int]:
    """Tokens of each part of one document, drawn from ``max(settings.parts)`` random words."""
    if not settings.min_length <= length <= settings.max_length:
        return [length]
    wanted = settings.parts[_below(len(settings.parts), words[0])]
    low, high = _cut_range(length, settings.cut_points)
    available = max(0, high - low + 1)
    cuts = _distinct(available, min(wanted - 1, available), words[1:])
    bounds = [0, *(low + cut for cut in cuts), length]
    return [end - start for start, end in pairwise(bounds)]


def _cut_range(length: int, shares: tuple[float, float]) -> tuple[int, int]:
    """First and last position of a cut, such that neither part is empty; last < first if there is none.

    Fractions are taken as written in decimal: 0.29 of 100 tokens are 29, whereas the nearest float64 gives 28.999….
    """
    (low, low_of), (high, high_of) = map(_ratio, shares)
    return max(1, -(-low * length // low_of)), min(length - 1, high * length // high_of)


@cache
def _ratio(share: float) -> tuple[int, int]:
    """A fraction as numerator and denominator; cached because parsing it takes longer than all else per document."""
    return Fraction(str(float(share))).as_integer_ratio()


def _distinct(population: int, count: int, words: list[int]) -> list[int]:
    """Draw ``count`` distinct numbers below ``population``, in ascending order; all sets are equally likely.

    Source: R. Floyd, in J. Bentley, "Programming Pearls: A Sample of Brilliance", CACM 30(9), 1987.
    """
    chosen: set[int] = set()
    # There are words for the largest number of parts, so fewer cuts leave some unused.
    for top, word in zip(range(population - count, population), words, strict=False):
        number = _below(top + 1, word)
        chosen.add(top if number in chosen else number)
    return sorted(chosen)


def _below(limit: int, word: int) -> int:
    """Map a random 64-bit word to a number below ``limit``; each probability is within 2^-64 of 1 / limit."""
    return (word * limit) >> 64
