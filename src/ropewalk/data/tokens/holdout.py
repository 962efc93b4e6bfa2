"""Holding validation documents out of a corpus in which some came as text and some as token ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.tokens.corpus import Corpus
from ropewalk.data.tokens.split import Split, ValidationSettings, split_documents
from ropewalk.data.tokens.tokenise import SpecialTokens


def hold_out(corpus: Corpus, settings: ValidationSettings, special: SpecialTokens) -> Split:
    """Choose the validation documents, and keep every copy of one out of training.

    Copies of a text have one hash, and so have copies of token ids; a text and its own token ids have two. So
    where a corpus holds both kinds, training documents of the length of one that is held out are compared by
    their ids, a BOS and an EOS at their ends left aside.

    Args:
        corpus: all documents.
        settings: how many are held out.
        special: the tokenizer's special tokens.
    """
    split = split_documents(corpus.hashes, settings)
    tokenised = (corpus.characters == 0) & (corpus.lengths > 0)
    if not len(split.validation) or not tokenised.any() or tokenised.all():
        return split
    starts = (corpus.first_ids == special.bos) if special.bos is not None else np.zeros(len(corpus), bool)
    stops = (corpus.last_ids == special.eos) if special.eos is not None else np.zeros(len(corpus), bool)
    lengths = np.maximum(corpus.lengths - starts - stops, 0)

    def own(number: int) -> bytes:
        ids: NDArray[np.int32] = corpus.tokens(number)[int(starts[number]) :]
        return ids[: int(lengths[number])].tobytes()

    held = {own(number) for number in split.validation.tolist()}
    alike = split.training[np.isin(lengths[split.training], lengths[split.validation])]
    copies = np.array([number for number in alike.tolist() if own(number) in held], np.int64)
    training = split.training[~np.isin(split.training, copies)]
    # Two kinds of one text may both have been chosen; the first in the split's order stays.
    first: dict[bytes, int] = {}
    for number in split.validation.tolist():
        first.setdefault(own(number), number)
    validation = np.array(list(first.values()), np.int64)
    withheld = split.withheld_duplicates + len(copies) + len(split.validation) - len(validation)
    return replace(split, training=training, validation=validation, withheld_duplicates=withheld)
