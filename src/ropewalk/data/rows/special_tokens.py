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
    """Properties of documents that determine their special tokens, as arrays ``[documents]``.

    Attributes:
        lengths: int64, number of own tokens.
        first_ids, last_ids: int32, first and last own token; -1 for an empty document.
        source_ids: int32, source of the document.
    """

    lengths: NDArray[np.int64]
    first_ids: NDArray[np.int32]
    last_ids: NDArray[np.int32]
    source_ids: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AddedTokens:
    """Layout of documents in rows, ``[BOS] [tag] own tokens [EOS]``, as arrays ``[documents]``.

    Attributes:
        bos: bool, whether a BOS is added.
        tag_lengths: int32, tokens of the tag.
        own_starts: int8, index of the first own token that is kept: 1 if packing replaces the document's own BOS.
        own_lengths: int32, number of own tokens that are kept.
        eos: bool, whether an EOS is added.
        dropped: int32, own tokens left out because the document is longer than a row.
        long: bool, whether the document was truncated or skipped for being longer than a row.
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
        """Number of tokens before the document's own tokens."""
        return self.bos + self.tag_lengths

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 ``[documents]``: tokens of the document in its rows; 0 if it is left out."""
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
    """Determine the special tokens that each document gains and loses under the policies of the settings.

    Under the policies ``document`` and ``row``, a leading BOS of the document itself is removed. This avoids a double
    BOS, and a BOS in the middle of a row that begins with one. A document that ends with EOS gets no second one. A
    document without own tokens gets no special tokens.

    Args:
        ends: the documents.
        settings: the policies.
        special: the tokenizer's special tokens.
        tags: token ids of each source's tag, by source id; None for no tags.

    Raises:
        RopewalkError: if the settings require a special token that the tokenizer lacks, or a tag leaves no room for a
            document's tokens in a row.
    """
    policy = settings.bos_policy(special)
    room = settings.room(special)
    # A broadcast zero takes no memory, however many documents there are.
    none = np.broadcast_to(np.int32(0), ends.lengths.shape)
    own_bos: Integers = none
    if policy != "none" and special.bos is not None:
        own_bos = (ends.first_ids == special.bos).astype(np.int8)
    # int32 is safe: a token shard, and so a document, has fewer than 2**31 tokens.
    own = ends.lengths.astype(np.int32) - own_bos
    has_tokens = own > 0
    bos = has_tokens & (policy == "document")
    tag_lengths: Integers = none
    if tags:
        tag_lengths = np.where(has_tokens, np.array([len(tag) for tag in tags], np.int32)[ends.source_ids], 0)
    prefix = bos + tag_lengths
    if tags and len(prefix) and int(prefix.max()) >= room:
        raise RopewalkError(
            f"a tag of {int(tag_lengths.max())} tokens leaves no room for a document in rows of "
            f"{settings.context} tokens; choose longer rows or a shorter tag"
        )
    eos = has_tokens & (ends.last_ids != special.eos) if settings.eos else none.astype(bool)
    if settings.long_documents == "split":
        return AddedTokens(bos, tag_lengths, own_bos, own, eos, none, none.astype(bool))
    long = prefix + own + eos > room
    # A truncated document lacks its end, so EOS would teach the model to stop in the middle of a text.
    kept = np.where(long, room - prefix if settings.long_documents == "truncate" else 0, own)
    kept = np.minimum(kept, own)
    gone = long & (kept == 0)
    eos, bos, tag_lengths = eos & ~long, bos & ~gone, np.where(gone, 0, tag_lengths)
    return AddedTokens(bos, tag_lengths, own_bos, kept, eos, own - kept, long)


def enclosed_lengths(
    ends: DocumentEnds, special: SpecialTokens, tags: Sequence[NDArray[np.int32]] | None = None
) -> NDArray[np.int64]:
    """Tokens of each document with the tokenizer's BOS and EOS and with its tag, whatever the policies of its rows.

    It is at least the number of tokens that a row has of the document, and the same for rows of every pattern.

    Args:
        ends: the documents.
        special: the tokenizer's special tokens.
        tags: token ids of each source's tag, by source id; None for no tags.

    Returns:
        int64 ``[documents]``; 0 for a document without own tokens.
    """
    own = ends.lengths.astype(np.int64)
    added = np.zeros_like(own)
    for token, present in ((special.bos, ends.first_ids), (special.eos, ends.last_ids)):
        if token is not None:
            # A document that has the token already gets no second one.
            added += present != token
    if tags:
        added += np.array([len(tag) for tag in tags])[ends.source_ids]
    return np.where(own > 0, own + added, 0)


@dataclass(frozen=True)
class PackingCounts:
    """Counts of tokens by what became of them.

    ``document_tokens + bos_tokens + eos_tokens + tag_tokens + padding_tokens == row_tokens + remainder_tokens``,
    and ``tokens_in == document_tokens + dropped_tokens + own_bos_tokens``.

    Attributes:
        documents: number of documents; a repeated document counts each time.
        tokens_in: own tokens of these documents.
        document_tokens: own tokens in rows or in the remainder.
        bos_tokens, eos_tokens, tag_tokens: tokens that packing added; a row's anchor counts as BOS.
        own_bos_tokens: BOS tokens of the documents themselves, which packing removed.
        padding_tokens: tokens that fill rows up; they are never targets, and no document attends to them.
        rows: number of rows.
        row_tokens: ``rows * context``.
        remainder_tokens: tokens of the incomplete row that was left out, without a BOS at its start.
        remainder_documents: documents with a token in the remainder.
        cut_documents: documents with tokens in more than one row, where the remainder counts as a row.
        empty_documents: documents without tokens; they get no BOS, EOS or segment.
        long_documents: documents that were truncated or skipped for being longer than a row.
        dropped_tokens: own tokens of long documents that were left out.
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
