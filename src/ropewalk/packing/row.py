"""Row: one packed training row and the labels that belong to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.packing.layout import PackedLayout

IGNORED = -100
"""Label of a position whose target is not trained on, as in transformers and torch."""


@dataclass(frozen=True, eq=False)
class Row:
    """One packed row.

    Attributes:
        input_ids: int64 ``[total_length]``.
        labels: int64 ``[total_length]``, already shifted: ``labels[t]`` is the target *of* position t, or
            ``IGNORED``. Shifted on the whole row, so a shard of the row is a plain slice.
        layout: the row's PackedLayout.
    """

    input_ids: Tensor
    labels: Tensor
    layout: PackedLayout


def next_token_labels(input_ids: Tensor, layout: PackedLayout, trained: Tensor | None = None) -> Tensor:
    """Shifted targets that never cross from one document into another.

    The target of a token is the next token *of its own document*, which for an interleaved document may lie
    in a later segment. A document's last token has none, and neither has the anchor: its successor belongs to
    the first document, and no other document would train its first token from it.

    Args:
        input_ids: int64 ``[total_length]``.
        layout: the row's layout.
        trained: bool ``[total_length]``, False where a token must not be a target (a domain tag, say).

    Returns:
        int64 ``[total_length]`` with ``IGNORED`` where there is no target.
    """
    order = layout.document_order
    documents = layout.document_ids[order]
    here, following = order[:-1], order[1:]
    has_target = (documents[:-1] == documents[1:]) & (documents[:-1] >= 0)
    if trained is not None:
        has_target &= trained[following]
    labels = torch.full_like(input_ids, IGNORED)
    labels[here[has_target]] = input_ids[following[has_target]]
    return labels
