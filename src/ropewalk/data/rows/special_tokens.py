"""Special-token policy: which tokens (BOS, tag, EOS) each document gains and loses before packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.settings import PackingSettings
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError

Integers = NDArray[np.signedinteger[Any]]
"""Integers as narrow as their values allow, because there may be many millions of documents."""


@dataclass(frozen=True, eq=False)
class DocumentEnds:
    """What special tokens depend on in each document of a sequence; arrays of one entry a document.

    Attributes:
        lengths: int64, own tokens.
        first_ids, last_ids: int32, first and last own token; -1 where there is none.
        source_ids: int32, its source.
    """

    lengths: NDArray[np.int64]
    first_ids: NDArray[np.int32]
    last_ids: NDArray[np.int32]
    source_ids: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AddedTokens:
    """A document in a row is ``[BOS] [tag] own tokens [EOS]``; arrays of one entry a document.

    Attributes:
        bos: bool, whether a BOS begins it.
        tag_lengths: int32, tokens of its tag.
        own_starts: int8, the first of its own tokens that is kept: 1 where its own BOS gives way to ours.
        own_lengths: int32, own tokens that are kept.
        eos: bool, whether an EOS is added.
        dropped: int32, own tokens left out because it is longer than a row.
        long: bool, whether it was truncated or left out for that.
    """

    bos: NDArray[np.bool_]
    tag_lengths: Integers
    own_starts: Integers
    own_lengths: Integers
    eos: NDArray[np.bool_]
    dropped: Integers
    long: NDArray[np.bool_]

    @property
    def prefix_lengths(self) -> Integers:
        """Tokens before the document's own."""
        return self.bos + self.tag_lengths

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64: tokens of the document in its rows; 0 where nothing of it is left."""
        lengths = self.own_lengths.astype(np.int64)
        for part in (self.bos, self.tag_lengths, self.eos):
            lengths += part
        return lengths


def add_special_tokens(
    ends: DocumentEnds,
    settings: PackingSettings,
    special: SpecialTokens,
    tags: Sequence[NDArray[np.int32]] | None = None,
) -> AddedTokens:
    """Decide what each document of a sequence gets and loses, by the settings' policies.

    Under the policies ``document`` and ``row`` a document's own leading BOS gives way, so that there is one
    BOS and not two, and none in the middle of a row that has its own. An EOS that a document brings itself
    is not added again. A document without a token of its own gets nothing.

    Args:
        ends: the documents.
        settings: the policies.
        special: the tokenizer's special tokens.
        tags: the tag of each source, by source id; None puts none.

    Raises:
        RopewalkError: if a special token is asked for that the tokenizer lacks, or a row has no room for a
            document's token beside what is added.
    """
    policy = settings.bos_policy(special)
    room = settings.room(special)
    none = np.broadcast_to(np.int32(0), ends.lengths.shape)
    own_bos: Integers = none
    if policy != "none" and special.bos is not None:
        own_bos = (ends.first_ids == special.bos).astype(np.int8)
    # int32 is safe: a token shard, and so a document, has fewer than 2**31 tokens.
    own = ends.lengths.astype(np.int32) - own_bos
    there = own > 0
    bos = there & (policy == "document")
    tag_lengths: Integers = none
    if tags:
        tag_lengths = np.where(there, np.array([len(tag) for tag in tags], np.int32)[ends.source_ids], 0)
    prefix = bos + tag_lengths
    if tags and len(prefix) and int(prefix.max()) >= room:
        raise RopewalkError(
            f"a tag of {int(tag_lengths.max())} tokens leaves no room for a document in rows of "
            f"{settings.context} tokens; choose longer rows or a shorter tag"
        )
    eos = there & (ends.last_ids != special.eos) if settings.eos else none.astype(bool)
    if settings.long_documents == "split":
        return AddedTokens(bos, tag_lengths, own_bos, own, eos, none, none.astype(bool))
    long = prefix + own + eos > room
    # A truncated document lacks its end, so EOS would teach the model to stop in the middle of a text.
    kept = np.where(long, room - prefix if settings.long_documents == "truncate" else 0, own)
    kept = np.minimum(kept, own)
    gone = long & (kept == 0)
    eos, bos, tag_lengths = eos & ~long, bos & ~gone, np.where(gone, 0, tag_lengths)
    return AddedTokens(bos, tag_lengths, own_bos, kept, eos, own - kept, long)


@dataclass(frozen=True)
class PackingCounts:
    """Where every token went.

    ``document_tokens + bos_tokens + eos_tokens + tag_tokens + padding_tokens == row_tokens + remainder_tokens``,
    and ``tokens_in == document_tokens + dropped_tokens + own_bos_tokens``.

    Attributes:
        documents: documents that came in, repeated ones each time.
        tokens_in: their own tokens.
        document_tokens: own tokens that went into rows or the remainder.
        bos_tokens, eos_tokens, tag_tokens: tokens that packing added; a row's anchor counts as BOS.
        own_bos_tokens: BOS tokens that documents brought themselves, and that gave way to ours.
        padding_tokens: tokens that fill rows up; no target, and seen by no document.
        rows: rows.
        row_tokens: ``rows * context``.
        remainder_tokens: tokens of the incomplete row that was left out, without a row's own BOS.
        remainder_documents: documents with a token in it.
        cut_documents: documents whose tokens lie in more than one row; the remainder counts as one.
        empty_documents: documents without a token; they get no BOS or EOS and no segment.
        long_documents: documents that were truncated or left out as longer than a row.
        dropped_tokens: own tokens of those that were left out.
    """

    documents: int
    tokens_in: int
    document_tokens: int
    bos_tokens: int
    eos_tokens: int
    tag_tokens: int
    own_bos_tokens: int
    padding_tokens: int
    rows: int
    row_tokens: int
    remainder_tokens: int
    remainder_documents: int
    cut_documents: int
    empty_documents: int
    long_documents: int
    dropped_tokens: int
