"""Rows for a dry run: packed with the recipe's own documents where they are at hand, or with ones of equal length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.attention.options import EVERYTHING, Locality
from ropewalk.data import load_tokenizer, open_rows
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.read.first_lengths import first_lengths
from ropewalk.data.rows.assemble import PackedRow
from ropewalk.data.rows.packed_rows import PackedRows
from ropewalk.data.rows.plan import plan_rows
from ropewalk.data.settings import Packing
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.recipe.stage import Stage
from ropewalk.training.simulation.operations import visible_pairs

SAMPLED_ROWS = 4096
"""Rows of a folder whose lengths are read, evenly spread over all of them."""

Lengths = tuple[int, ...]
"""Tokens of each document of a row, without the anchor."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of documents to pack rows with, or a folder of packed rows.

    Attributes:
        words: what is assumed, for people.
        lengths: tokens of each document; empty for one document per row.
        packing: how rows are packed.
        folder: folder of the recipe's packed rows; None if it has none.
        short_length: most tokens of a short document, if the stage has short rows; otherwise None.
        short_folder: folder of the recipe's short rows; None if it has none.
    """

    words: str
    lengths: tuple[int, ...] = ()
    packing: Packing = "best_fit"
    folder: str | None = None
    short_length: int | None = None
    short_folder: str | None = None

    def packed(self, stage: Stage) -> StageRows:
        """All rows of a stage, or an even sample of the folder's."""
        if self.short_length is None or stage.short_rows is None:
            return self._packed(stage)
        limit = self.short_length
        of_short = stage.model_copy(
            update={"pattern": "intra_document", "positions": "reset", "short_rows": None}
        )
        long, short = (
            replace(self, lengths=tuple(each for each in self.lengths if (each <= limit) == is_short))
            for is_short in (False, True)
        )
        if not short.lengths:
            # As long as they may be, which takes most attention.
            short = replace(short, lengths=(limit,) * max(1, stage.context // limit), packing="sequential")
        shorts = replace(short, folder=self.short_folder)._packed(of_short)
        return replace(long._packed(stage), short=shorts, short_share=stage.short_rows)

    def _packed(self, stage: Stage) -> StageRows:
        """Rows of one kind."""
        if self.folder is not None:
            folder = open_rows(self.folder)
            sampled = np.linspace(0, len(folder) - 1, min(len(folder), SAMPLED_ROWS)).astype(int).tolist()
            filled = [_document_lengths(folder.packed(number)) for number in sampled]
            return StageRows(stage, tuple(filled), folder, tuple(sampled))
        room = stage.context - int(stage.pattern == "anchor")
        if not self.lengths:
            return StageRows(stage, ((room,),))
        plan = plan_rows(np.array(self.lengths), room, self.packing, "pad")
        ends = np.split(plan.pieces.lengths, plan.row_starts[1:-1])
        rows = [tuple(each.tolist()) for each in ends]
        # What a row lacks is added as one more document, as packing adds padding.
        return StageRows(
            stage, tuple((*each, room - sum(each)) if sum(each) < room else each for each in rows)
        )


@dataclass(frozen=True, eq=False)
class StageRows:
    """Rows of a stage, by the documents in them.

    Attributes:
        stage: the stage.
        lengths: the documents of each row, or of each row of long documents.
        folder: the packed rows that they were read from; None for rows that are made here.
        numbers: number of each row in the folder.
        short: the stage's short rows, which are numbered behind the others; None if it has none.
        short_share: their share of the rows that are trained on.
    """

    stage: Stage
    lengths: tuple[Lengths, ...]
    folder: PackedRows | None = None
    numbers: tuple[int, ...] = ()
    short: StageRows | None = None
    short_share: float = 0.0

    @property
    def all_lengths(self) -> tuple[Lengths, ...]:
        """The documents of each row, of both kinds."""
        return self.lengths if self.short is None else self.lengths + self.short.lengths

    def most_documents(self) -> list[int]:
        """Numbers of rows for one forward pass, those with most documents."""
        lengths = self.all_lengths
        return self._first(sorted(range(len(lengths)), key=lambda number: -len(lengths[number])))

    def most_pairs(self) -> list[int]:
        """Numbers of rows for one forward pass, those with most visible pairs."""
        pairs = [self.pairs(number) for number in range(len(self.all_lengths))]
        return self._first(sorted(range(len(pairs)), key=lambda number: -pairs[number]))

    def typical(self) -> list[int]:
        """Numbers of rows for one forward pass, those whose visible pairs are nearest to the mean."""
        pairs = [self.pairs(number) for number in range(len(self.all_lengths))]
        mean = self._mean(pairs)
        return self._first(sorted(range(len(pairs)), key=lambda number: abs(pairs[number] - mean)))

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers; token ids of rows that are made here are 0."""
        return [self._row(number) for number in numbers]

    def share_of_pairs(self, numbers: Sequence[int], layers: Mapping[Locality, int]) -> float:
        """Mean number of visible pairs of all rows, divided by that of the rows with these numbers.

        Args:
            numbers: numbers of rows.
            layers: number of layers of each window or chunk.
        """

        def weighted(of: Sequence[int]) -> list[int]:
            return [sum(layers[each] * self.pairs(number, each) for each in layers) for number in of]

        chosen = weighted(numbers)
        return self._mean(weighted(range(len(self.all_lengths)))) / (sum(chosen) / len(chosen))

    def _mean(self, of_rows: Sequence[int]) -> float:
        """Mean over the rows of a training, of a number for each row, of both kinds."""
        long, short = of_rows[: len(self.lengths)], of_rows[len(self.lengths) :]
        mean = sum(long) / len(long)
        return mean if not short else mean + self.short_share * (sum(short) / len(short) - mean)

    def pairs(self, number: int, locality: Locality = EVERYTHING) -> int:
        """Query-key pairs that a kernel computes for a row; the anchor's keys are merged to documents without it."""
        if self.short is not None and number >= len(self.lengths):
            return self.short.pairs(number - len(self.lengths), locality)
        anchor, lengths = self.anchor, self.lengths[number]
        if self.stage.pattern == "full":
            return _pairs_of_run(anchor + sum(lengths), locality)
        if self.stage.pattern == "intra_document":
            return sum(_pairs_of_run(run, locality) for run in lengths)
        first, *others = lengths
        return _pairs_of_run(anchor + first, locality) + sum(
            _pairs_of_run(run, locality, anchor) for run in others
        )

    @property
    def anchor(self) -> int:
        """Tokens of the anchor."""
        return (
            int(self.stage.pattern == "anchor") if self.folder is None else self.folder.settings.anchor_length
        )

    def _first(self, numbers: Sequence[int]) -> list[int]:
        # Rows are repeated where there are too few.
        return [numbers[each % len(numbers)] for each in range(self.stage.rows_per_batch)]

    def _row(self, number: int) -> Row:
        if self.short is not None and number >= len(self.lengths):
            return self.short._row(number - len(self.lengths))
        if self.folder is not None:
            return self.folder[self.numbers[number]]
        stage = self.stage
        layout = PackedLayout.from_lengths(self.lengths[number], stage.pattern, self.anchor, stage.positions)
        ids = torch.zeros(stage.context, dtype=torch.int64)
        return Row(ids, next_token_labels(ids, layout), layout)


def _document_lengths(row: PackedRow) -> Lengths:
    """Tokens of each document of a row; an interleaved document has several segments."""
    return tuple(np.bincount(row.segment_documents, row.segment_lengths).astype(int).tolist())


@cache
def _pairs_of_run(length: int, locality: Locality, before: int = 0) -> int:
    """Pairs of a run of which this many tokens come before these, from which chunks are counted."""
    if locality.chunk is None:
        return visible_pairs(length, length, locality.window)
    # The rest of the chunk in which the anchor ends.
    first = min(length, -before % locality.chunk)
    whole, rest = divmod(length - first, locality.chunk)
    each = Locality(locality.window)
    return (
        whole * _pairs_of_run(locality.chunk, each) + _pairs_of_run(rest, each) + _pairs_of_run(first, each)
    )


def documents_of(
    recipe: Recipe,
    number: int,
    document_length: int | None,
    context: RunContext,
    short_length: int | None = None,
) -> Documents:
    """The documents to plan a stage with: of a given length, the recipe's own, or one per row.

    Args:
        recipe: the recipe.
        number: index of the stage, from 0.
        document_length: tokens of each document, all equal; None for the recipe's own.
        context: reporter of progress.
        short_length: most tokens of a short document, if the stage has short rows.
    """
    found = _documents_of(recipe, number, document_length, context, short_length)
    if short_length is None:
        return found
    share = recipe.stages[number].short_rows
    words = f"{found.words}; {share:.0%} of the rows have only documents of at most {short_length:,} tokens"
    return replace(found, words=words, short_length=short_length)


def _documents_of(
    recipe: Recipe, number: int, document_length: int | None, context: RunContext, short_length: int | None
) -> Documents:
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
            there = [rows for rows in map(open_rows, folders) if rows.settings.context == stage.context]
            long = [rows for rows in there if rows.settings.documents_above == short_length]
            short = [rows for rows in there if rows.settings.documents_up_to == short_length]
            if long and short:
                packed = Documents(f"the packed rows in {long[0].folder}", folder=str(long[0].folder))
                return packed if short_length is None else replace(packed, short_folder=str(short[0].folder))
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
