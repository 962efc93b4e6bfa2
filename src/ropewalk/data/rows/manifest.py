"""Contents of a packing run's manifest: counts, shares, a full account of tokens, and the mixture's report."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.mixture import Mixture
from ropewalk.data.rows.special_tokens import PackingCounts
from ropewalk.data.statistics import length_statistics
from ropewalk.data.tokens.corpus import Corpus
from ropewalk.data.tokens.split import Split
from ropewalk.versions import VERSION

_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "transformers")


def length_states(
    corpus: Corpus, training: NDArray[np.int64], mixed: NDArray[np.int64] | None, context: int
) -> dict[str, Any]:
    """Statistics of the documents before and after mixing, whole; in the rows themselves they are cut.

    Args:
        corpus: all documents that were read.
        training: those for training.
        mixed: what the mixture made of them, repeated ones each time; None where there is none.
        context: tokens of a row.
    """

    def statistics(numbers: NDArray[np.int64], hashes: NDArray[np.uint64] | None) -> dict[str, Any]:
        # All in their order need no copy.
        chosen = slice(None) if len(numbers) == len(corpus) and mixed is None else numbers
        found = length_statistics(
            corpus.lengths[chosen],
            corpus.source_ids[chosen],
            corpus.sources,
            row_length=context,
            hashes=None if hashes is None else hashes[chosen],
        )
        plain: dict[str, Any] = _plain(asdict(found))
        return plain

    return {
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
    """The part of a manifest that tells what was read, held out, mixed and packed.

    Args:
        corpus: all documents that were read.
        split: which of them are for training.
        mixture: what was made of these; None took each once.
        documents: the documents that were packed, by number, repeated ones each time.
        counts: where packing put their tokens.
    """
    return {
        "counts": {
            "reading": {**asdict(corpus.reading), "tokens": int(corpus.lengths.sum())},
            "split": _split_counts(split, corpus),
            "mixture": _mixture_counts(split.training, documents, corpus),
            "packing": asdict(counts),
        },
        "sources": _totals(corpus, documents),
        "validation_sources": _totals(corpus, split.validation),
        "mixture": None if mixture is None else _plain(asdict(mixture.report)),
        "tokens_digest": corpus.digest,
    }


def versions() -> dict[str, str]:
    """Versions of what packed rows may depend on."""
    return {
        "ropewalk": VERSION,
        "python": platform.python_version(),
        **_of_libraries(),
    }


@cache
def _of_libraries() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}


def _split_counts(split: Split, corpus: Corpus) -> dict[str, int]:
    held = int(corpus.lengths[split.validation].sum())
    return {
        "training_documents": len(split.training),
        "validation_documents": len(split.validation),
        "withheld_duplicates": split.withheld_duplicates,
        "validation_tokens": held,
        "withheld_tokens": int(corpus.lengths.sum() - corpus.lengths[split.training].sum()) - held,
    }


def _mixture_counts(
    training: NDArray[np.int64], documents: NDArray[np.int64], corpus: Corpus
) -> dict[str, int]:
    """Documents that the mixture leaves out, and those it takes more than once."""
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
    ids, lengths = corpus.source_ids[documents], corpus.lengths[documents]
    counts = np.bincount(ids, minlength=len(corpus.sources))
    tokens = np.zeros(len(corpus.sources), np.int64)
    np.add.at(tokens, ids, lengths)
    return {
        name: {"documents": int(counts[i]), "tokens": int(tokens[i])}
        for i, name in enumerate(corpus.sources)
        if counts[i]
    }


def _plain(value: Any) -> Any:
    """As JSON has it: a share of nothing is null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def token_account(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The tokens of a packing run, by what became of them.

    Read from top to bottom: ``tokens_in + repeated`` are held out, withheld, left unread by the mixture,
    dropped as too long, give way to our own BOS, or are packed; these and what is added make up
    ``tokens_packed + tokens_remainder``. Both equations hold exactly (:func:`imbalance`).

    Args:
        counts: ``counts`` of a manifest.

    Returns:
        ``tokens_in`` (own tokens of all documents that were read), ``repeated``, ``validation``, ``withheld``
        (copies of validation documents), ``unread``, ``dropped``, ``own_bos``, ``own`` (own tokens in rows or
        the remainder), ``bos``, ``eos``, ``tags``, ``padding``, ``tokens_packed`` (rows times their length) and
        ``tokens_remainder``.
    """
    split, mixture, packing = counts["split"], counts["mixture"], counts["packing"]
    return {
        "tokens_in": counts["reading"]["tokens"],
        "repeated": mixture["repeated_tokens"],
        "validation": split["validation_tokens"],
        "withheld": split["withheld_tokens"],
        "unread": mixture["unread_tokens"],
        "dropped": packing["dropped_tokens"],
        "own_bos": packing["own_bos_tokens"],
        "own": packing["document_tokens"],
        "bos": packing["bos_tokens"],
        "eos": packing["eos_tokens"],
        "tags": packing["tag_tokens"],
        "padding": packing["padding_tokens"],
        "tokens_packed": packing["row_tokens"],
        "tokens_remainder": packing["remainder_tokens"],
    }


def imbalance(account: Mapping[str, int]) -> tuple[int, int]:
    """By how many tokens the account's two equations fail; (0, 0) for every run."""
    left_out = ("validation", "withheld", "unread", "dropped", "own_bos")
    own = account["tokens_in"] + account["repeated"] - sum(account[key] for key in left_out)
    added = sum(account[key] for key in ("bos", "eos", "tags", "padding"))
    return own - account["own"], own + added - account["tokens_packed"] - account["tokens_remainder"]


def summary(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says in a few numbers: documents, tokens in and out, rows, and the whole account."""
    counts = manifest["counts"]
    account = token_account(counts)
    return {
        "documents": counts["reading"]["documents"],
        **{key: account[key] for key in ("tokens_in", "tokens_packed", "tokens_remainder")},
        "rows": counts["packing"]["rows"],
        "account": account,
    }
