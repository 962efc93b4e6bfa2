"""training_row: a packed row's plain values as the tensors that training takes."""

from __future__ import annotations

import numpy as np
import torch

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.data.rows.assemble import PackedRow
from ropewalk.data.rows.settings import PackingSettings


def training_row(row: PackedRow, settings: PackingSettings) -> Row:
    """A training row with labels that never cross documents and never name a tag or padding.

    Padding is a document of its own at the row's end, so no document sees it under any pattern.

    Args:
        row: the packed row.
        settings: the settings it was packed with.
    """
    layout = PackedLayout.from_segments(
        row.segment_lengths,
        row.segment_documents,
        settings.pattern,
        settings.anchor_length,
        settings.positions,
    )
    tensor = torch.from_numpy(np.asarray(row.input_ids).astype(np.int64))
    trained = torch.ones(len(tensor), dtype=torch.bool)
    for start, stop in zip(row.masked[::2], row.masked[1::2], strict=True):
        trained[start:stop] = False
    return Row(tensor, next_token_labels(tensor, layout, trained), layout)
