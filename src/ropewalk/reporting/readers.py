"""Show what other programs make of a checkpoint's RoPE."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.readers import Reading
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import ResultTable


def readers_tables(found: Sequence[Reading], title: str) -> list[ResultTable]:
    """One line for each program, whether it computes the same frequencies; then one for each, how to start it."""
    programs = ResultTable(
        title,
        ("program", "RoPE", "default tokens", "difference"),
        tuple(
            (
                each.program,
                each.verdict,
                MISSING if each.served is None else f"{each.served:,}",
                each.detail or MISSING,
            )
            for each in found
        ),
        text_columns=4,
        notes=(
            "same: the program computes the same frequencies and attention factor as transformers 5",
            "default tokens: context length that it serves without an option",
        ),
    )
    # A table of its own, because a command with overrides is longer than a terminal is wide.
    commands = [(each.program, each.option or each.launch) for each in found]
    lines = tuple((program, command) for program, command in commands if command is not None)
    served = ResultTable(
        "Commands that serve the whole context correctly", ("program", "command"), lines, text_columns=2
    )
    return [programs, served] if lines else [programs]
