"""Rows for a dry run: packed with the recipe's own documents where they are at hand, or with ones of equal length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.data import load_tokenizer, open_rows
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.rows.plan import plan_rows
from ropewalk.data.settings import Packing
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.training.proposal import first_lengths
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.recipe.stage import Stage


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of documents to pack rows with, or a folder of packed rows.

    Attributes:
        words: what is assumed, for people.
        lengths: tokens of each document; empty for one document per row.
        packing: how rows are packed.
        folder: folder of the recipe's packed rows; None if it has none.
    """

    words: str
    lengths: tuple[int, ...] = ()
    packing: Packing = "best_fit"
    folder: str | None = None

    def rows(self, stage: Stage) -> list[Row]:
        """The rows of one forward pass; token ids of rows that are made here are 0."""
        if self.folder is not None:
            packed = open_rows(self.folder)
            return [packed[number % len(packed)] for number in range(stage.rows_per_batch)]
        anchor = int(stage.pattern == "anchor")
        room = stage.context - anchor
        filled = [[room]]
        if self.lengths:
            plan = plan_rows(np.array(self.lengths), room, self.packing, "pad")
            rows = [plan.row(number).lengths.tolist() for number in range(plan.num_rows)]
            # Rows are repeated where there are too few, and what a row lacks is added as one more document.
            filled = [[*each, room - sum(each)] if sum(each) < room else each for each in rows]
        return [_row(filled[number % len(filled)], stage, anchor) for number in range(stage.rows_per_batch)]


def _row(lengths: list[int], stage: Stage, anchor: int) -> Row:
    layout = PackedLayout.from_lengths(lengths, stage.pattern, anchor, stage.positions)
    ids = torch.zeros(stage.context, dtype=torch.int64)
    return Row(ids, next_token_labels(ids, layout), layout)


def documents_of(recipe: Recipe, number: int, document_length: int | None, context: RunContext) -> Documents:
    """The documents to plan a stage with: of a given length, the recipe's own, or one per row.

    Args:
        recipe: the recipe.
        number: index of the stage, from 0.
        document_length: tokens of each document, all equal; None for the recipe's own.
        context: reporter of progress.
    """
    stage = recipe.stages[number]
    if document_length is not None:
        room = stage.context - int(stage.pattern == "anchor")
        whole, rest = divmod(room, min(document_length, room))
        lengths = (min(document_length, room),) * whole + ((rest,) if rest else ())
        return Documents(f"documents of {document_length:,} tokens", lengths, "sequential")
    data = recipe.data if stage.data is None else stage.data
    try:
        folders = data.rows or recipe.data.rows
        if folders:
            packed = next(
                (rows for rows in map(open_rows, folders) if rows.settings.context == stage.context), None
            )
            if packed is not None:
                return Documents(f"the packed rows in {packed.folder}", folder=str(packed.folder))
            raise RopewalkError(f"no packed rows of {stage.context:,} tokens in {', '.join(folders)}")
        specs = list(data.sources or recipe.data.sources)
        tokenizer = load_tokenizer(str(resolve_model(recipe.model)))
        found, complete = first_lengths(specs, tokenizer, context)
    except RopewalkError as error:
        return Documents(f"one document per row, because the recipe's own documents cannot be read: {error}")
    which = (
        f"the recipe's {len(found):,} documents"
        if complete
        else f"the recipe's first {len(found):,} documents"
    )
    tokens = tuple(max(1, round(each)) for each in found)
    mean = sum(tokens) // max(1, len(tokens))
    return Documents(f"{which}, {mean:,} tokens each on average", tokens, recipe.data.packing)
