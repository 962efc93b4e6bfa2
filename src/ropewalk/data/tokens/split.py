"""Training and validation documents, told apart by a hash of their text alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, eq=False)
class Split:
    """Training and validation documents, by number.

    Attributes:
        training: int64, in reading order.
        validation: int64; by number in the order of their hashes, by fraction in reading order.
        withheld_duplicates: further copies of validation documents, kept out of both sides.
    """

    training: NDArray[np.int64]
    validation: NDArray[np.int64]
    withheld_duplicates: int


def text_hash(text: str) -> int:
    """A number from 0 to 2**64 - 1 that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def split_documents(hashes: NDArray[np.uint64], settings: ValidationSettings) -> Split:
    """Choose the validation documents.

    Copies of one text never lie on both sides: of a validation document the first copy is kept, and the
    others are withheld. The choice depends on the texts, not on their order, so a document that was held
    out stays so when others are added around it (by fraction), or until one with a smaller hash comes (by
    number).

    Args:
        hashes: uint64, the hash of each document's text (:func:`text_hash`), in reading order.
        settings: how many.
    """
    numbers = np.arange(len(hashes))
    if settings.documents:
        texts, first = np.unique(hashes, return_index=True)
        chosen, validation = texts[: settings.documents], first[: settings.documents]
    else:
        # Compared as Python's numbers would be: hash < fraction * 2**64, exactly.
        below = numbers[hashes < np.uint64(int(settings.fraction * _HASHES))]
        chosen, first = np.unique(hashes[below], return_index=True)
        validation = np.sort(below[first])
    held = np.isin(hashes, chosen)
    return Split(numbers[~held], validation.astype(np.int64), int(held.sum()) - len(validation))
