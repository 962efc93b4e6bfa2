"""The order of rows in training: pure functions of the seed and the step, so a resumed run needs no state."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.data.rows.assemble import PADDING, PackedRow
from ropewalk.data.settings import PackingSettings
from ropewalk.errors import RopewalkError


def row_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Random order of the rows in one epoch.

    The order is computed from the raw words of a Philox generator, which numpy guarantees never to change. A newer
    numpy may change ``Generator.permutation``, and a resumed run would then train on other rows.

    Args:
        num_rows: number of rows, at least 1.
        seed: random seed, 0 or more.
        epoch: number of the epoch, from 0; each epoch has its own order.

    Returns:
        int64 ``[num_rows]``, each row once. The array is cached and read-only.

    Raises:
        RopewalkError: if an argument is out of range.
    """
    for name, value, least in (("num_rows", num_rows, 1), ("seed", seed, 0), ("epoch", epoch, 0)):
        if value < least:
            raise RopewalkError(f"{name} must be {least} or more, got {value}")
    return _row_order(num_rows, seed, epoch)


@lru_cache(maxsize=4)
def _row_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # A stable sort of random words is a uniform shuffle, unless two of the 64-bit words are equal.
    words = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def rows_for_step(step: int, rows_per_step: int, num_rows: int, seed: int) -> list[int]:
    """Rows that one optimizer step trains on, over all ranks.

    Steps take the rows of an epoch in its order, each once. If an epoch ends in the middle of a step, the step
    continues with the next epoch in its own order.

    Args:
        step: number of the step, from 0.
        rows_per_step: rows per step, at least 1.
        num_rows: number of rows in the data set, at least 1.
        seed: random seed, 0 or more.

    Raises:
        RopewalkError: if an argument is out of range.
    """
    if step < 0 or rows_per_step < 1:
        raise RopewalkError(
            f"step must be 0 or more and rows_per_step 1 or more, got step {step} and "
            f"rows_per_step {rows_per_step}"
        )
    # For its error alone, since without rows the division below would fail first.
    row_order(num_rows, seed, 0)
    return rows_at(range(step * rows_per_step, (step + 1) * rows_per_step), num_rows, seed)


def rows_at(positions: range, num_rows: int, seed: int) -> list[int]:
    """Rows at some places of a training that reads all rows in one random order after the other.

    Args:
        positions: places, from 0.
        num_rows, seed: as for :func:`rows_for_step`.
    """
    return [int(row_order(num_rows, seed, p // num_rows)[p % num_rows]) for p in positions]


def training_row(row: PackedRow, settings: PackingSettings) -> Row:
    """Convert a packed row to tensors, with labels that never cross documents and exclude tags and padding.

    Padding is a separate document at the end of the row, so no other token attends to it under any pattern.

    Args:
        row: the packed row.
        settings: the settings that it was packed with.
    """
    layout = PackedLayout.from_segments(
        row.segment_lengths,
        row.segment_documents,
        settings.pattern,
        settings.anchor_length,
        settings.positions,
    )
    # astype copies, because torch warns about read-only arrays such as those of a memory map.
    tensor = torch.from_numpy(np.asarray(row.input_ids).astype(np.int64))
    # All tokens stay visible to attention; masked ones are only left out as targets.
    trained = torch.ones(len(tensor), dtype=torch.bool)
    for start, stop in zip(row.masked[::2], row.masked[1::2], strict=True):
        trained[start:stop] = False
    filled = zip(row.segment_lengths, row.segment_documents, strict=True)
    padding = sum(length for length, document in filled if row.numbers[document] == PADDING)
    if padding and settings.positions == "reset":
        # Padding may be longer than every document, but must not decide the length that RoPE goes by.
        positions = layout.position_ids.clone()
        positions[-padding:] = 0
        layout = replace(layout, position_ids=positions)
    return Row(tensor, next_token_labels(tensor, layout, trained), layout, padding)
