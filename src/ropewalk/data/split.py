"""Training and validation documents, told apart by a hash of their text alone."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ropewalk.data.documents import Document
from ropewalk.errors import RopewalkError

_HASHES = 1 << 64


@dataclass(frozen=True)
class ValidationSettings:
    """How many documents are held out; neither given means none.

    Attributes:
        documents: exactly this many documents (fewer only if the corpus has fewer): those whose hashes are
            smallest.
        fraction: about this share of the documents, from 0 to less than 1.

    Raises:
        RopewalkError: if a value is out of range or both are given.
    """

    documents: int = 0
    fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.documents < 0:
            raise RopewalkError(f"validation documents must be 0 or more, got {self.documents}")
        if not 0 <= self.fraction < 1:
            raise RopewalkError(f"validation fraction must be from 0 to less than 1, got {self.fraction}")
        if self.documents and self.fraction:
            raise RopewalkError(
                f"give a number of validation documents or a fraction, not both "
                f"(got {self.documents} and {self.fraction})"
            )


@dataclass
class SplitCounts:
    """What split_documents did; it is filled while the documents are consumed.

    Attributes:
        training_documents, validation_documents: documents of each side.
        withheld_duplicates: further copies of validation documents, kept out of both sides.
    """

    training_documents: int = 0
    validation_documents: int = 0
    withheld_duplicates: int = 0


def text_hash(text: str) -> int:
    """A number from 0 to 2**64 - 1 that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def split_documents(
    documents: Iterable[Document], settings: ValidationSettings, counts: SplitCounts | None = None
) -> Iterator[tuple[Document, bool]]:
    """Mark each document as validation (True) or training (False).

    Copies of one text never lie on both sides: of a validation document the first copy is kept, and the
    others are withheld. The choice depends on the texts, not on their order, so a document that was held
    out stays so when others are added around it (by fraction), or until one with a smaller hash comes (by
    number).

    Args:
        documents: read once. By number, the candidates are held in memory; a document that drops out of
            them goes to training at that moment, and the validation documents come last, by hash.
        settings: how many.
        counts: filled with the numbers of each side.
    """
    counts = SplitCounts() if counts is None else counts
    marked = (
        _smallest_hashes(documents, settings.documents, counts)
        if settings.documents
        else _below_threshold(documents, settings.fraction, counts)
    )
    for document, validation in marked:
        counts.validation_documents += validation
        counts.training_documents += not validation
        yield document, validation


def _below_threshold(
    documents: Iterable[Document], fraction: float, counts: SplitCounts
) -> Iterator[tuple[Document, bool]]:
    threshold = int(fraction * _HASHES)
    seen: set[int] = set()
    for document in documents:
        digest = text_hash(document.text) if threshold else _HASHES
        if digest >= threshold:
            yield document, False
        elif digest in seen:
            counts.withheld_duplicates += 1
        else:
            seen.add(digest)
            yield document, True


@dataclass
class _Candidate:
    digest: int
    copies: list[Document] = field(default_factory=list)

    def __lt__(self, other: _Candidate) -> bool:
        """Largest hash first, so that the heap's root is the one to drop out."""
        return self.digest > other.digest


def _smallest_hashes(
    documents: Iterable[Document], number: int, counts: SplitCounts
) -> Iterator[tuple[Document, bool]]:
    heap: list[_Candidate] = []
    by_digest: dict[int, _Candidate] = {}
    for document in documents:
        digest = text_hash(document.text)
        candidate = by_digest.get(digest)
        if candidate is not None:
            candidate.copies.append(document)
            continue
        if len(heap) == number and digest > heap[0].digest:
            # The largest candidate only ever falls, so no later copy of this text can become one.
            yield document, False
            continue
        candidate = by_digest[digest] = _Candidate(digest, [document])
        heapq.heappush(heap, candidate)
        if len(heap) > number:
            dropped = heapq.heappop(heap)
            del by_digest[dropped.digest]
            for copy in dropped.copies:
                yield copy, False
    for candidate in sorted(heap, reverse=True):
        counts.withheld_duplicates += len(candidate.copies) - 1
        yield candidate.copies[0], True
