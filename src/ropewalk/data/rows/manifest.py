"""Contents of a packing run's manifest: counts, shares, a full account of tokens, and the mixture's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.mixture import Mixture
from ropewalk.data.rows.special_tokens import PackingCounts
from ropewalk.data.statistics import length_statistics
from ropewalk.data.tokens.corpus import Corpus
from ropewalk.data.tokens.split import Split
from ropewalk.io.results import plain_json

LIBRARIES = ("numpy", "pyarrow", "tokenizers", "transformers")
"""What packed rows may depend on."""


def length_states(
    corpus: Corpus, training: NDArray[np.int64], mixed: NDArray[np.int64] | None, context: int
) -> dict[str, Any]:
    """Statistics of whole documents before and after mixing; in the rows, documents may be cut.

    Args:
        corpus: all documents that were read.
        training: numbers of the training documents.
        mixed: numbers of the documents that are packed, repeated ones each time; None if each of the training documents
            is packed once.
        context: tokens of a row.
    """

    def statistics(numbers: NDArray[np.int64], hashes: NDArray[np.uint64] | None) -> dict[str, Any]:
        found = length_statistics(
            corpus.lengths[numbers],
            corpus.source_ids[numbers],
            corpus.sources,
            row_length=context,
            hashes=None if hashes is None else hashes[numbers],
        )
        plain: dict[str, Any] = plain_json(found)
        return plain

    return {
        # Repeats by text are looked for here only; repeated readings are counted by the mixture.
        "corpus": statistics(training, corpus.hashes),
        "mixed": None if mixed is None else statistics(mixed, None),
    }


def description(
    corpus: Corpus,
    split: Split,
    mixture: Mixture | None,
    documents: NDArray[np.int64],
    counts: PackingCounts,
) -> dict[str, Any]:
    """The part of a manifest that describes what was read, held out, mixed and packed.

    Args:
        corpus: all documents that were read.
        split: the training and validation documents.
        mixture: the mixture of the training documents; None if each was read once.
        documents: numbers of the packed documents, repeated ones each time.
        counts: what became of their tokens.
    """
    reading = asdict(corpus.reading)
    for name in ("dropped_nulls", "span_documents"):
        if not reading[name]:
            # Absent where it is of no interest, as in manifests of earlier versions.
            del reading[name]
    return {
        "counts": {
            "reading": {**reading, "tokens": int(corpus.lengths.sum())},
            "split": _split_counts(split, corpus),
            "mixture": _mixture_counts(split.training, documents, corpus),
            "packing": asdict(counts),
        },
        "sources": _totals(corpus, documents),
        "validation_sources": _totals(corpus, split.validation),
        "mixture": None if mixture is None else plain_json(asdict(mixture.report)),
        "tokens_digest": corpus.digest,
    }


def _split_counts(split: Split, corpus: Corpus) -> dict[str, int]:
    held = int(corpus.lengths[split.validation].sum())
    kept = int(corpus.lengths[split.training].sum())
    return {
        "training_documents": len(split.training),
        "validation_documents": len(split.validation),
        "withheld_duplicates": split.withheld_duplicates,
        "validation_tokens": held,
        "withheld_tokens": int(corpus.lengths.sum()) - kept - held,
    }


def _mixture_counts(
    training: NDArray[np.int64], documents: NDArray[np.int64], corpus: Corpus
) -> dict[str, int]:
    """Counts of documents that the mixture leaves out or repeats."""
    if documents is training:
        once = int(len(training) > 0)
        counts = ("unread_documents", "unread_tokens", "repeated_documents", "repeated_tokens")
        return {**dict.fromkeys(counts, 0), "most_times": once}
    times = np.bincount(documents, minlength=len(corpus.lengths))[training]
    lengths = corpus.lengths[training]
    return {
        "unread_documents": int((times == 0).sum()),
        "unread_tokens": int(lengths[times == 0].sum()),
        "repeated_documents": int((times > 1).sum()),
        "repeated_tokens": int(((times - 1).clip(min=0) * lengths).sum()),
        "most_times": int(times.max(initial=0)),
    }


def _totals(corpus: Corpus, documents: NDArray[np.int64]) -> dict[str, dict[str, int]]:
    ids, tokens = corpus.source_ids[documents], np.zeros(len(corpus.sources), np.int64)
    counts = np.bincount(ids, minlength=len(tokens))
    # add.at sums integers exactly; bincount with weights would go through float64.
    np.add.at(tokens, ids, corpus.lengths[documents])
    return {
        name: {"documents": int(counts[i]), "tokens": int(tokens[i])}
        for i, name in enumerate(corpus.sources)
        if counts[i]
    }


def token_account(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Account for every token of a packing run.

    Two equations hold exactly::

        tokens_in + repeated + synthetic = validation + withheld + unread + dropped + own_bos + own
        own + bos + eos + tags + padding = tokens_packed + tokens_remainder

    Args:
        counts: ``counts`` of a manifest.

    Returns:
        Numbers of tokens: ``tokens_in`` (own tokens of all documents that were read), ``repeated`` (further readings
        by the mixture), ``validation``, ``withheld`` (copies of validation documents), ``unread`` (left out by the
        mixture), ``synthetic`` (of tasks woven into documents; absent without any), ``dropped`` (of documents longer
        than a row), ``own_bos`` (documents' BOS tokens that packing replaced), ``own`` (own tokens in rows or the
        remainder), ``bos``, ``eos``, ``tags`` and ``padding`` (added by packing), ``tokens_packed`` (rows times their
        length) and ``tokens_remainder``.
    """
    split, mixture, packing = counts["split"], counts["mixture"], counts["packing"]
    return {
        "tokens_in": counts["reading"]["tokens"],
        "repeated": mixture["repeated_tokens"],
        "validation": split["validation_tokens"],
        "withheld": split["withheld_tokens"],
        "unread": mixture["unread_tokens"],
        **({"synthetic": mixture["synthetic_tokens"]} if "synthetic_tokens" in mixture else {}),
        "dropped": packing["dropped_tokens"] + mixture.get("synthetic_cut_tokens", 0),
        "own_bos": packing["own_bos_tokens"],
        "own": packing["document_tokens"],
        "bos": packing["bos_tokens"],
        "eos": packing["eos_tokens"],
        "tags": packing["tag_tokens"],
        "padding": packing["padding_tokens"],
        "tokens_packed": packing["row_tokens"],
        "tokens_remainder": packing["remainder_tokens"],
    }


def summary(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of a manifest: numbers of documents, tokens and rows, and the whole account of tokens."""
    counts = manifest["counts"]
    account = token_account(counts)
    return {
        "documents": counts["reading"]["documents"],
        **{key: account[key] for key in ("tokens_in", "tokens_packed", "tokens_remainder")},
        "rows": counts["packing"]["rows"],
        "account": account,
    }
