"""Batches for other people's trainers: packed rows with their layout, and labels for losses that shift them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.choices import Pattern, Positions
from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.errors import RopewalkError

LOSS_MASKS = ("completion_mask", "assistant_masks")
"""Columns in which TRL marks the tokens that are targets."""


@dataclass(frozen=True)
class RowCollator:
    """A ``data_collator`` for transformers' Trainer.

    The model must come from :func:`ropewalk.load_model`, or be prepared with :func:`ropewalk.models.load.attach`.

    The samples of a micro-batch are either all rows of a packed folder (:class:`ropewalk.Row`), or all tokenised
    documents, which become one row. A document is a mapping with ``input_ids``. It may have ``labels`` (not shifted),
    with -100 for tokens that are not targets. Tokens with 0 in TRL's ``completion_mask`` or ``assistant_masks`` are not
    targets either.

    A batch has ``input_ids``, ``labels`` and ``position_ids``, all int64 ``[rows, length]``. The labels are not
    shifted, because transformers' losses shift them. A batch also has ``layout``, a tuple with the layout of each row,
    and an empty ``attention_mask``. With this mask, a model that does not read layouts fails, instead of letting
    documents attend to each other.

    Attributes:
        anchor: token ids that come before the documents of a row, usually BOS; required for the pattern ``anchor``.
        pattern: ``full``, ``intra_document`` or ``anchor``.
        positions: ``continuous`` or ``reset``; see :meth:`PackedLayout.from_lengths`.

    These attributes apply to documents. Rows of a packed folder already have an anchor, a pattern and positions.

    Raises:
        RopewalkError: when a batch is made, if it mixes rows with documents or rows of different lengths, if a document
            is padded or its labels are not its tokens, or if the anchor is missing.
    """

    anchor: Sequence[int] = ()
    pattern: Pattern = "anchor"
    positions: Positions = "continuous"

    def __call__(self, samples: Sequence[Row | Mapping[str, Any]]) -> dict[str, Any]:
        """The arguments of one model call.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``, int64 ``[rows, length]``, ``layout``, one for each row, and
            ``attention_mask``, which is empty: models that would ignore the layout fail with it.

        Raises:
            RopewalkError: if samples differ in kind or length, are padded, or have labels of other tokens.
        """
        rows = [sample for sample in samples if isinstance(sample, Row)]
        if not rows:
            rows = [self._row([each for each in samples if not isinstance(each, Row)])]
        elif len(rows) != len(samples):
            raise RopewalkError(
                "a batch contains both packed rows and documents; give the trainer only one of the two"
            )
        lengths = sorted({len(row.input_ids) for row in rows})
        if len(lengths) > 1:
            raise RopewalkError(
                f"all rows of a batch must have the same length, got lengths from {lengths[0]} to {lengths[-1]} tokens"
            )
        return {
            "input_ids": torch.stack([row.input_ids for row in rows]),
            "labels": torch.stack([_unshifted(row.labels) for row in rows]),
            # The layouts' own; TRL's SFTTrainer counts tokens with them.
            "position_ids": torch.stack([row.layout.position_ids for row in rows]),
            "layout": tuple(row.layout for row in rows),
            # A model that reads layouts replaces it; one that would ignore them cannot attend with it.
            "attention_mask": torch.empty(len(rows), 1, 0, 0),
        }

    def _row(self, documents: Sequence[Mapping[str, Any]]) -> Row:
        if self.pattern == "anchor" and not self.anchor:
            raise RopewalkError(
                "pattern='anchor' needs the ids of the anchor's tokens; pass anchor=[tokenizer.bos_token_id], or "
                "pattern='intra_document' if the tokenizer has no BOS"
            )
        ids, trained = [], [torch.ones(len(self.anchor), dtype=torch.bool)]
        for document in documents:
            tokens = torch.as_tensor(document["input_ids"], dtype=torch.int64)
            if "seq_lengths" in document:
                raise RopewalkError(
                    "the trainer has already packed several documents into a sample (key seq_lengths); set "
                    "packing=False, because RowCollator packs documents itself"
                )
            mask = document.get("attention_mask")
            if mask is not None and not bool(torch.as_tensor(mask).all()):
                raise RopewalkError(
                    "a document is padded (its attention_mask has zeros); leave out the padding"
                )
            labels = torch.as_tensor(document.get("labels", tokens), dtype=torch.int64)
            if labels.shape != tokens.shape or bool(((labels != tokens) & (labels != IGNORED)).any()):
                raise RopewalkError(
                    "the labels of a document must be its input_ids, not shifted, with -100 for tokens that are left "
                    "out of the loss"
                )
            target = labels != IGNORED
            for name in LOSS_MASKS:
                if name in document:
                    target = target & torch.as_tensor(document[name]).bool()
            ids.append(tokens)
            trained.append(target)
        layout = PackedLayout.from_lengths(
            [len(each) for each in ids], self.pattern, len(self.anchor), self.positions
        )
        row = torch.cat([torch.tensor(list(self.anchor), dtype=torch.int64), *ids])
        return Row(row, next_token_labels(row, layout, torch.cat(trained)), layout)


def _unshifted(labels: Tensor) -> Tensor:
    """Labels that a loss of transformers shifts back to these; also if the next token is in a later segment."""
    # The last token of a row has no target: it is the last of its document or padding.
    return torch.cat([labels.new_tensor([IGNORED]), labels[:-1]])
