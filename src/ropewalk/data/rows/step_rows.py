"""The rows of a stage that a step trains on, from one folder, or from one for long and another for short documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ropewalk.data.rows.kinds import short_rows_of
from ropewalk.data.rows.packed_rows import PackedRows
from ropewalk.data.rows.training_rows import rows_at
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row

SAME = ("inputs", "specs", "validation")
"""Keys of manifests that decide which documents are trained on, and which are held out."""


class StepRow(NamedTuple):
    """A row of a step: its folder, and its number there."""

    folder: PackedRows
    number: int


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Rows of a training stage, of one folder, or of one folder for long and another for short documents.

    Attributes:
        folder: the rows; of long documents, if there is another folder.
        short: rows of short documents; None if all rows are in one folder.
        short_share: share of the rows that are of short documents, between 0 and 1; 0 without them.

    Raises:
        RopewalkError: if the folders do not divide documents at one length, or have rows of different lengths.
    """

    folder: PackedRows
    short: PackedRows | None = None
    short_share: float = 0.0

    def __post_init__(self) -> None:
        if self.short is None:
            return
        long, short = self.folder.settings, self.short.settings
        if short.documents_up_to is None or short.documents_up_to != long.documents_above:
            raise RopewalkError(
                f"rows of short and of long documents must divide them at one length, but {self.short.folder} has "
                f"documents_up_to {short.documents_up_to} and {self.folder.folder} documents_above "
                f"{long.documents_above}; pack both with the same length"
            )
        other = next((key for key in SAME if self.short.manifest[key] != self.folder.manifest[key]), None)
        if other is not None or short.tag != long.tag:
            raise RopewalkError(
                f"rows of short and of long documents must come from the same documents, but the {other or 'tag'} of "
                f"{self.short.folder} and {self.folder.folder} differ; pack both with the same sources and settings"
            )
        if short.context != long.context:
            raise RopewalkError(
                f"rows of short and of long documents must have one length, but {self.short.folder} has rows of "
                f"{short.context} tokens and {self.folder.folder} of {long.context}; pack both with the same context"
            )

    def of_step(self, step: int, rows_per_step: int, seed: int) -> list[StepRow]:
        """Rows that one optimizer step trains on, over all ranks; see :func:`rows_for_step`.

        After any number of steps, ``short_share`` of the rows were of short documents, rounded down to whole rows.
        Each kind has its own order. Within a step, rows of long documents come first, so that ranks that take every
        n-th row get nearly equal numbers of both kinds.
        """
        before, after = (self.short_rows(number * rows_per_step) for number in (step, step + 1))
        first = step * rows_per_step - before
        places = range(first, first + rows_per_step - (after - before))
        found = [StepRow(self.folder, number) for number in rows_at(places, len(self.folder), seed)]
        if self.short is not None:
            numbers = rows_at(range(before, after), len(self.short), seed)
            found += [StepRow(self.short, number) for number in numbers]
        return found

    def short_rows(self, rows: int) -> int:
        """Number of rows of short documents among the first ``rows`` rows of the training."""
        return 0 if self.short is None else short_rows_of(self.short_share, rows)

    def read(self, row: StepRow) -> Row:
        """Read a row.

        Raises:
            RopewalkError: if its positions are not those of its kind, which decide the RoPE that it trains with.
        """
        found = row.folder[row.number]
        limit = None if self.short is None else self.short.settings.documents_up_to
        if limit is not None and (row.folder is self.short) != (found.layout.rope_length <= limit):
            raise RopewalkError(
                f"row {row.number} of {row.folder.folder} has positions up to {found.layout.rope_length - 1:,}, but "
                f"its folder was packed with {row.folder.settings.kind}; pack the rows again"
            )
        return found
