"""Packing: a stream of tokenised documents to rows of exactly ``context`` tokens, every token counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ropewalk.data.tokenise import SpecialTokens, TokenisedDocument
from ropewalk.errors import RopewalkError
from ropewalk.packing import PATTERNS, POSITIONS, PackedLayout, Pattern, Positions, Row, next_token_labels

Bos = Literal["auto", "document", "row", "none"]
LongDocuments = Literal["split", "truncate", "skip"]
BOS_POLICIES: tuple[Bos, ...] = get_args(Bos)
LONG_DOCUMENTS: tuple[LongDocuments, ...] = get_args(LongDocuments)


@dataclass(frozen=True)
class PackingSettings:
    """How documents become rows.

    Attributes:
        context: tokens of a row, at least 2.
        pattern: which token may see which, as in PackedLayout. ``anchor`` puts one anchor token at index 0.
        positions: RoPE positions, ``continuous`` over the row or ``reset`` in each document. The continuation
            of a cut document counts as a document of its row, and restarts as well.
        bos: where a BOS token goes. ``document``: first in every document, not in a continuation. ``row``:
            first in every row, nowhere else. ``none``: nowhere. ``auto``: ``row`` under the pattern
            ``anchor`` (the BOS is the anchor), else ``document`` where the tokenizer has a BOS token and
            ``none`` where it has none. The pattern ``anchor`` takes no other policy than ``row``.
        eos: whether an EOS token ends every document.
        long_documents: a document that is longer than a row is ``split`` over several rows, ``truncate``d to
            one row's length, or left out (``skip``).

    Raises:
        RopewalkError: if a value is unknown or two contradict each other.
    """

    context: int
    pattern: Pattern = "anchor"
    positions: Positions = "continuous"
    bos: Bos = "auto"
    eos: bool = True
    long_documents: LongDocuments = "split"

    def __post_init__(self) -> None:
        if self.context < 2:
            raise RopewalkError(f"context must be 2 tokens or more, got {self.context}")
        for name, value, accepted in (
            ("pattern", self.pattern, PATTERNS),
            ("positions", self.positions, POSITIONS),
            ("bos", self.bos, BOS_POLICIES),
            ("long_documents", self.long_documents, LONG_DOCUMENTS),
        ):
            if value not in accepted:
                raise RopewalkError(f"unknown {name} {value!r}; choose one of {', '.join(accepted)}")
        if self.pattern == "anchor" and self.bos not in ("auto", "row"):
            raise RopewalkError(
                "pattern anchor begins each row with the anchor and has no other BOS; bos must be auto or row"
                f", got {self.bos}"
            )

    @property
    def anchor_length(self) -> int:
        """Tokens that stand before the first document of a row."""
        return 1 if self.pattern == "anchor" else 0

    def bos_policy(self, special: SpecialTokens) -> Literal["document", "row", "none"]:
        """The policy that ``auto`` stands for with this tokenizer.

        Raises:
            RopewalkError: if the settings ask for a BOS or EOS token that the tokenizer lacks.
        """
        if self.eos and special.eos is None:
            raise RopewalkError("the tokenizer has no EOS token to end documents with; choose eos false")
        if self.bos == "auto":
            if self.pattern == "anchor":
                return "row"
            return "none" if special.bos is None else "document"
        if self.bos == "document" and special.bos is None:
            raise RopewalkError("the tokenizer has no BOS token to begin documents with; choose bos none")
        return self.bos


@dataclass
class PackingCounts:
    """Where every token went; it is filled while the rows are consumed.

    ``document_tokens + bos_tokens + eos_tokens == row_tokens + remainder_tokens`` once all rows are consumed.

    Attributes:
        documents: documents that came in.
        document_tokens: their own tokens that went into rows or the remainder.
        bos_tokens, eos_tokens: tokens that packing added; a row's anchor counts as BOS.
        rows: complete rows.
        row_tokens: ``rows * context``.
        remainder_tokens: tokens of the last, incomplete row, which is not handed on.
        cut_documents: documents whose tokens lie in more than one row.
        empty_documents: documents without a token; they get no BOS or EOS and no segment.
        long_documents: documents that were truncated or left out as longer than a row.
        dropped_tokens: own tokens of those that were left out, not part of ``document_tokens``.
    """

    documents: int = 0
    document_tokens: int = 0
    bos_tokens: int = 0
    eos_tokens: int = 0
    rows: int = 0
    row_tokens: int = 0
    remainder_tokens: int = 0
    cut_documents: int = 0
    empty_documents: int = 0
    long_documents: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One row as plain values, before it becomes tensors.

    Attributes:
        input_ids: int32 ``[context]``.
        segment_lengths: tokens of each segment; the anchor stands before the first and is not counted.
        segment_documents: the document of each segment, numbered from 0 in the row.
        sources: the source of each document in the row.
    """

    input_ids: NDArray[np.int32]
    segment_lengths: list[int]
    segment_documents: list[int]
    sources: list[str]


def pack(
    documents: Iterable[TokenisedDocument],
    settings: PackingSettings,
    special: SpecialTokens,
    counts: PackingCounts | None = None,
) -> Iterator[PackedRow]:
    """Fill rows with documents in the order they come; a document cut at a row's end goes on in the next.

    A BOS or EOS token that a document brings itself, as its first or last token, is not added again.

    Args:
        documents: tokenised without special tokens.
        settings: context, pattern and policies.
        special: the tokenizer's special tokens.
        counts: filled with where every token went.

    Raises:
        RopewalkError: if the settings ask for a special token that the tokenizer lacks.
    """
    counts = PackingCounts() if counts is None else counts
    policy = settings.bos_policy(special)
    row = _OpenRow(settings)
    for document in documents:
        counts.documents += 1
        ids = _framed(document.input_ids, settings, special, policy, counts)
        pieces = 0
        while len(ids):
            if row.filled == 0 and policy == "row":
                if ids[0] == special.anchor and pieces == 0:
                    ids = ids[1:]
                else:
                    counts.bos_tokens += 1
                row.begin(special.anchor)
            ids, added = row.add(ids, document.source)
            pieces += added
            if row.filled == settings.context:
                counts.rows += 1
                counts.row_tokens += settings.context
                yield row.close()
                row = _OpenRow(settings)
        counts.cut_documents += pieces > 1
    counts.remainder_tokens += row.filled


def row_from_arrays(
    input_ids: NDArray[np.integer],
    segment_lengths: Sequence[int],
    segment_documents: Sequence[int],
    settings: PackingSettings,
) -> Row:
    """A training row from a packed row's arrays, with labels that never cross documents.

    Args:
        input_ids: ``[context]``.
        segment_lengths, segment_documents: as in PackedRow.
        settings: the settings it was packed with.
    """
    layout = PackedLayout.from_segments(
        segment_lengths, segment_documents, settings.pattern, settings.anchor_length, settings.positions
    )
    tensor = torch.from_numpy(np.asarray(input_ids).astype(np.int64))
    return Row(tensor, next_token_labels(tensor, layout), layout)


def _framed(
    ids: NDArray[np.int32],
    settings: PackingSettings,
    special: SpecialTokens,
    policy: Literal["document", "row", "none"],
    counts: PackingCounts,
) -> NDArray[np.int32]:
    """The document's tokens with its BOS and EOS, as the long-document policy leaves them."""
    if len(ids) == 0:
        counts.empty_documents += 1
        return ids
    bos = [special.bos] if policy == "document" and ids[0] != special.bos else []
    eos = [special.eos] if settings.eos and ids[-1] != special.eos else []
    capacity = settings.context - (policy == "row")
    if settings.long_documents != "split" and len(bos) + len(ids) + len(eos) > capacity:
        counts.long_documents += 1
        # A truncated document has not ended, so it gets no EOS.
        kept = capacity - len(bos) if settings.long_documents == "truncate" else 0
        counts.dropped_tokens += len(ids) - min(kept, len(ids))
        ids, eos = ids[:kept], []
        bos = bos if kept else []
    counts.document_tokens += len(ids)
    counts.bos_tokens += len(bos)
    counts.eos_tokens += len(eos)
    return np.concatenate([np.array(bos, np.int32), ids, np.array(eos, np.int32)]) if bos or eos else ids


class _OpenRow:
    """A row that is being filled."""

    def __init__(self, settings: PackingSettings) -> None:
        self._anchor_length = settings.anchor_length
        self._ids = np.empty(settings.context, np.int32)
        self._lengths: list[int] = []
        self._sources: list[str] = []
        self._lead = 0
        self.filled = 0

    def begin(self, anchor: int) -> None:
        """Put the row's BOS: before the first document, or inside it where the layout has no anchor."""
        self._ids[0] = anchor
        self.filled = 1
        self._lead = 1 - self._anchor_length

    def add(self, ids: NDArray[np.int32], source: str) -> tuple[NDArray[np.int32], bool]:
        """Take what fits; return the rest, and whether a segment was added."""
        taken = ids[: len(self._ids) - self.filled]
        if len(taken) == 0:
            return ids, False
        self._ids[self.filled : self.filled + len(taken)] = taken
        self.filled += len(taken)
        self._lengths.append(len(taken) + self._lead)
        self._sources.append(source)
        self._lead = 0
        return ids[len(taken) :], True

    def close(self) -> PackedRow:
        return PackedRow(self._ids, self._lengths, list(range(len(self._lengths))), self._sources)
