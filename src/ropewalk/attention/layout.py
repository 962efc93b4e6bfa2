"""PackedLayout: the document of each token in a packed row, and the tokens that it can attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ropewalk.attention.choices import PATTERNS, POSITIONS, Pattern, Positions
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.errors import RopewalkError

NO_DOCUMENT = -1
"""``document_ids`` of the anchor tokens, which come before the first document and belong to none."""


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Which document each token of a packed row belongs to, its RoPE position, and which tokens it may attend to.

    Query *i* sees key *j* iff *j <= i* **and** (``pattern`` is ``full``, **or** they share a
    document, **or** *j* is one of the first ``anchor_length`` tokens and ``pattern`` is ``anchor``).
    Here *i* and *j* count tokens as the row stores them. A document may be stored in several segments (interleaved
    chunks), which keep the order that they have in the document. If a layer has a sliding window or chunked
    attention, :attr:`run_index` numbers the tokens of a window or chunk.

    The anchor comes before the first segment: ``cu_seqlens[0] == anchor_length``. The tokens of the anchor belong to no
    document (``document_ids == -1``). Under ``intra_document``, these tokens see each other, and no other token sees
    them.

    Attributes:
        cu_seqlens: int32 ``[segments + 1]`` on the CPU, strictly increasing token offsets of the
            segments in the row; the first is ``anchor_length``, the last is the length of the row.
        segment_documents: int32 ``[segments]``, the document of each segment, numbered from 0.
        position_ids: int64 ``[total_length]``, RoPE positions in tokens; they do not change the attention mask.
        anchor_length: number of leading tokens that every document sees under the pattern ``anchor``.
        pattern: ``full``, ``intra_document`` or ``anchor``.

    Raises:
        RopewalkError: if the fields contradict each other; the message gives the offending value.

    Source: AnchorAttention, arXiv:2411.13476, figures 2 and 5.
    """

    cu_seqlens: Tensor
    segment_documents: Tensor
    position_ids: Tensor
    anchor_length: int
    pattern: Pattern

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise RopewalkError(f"unknown pattern {self.pattern!r}; choose one of {', '.join(PATTERNS)}")
        if self.anchor_length < 0:
            raise RopewalkError(f"anchor_length must be 0 or more, got {self.anchor_length}")
        for name, dtype in (
            ("cu_seqlens", torch.int32),
            ("segment_documents", torch.int32),
            ("position_ids", torch.int64),
        ):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != 1 or tensor.device.type != "cpu":
                raise RopewalkError(
                    f"{name} must be a 1-dimensional {dtype} tensor on the CPU, got {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
        if self.cu_seqlens.numel() < 2 or self.segment_documents.numel() != self.cu_seqlens.numel() - 1:
            raise RopewalkError(
                "cu_seqlens must have 2 or more entries, and segment_documents must have one fewer than cu_seqlens, "
                f"got {self.cu_seqlens.numel()} in cu_seqlens and {self.segment_documents.numel()} in "
                "segment_documents"
            )
        if int(self.cu_seqlens[0]) != self.anchor_length:
            raise RopewalkError(
                f"cu_seqlens[0] must equal anchor_length {self.anchor_length}, got {int(self.cu_seqlens[0])}"
            )
        if bool((short := self.cu_seqlens.diff() <= 0).any()):
            at = int(short.nonzero()[0])
            before, after = self.cu_seqlens[at : at + 2].tolist()
            raise RopewalkError(
                "cu_seqlens must be strictly increasing, because every segment needs a token, got "
                f"{after} after {before}"
            )
        if bool((self.segment_documents < 0).any()):
            raise RopewalkError(
                f"every entry of segment_documents must be 0 or more, got {int(self.segment_documents.min())}"
            )
        if int(self.cu_seqlens[-1]) != self.position_ids.numel():
            raise RopewalkError(
                f"cu_seqlens ends at {int(self.cu_seqlens[-1])} but position_ids has "
                f"{self.position_ids.numel()} entries; both numbers must be the length of the row"
            )

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        pattern: Pattern = "anchor",
        anchor_length: int = 1,
        positions: Positions = "continuous",
    ) -> PackedLayout:
        """A row of whole documents, one segment each.

        Args:
            lengths: number of tokens of each document, at least 1, not counting the anchor.
            pattern: ``full``, ``intra_document`` or ``anchor``.
            anchor_length: leading tokens before the first document; the row has
                ``anchor_length + sum(lengths)`` tokens.
            positions: ``continuous`` (0, 1, 2, … over the row) or ``reset`` (positions start again in each document).
                With ``reset``, a document starts at ``anchor_length`` under the pattern ``anchor``, as if the anchor
                came before each document. Under the other patterns, it starts at 0.

        Example:
            >>> PackedLayout.from_lengths([3, 2]).cu_seqlens.tolist()
            [1, 4, 6]
        """
        return cls.from_segments(lengths, range(len(lengths)), pattern, anchor_length, positions)

    @classmethod
    def from_segments(
        cls,
        lengths: Sequence[int],
        documents: Sequence[int],
        pattern: Pattern = "anchor",
        anchor_length: int = 1,
        positions: Positions = "continuous",
    ) -> PackedLayout:
        """A row of segments, several of which may belong to one document (interleaved chunks).

        Args:
            lengths: number of tokens of each segment, at least 1, in storage order.
            documents: document number of each segment; segments with equal numbers form one document.
            pattern: as in :meth:`from_lengths`.
            anchor_length: as in :meth:`from_lengths`.
            positions: as in :meth:`from_lengths`.
        """
        if len(lengths) == 0:
            raise RopewalkError("a packed row needs at least one document, got none")
        if len(lengths) != len(documents):
            raise RopewalkError(
                f"lengths and documents must have one entry for each segment, got {len(lengths)} "
                f"lengths and {len(documents)} documents"
            )
        if min(lengths) < 1:
            raise RopewalkError(f"every segment needs at least 1 token, got {min(lengths)}")
        if positions not in POSITIONS:
            raise RopewalkError(f"unknown positions {positions!r}; choose one of {', '.join(POSITIONS)}")
        if anchor_length < 0:
            raise RopewalkError(f"anchor_length must be 0 or more, got {anchor_length}")
        sizes = torch.tensor([anchor_length, *lengths], dtype=torch.int64)
        cu_seqlens = sizes.cumsum(0).to(torch.int32)
        segment_documents = torch.tensor(list(documents), dtype=torch.int32)
        total = int(cu_seqlens[-1])
        if positions == "continuous":
            position_ids = torch.arange(total)
        else:
            # Under ``anchor`` each document continues the anchor's positions, as if it directly followed it.
            start = anchor_length if pattern == "anchor" else 0
            parts = [torch.arange(anchor_length)]
            # A document may come in several segments (interleaved chunks), whose positions go on from one to the next.
            next_position: dict[int, int] = {}
            for length, document in zip(lengths, documents, strict=True):
                first = next_position.get(document, start)
                parts.append(torch.arange(first, first + length))
                next_position[document] = first + length
            position_ids = torch.cat(parts)
        return cls(cu_seqlens, segment_documents, position_ids, anchor_length, pattern)

    @property
    def total_length(self) -> int:
        """Number of tokens in the row, including the anchor."""
        return self.position_ids.numel()

    @cached_property
    def rope_length(self) -> int:
        """Tokens up to the largest position: the length by which RoPE chooses its frequencies, if they depend on it.

        It is the length of the row if positions count through it, and otherwise that of its longest document.
        """
        return int(self.position_ids.max()) + 1

    @cached_property
    def document_ids(self) -> Tensor:
        """int64 ``[total_length]``: the document of each token, ``-1`` for the anchor."""
        anchor = torch.full((self.anchor_length,), NO_DOCUMENT)
        return torch.cat(
            [anchor, self.segment_documents.long().repeat_interleave(self.cu_seqlens.diff().long())]
        )

    @cached_property
    def document_order(self) -> Tensor:
        """int64 ``[total_length]``: indices of the tokens in the row, sorted by document; the anchor comes first."""
        # Stable, so that tokens of a document keep their order; the anchor's -1 comes first.
        return torch.argsort(self.document_ids, stable=True)

    @property
    def storage_in_order(self) -> Tensor:
        """int64 ``[total_length]``: :attr:`document_order`, or plain storage order if the whole row is one run."""
        return torch.arange(self.total_length) if self.pattern == "full" else self.document_order

    @cached_property
    def document_lengths(self) -> Tensor:
        """int64: tokens of each document in ascending document number, without the anchor."""
        lengths: Tensor = torch.unique(self.document_ids[self.anchor_length :], return_counts=True)[1]
        return lengths

    @cached_property
    def is_interleaved(self) -> bool:
        """Whether storage order differs from (document, order)."""
        # Ascending segments need no reordering, even if several of them belong to one document.
        return bool((self.segment_documents.diff() < 0).any())

    @cached_property
    def run_index(self) -> Tensor:
        """int64 ``[total_length]``: index of each token in its run, from 0.

        A run is the whole row under ``full``, a document under ``intra_document``, and the anchor followed by a
        document under ``anchor``.
        """
        if self.pattern == "full":
            return torch.arange(self.total_length)
        lengths = torch.cat([torch.tensor([self.anchor_length]), self.document_lengths])
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        inside = torch.arange(self.total_length) - starts
        if self.pattern == "anchor":
            # Each document's run starts with the anchor, which is stored only once, so its own tokens count from there.
            inside[self.anchor_length :] += self.anchor_length
        # Back from document order to storage order.
        index = torch.empty_like(inside)
        index[self.document_order] = inside
        return index

    def first(self, tokens: int) -> PackedLayout:
        """The layout of the first ``tokens`` tokens of the row, at least one more than its anchor has."""
        if tokens >= self.total_length:
            return self
        # Segments behind the cut all end at it after clamping; unique leaves one of them.
        ends = self.cu_seqlens.clamp(max=tokens).unique()
        documents = self.segment_documents[: len(ends) - 1]
        positions = self.position_ids[:tokens].clone()
        return PackedLayout(ends, documents, positions, self.anchor_length, self.pattern)

    def dense_mask(self, locality: Locality = EVERYTHING) -> Tensor:
        """bool ``[total_length, total_length]``: entry ``[i, j]`` is True if query *i* sees key *j*.

        Memory is quadratic in the length of the row. Use the mask for tests and figures, not for training.

        Args:
            locality: ``Locality(window, chunk)`` from ``ropewalk.attention.options``: the layer's sliding window or
                chunk length, in tokens of :attr:`run_index`. The default has neither.
        """
        index = torch.arange(self.total_length)
        allowed: Tensor = index[None, :] <= index[:, None]
        if self.pattern != "full":
            seen = self.document_ids[:, None] == self.document_ids[None, :]
            if self.pattern == "anchor":
                seen = seen | (index < self.anchor_length)[None, :]
            allowed = allowed.logical_and(seen)
        query, key = self.run_index[:, None], self.run_index[None, :]
        if locality.window is not None:
            allowed = allowed.logical_and(query - key < locality.window)
        if locality.chunk is not None:
            allowed = allowed.logical_and(query // locality.chunk == key // locality.chunk)
        return allowed


IGNORED = -100
"""Label of a position without a training target, as in transformers and torch."""


@dataclass(frozen=True, eq=False)
class Row:
    """One packed row.

    Attributes:
        input_ids: int64 ``[total_length]``, token ids.
        labels: int64 ``[total_length]``, already shifted: ``labels[t]`` is the token id to predict at position t, or
            -100 if there is none. Because of the shift, a shard of the row is a plain slice of both tensors.
        layout: the row's PackedLayout.
        padding: number of tokens at the end that only fill the row.
    """

    input_ids: Tensor
    labels: Tensor
    layout: PackedLayout
    padding: int = 0


def next_token_labels(input_ids: Tensor, layout: PackedLayout, trained: Tensor | None = None) -> Tensor:
    """Shifted labels whose targets never cross a document boundary.

    The target of a token is the next token *of its own document*. If the document is interleaved, this token may lie in
    a later segment. The last token of a document has no target. The anchor has no target either, because the token
    after it belongs only to the first document.

    Args:
        input_ids: int64 ``[total_length]``.
        layout: the row's layout.
        trained: bool ``[total_length]``, False for tokens that must not be a target, such as domain tags.

    Returns:
        int64 ``[total_length]``, with -100 at tokens that have no target.
    """
    order = layout.document_order
    documents = layout.document_ids[order]
    here, following = order[:-1], order[1:]
    # In document order, a token has a target if the next one belongs to the same document and it is no anchor.
    has_target = (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    if trained is not None:
        has_target &= trained[following]
    labels = torch.full_like(input_ids, IGNORED)
    labels[here[has_target]] = input_ids[following[has_target]]
    return labels


Made = TypeVar("Made")


def cached_per_layout(make: Callable[..., Made]) -> Callable[..., Made]:
    """Cache a function's result for as long as its first argument lives.

    The first argument, or the first item of a tuple, owns the result. Items of tuples are compared by identity and
    are not kept alive. The indices of one batch of long rows take 100 MB on a device. A cache that outlives its rows
    would hold gigabytes, and an LRU cache would drop the plans of a step's first rows while preparing its last ones.
    """
    # Weak keys: the entry disappears with the layout that owns it.
    found: WeakKeyDictionary[Any, dict[Any, Made]] = WeakKeyDictionary()

    @wraps(make)
    def once(*args: Any) -> Made:
        owner = args[0][0] if isinstance(args[0], tuple) else args[0]
        # References to the other layouts, too: a strong one would keep them alive as long as the first.
        key = tuple(tuple(map(ref, each)) if isinstance(each, tuple) else each for each in args[1:])
        if isinstance(args[0], tuple):
            key = (*map(ref, args[0][1:]), *key)
        made = found.setdefault(owner, {})
        if key not in made:
            made[key] = make(*args)
        return made[key]

    once.forget = found.clear  # type: ignore[attr-defined]
    return once
