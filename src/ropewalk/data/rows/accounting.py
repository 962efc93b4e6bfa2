"""Where every token went, in one table: from the documents that were read to the rows that are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
