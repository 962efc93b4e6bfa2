"""Show what other programs make of a checkpoint's RoPE."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.readers import Reading
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import ResultTable


def readers_table(found: Sequence[Reading], title: str) -> ResultTable:
    """One line for each program: whether it computes the same frequencies, and how to start it."""
    return ResultTable(
        title,
        ("program", "RoPE", "tokens by itself", "command", "difference"),
        tuple(
            (
                each.program,
                each.verdict,
                MISSING if each.served is None else f"{each.served:,}",
                each.option or each.launch or MISSING,
                each.detail or MISSING,
            )
            for each in found
        ),
        text_columns=5,
        notes=("same: it computes the frequencies and the attention factor of transformers 5",),
    )
