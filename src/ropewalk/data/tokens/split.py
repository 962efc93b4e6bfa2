"""Split documents into training and validation by their hashes, without copies of a document on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ropewalk.data.settings import ValidationSettings
    from ropewalk.data.tokens.corpus import Corpus
    from ropewalk.data.tokens.tokenise import SpecialTokens

_HASHES = 1 << 64


@dataclass(frozen=True, eq=False)
class Split:
    """Training and validation documents, by number.

    Attributes:
        training: int64, in reading order.
        validation: int64, in the order of hashes if a number was requested, or in reading order for a fraction.
        withheld_duplicates: number of further documents that are in neither: copies of validation documents, and texts
            that other rows hold out.
    """

    training: NDArray[np.int64]
    validation: NDArray[np.int64]
    withheld_duplicates: int


def split_documents(
    hashes: NDArray[np.uint64],
    settings: ValidationSettings,
    withheld: Sequence[int] = (),
) -> Split:
    """Choose the validation documents.

    Copies of one text are never in both sets: the first copy of a validation document is held out, and the others
    are withheld from both. The choice depends on the texts, not on their order. Under a fraction, a held-out document
    therefore stays held out if documents are added; under a number, until a document with a smaller hash is added.

    Args:
        hashes: uint64 ``[documents]``, hash of each document's text (:func:`text_hash`), in reading order.
        settings: number or fraction of documents to hold out.
        withheld: hashes of texts that are neither for training nor for validation.
    """
    chosen, validation = _chosen(hashes, settings)
    apart = np.array(withheld, np.uint64)
    validation = validation[~np.isin(hashes[validation], apart)]
    held = np.union1d(chosen, apart)
    training = np.flatnonzero(~_among(hashes, held)) if len(held) else np.arange(len(hashes))
    return Split(training, validation, len(hashes) - len(training) - len(validation))


def _chosen(
    hashes: NDArray[np.uint64], settings: ValidationSettings
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The hashes to hold out, ascending, and the number of the first document of each as in :class:`Split`."""
    if settings.documents:
        # The smallest hashes: which documents are held out depends on their text alone, not on order or number.
        texts, first = np.unique(hashes, return_index=True)
        return texts[: settings.documents], first[: settings.documents]
    # An exact comparison in integers: float64 could not distinguish neighbouring hashes.
    numbers = np.flatnonzero(hashes < np.uint64(int(settings.fraction * _HASHES)))
    texts, first = np.unique(hashes[numbers], return_index=True)
    return texts, np.sort(numbers[first])


def _among(values: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which values occur in ``known``, which is sorted and not empty."""
    places = np.searchsorted(known, values)
    found: NDArray[np.bool_] = known[np.minimum(places, len(known) - 1)] == values
    return found


def hold_out(
    corpus: Corpus, settings: ValidationSettings, special: SpecialTokens, withheld: Sequence[int] = ()
) -> Split:
    """Choose the validation documents, and keep every copy of them out of training.

    Copies of a text have equal hashes, and so have copies of token ids, but a text and its own token ids have
    different ones. If a corpus contains both kinds, training documents as long as a held-out document are therefore
    compared with it by their ids, without BOS and EOS at the ends.

    Args:
        corpus: all documents.
        settings: number or fraction of documents to hold out.
        special: the tokenizer's special tokens.
        withheld: hashes of texts that are neither for training nor for validation.
    """
    split = split_documents(corpus.hashes, settings, withheld)
    if not len(split.validation):
        return split
    tokenised = (corpus.characters == 0) & (corpus.lengths > 0)
    if not tokenised.any() or tokenised.all():
        return split
    starts = (corpus.first_ids == special.bos) if special.bos is not None else np.zeros(len(corpus), bool)
    stops = (corpus.last_ids == special.eos) if special.eos is not None else np.zeros(len(corpus), bool)
    lengths = np.maximum(corpus.lengths - starts - stops, 0)

    def own(number: int) -> bytes:
        ids: NDArray[np.int32] = corpus.tokens(number)[int(starts[number]) :]
        return ids[: int(lengths[number])].tobytes()

    held = {own(number) for number in split.validation.tolist()}
    # Lengths are in memory, token ids on disk: equal lengths first narrow down what must be read.
    alike = split.training[np.isin(lengths[split.training], lengths[split.validation])]
    copies = np.array([number for number in alike.tolist() if own(number) in held], np.int64)
    training = split.training[~np.isin(split.training, copies)]
    # A text and its own token ids have different hashes, so both may be chosen; keep the first.
    first: dict[bytes, int] = {}
    for number in split.validation.tolist():
        first.setdefault(own(number), number)
    validation = np.array(list(first.values()), np.int64)
    neither = split.withheld_duplicates + len(copies) + len(split.validation) - len(validation)
    return replace(split, training=training, validation=validation, withheld_duplicates=neither)
