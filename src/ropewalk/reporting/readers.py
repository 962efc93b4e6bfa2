"""Show what other programs make of a checkpoint's RoPE."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.readers import Reading
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import ResultTable
from ropewalk.rope.methods.longrope import RIGHT_AT_EVERY_LENGTH


def verdict_cell(reading: Reading) -> str:
    """The verdict, with the length up to which inputs differ although longer ones do not."""
    if reading.short is None:
        return reading.verdict
    differs = f"differs up to {reading.short:,}"
    return differs if reading.verdict == "long inputs only" else f"{reading.verdict}, then {differs}"


def readers_tables(found: Sequence[Reading], title: str) -> list[ResultTable]:
    """One line for each program, whether it computes the same frequencies; then one for each, how to start it."""
    programs = ResultTable(
        title,
        ("program", "RoPE", "default tokens", "difference"),
        tuple(
            (
                each.program,
                verdict_cell(each),
                MISSING if each.served is None else f"{each.served:,}",
                each.detail or MISSING,
            )
            for each in found
        ),
        text_columns=4,
        notes=(
            "same: the program computes the same frequencies and attention factor as transformers 5",
            "default tokens: context length that it serves without an option",
            *([RIGHT_AT_EVERY_LENGTH] if any(each.short is not None for each in found) else []),
        ),
    )
    # A table of its own, because a command with overrides is longer than a terminal is wide.
    lines = tuple(
        (f"{each.program}, {inputs}" if inputs else each.program, command)
        for each in found
        for inputs, command in each.commands
    )
    # The file that a command names first: with `ropewalk export --gguf`, FILE.gguf is made of it.
    needed = next(
        (name for name in ("CONVERTED.gguf", "FILE.gguf") for _, line in lines if name in line), None
    )
    served = ResultTable(
        "Commands that serve the whole context correctly",
        ("program", "command"),
        lines,
        text_columns=2,
        notes=()
        if needed is None
        else (f"{needed}: the model as converted by llama.cpp's convert_hf_to_gguf.py",),
    )
    return [programs, served] if lines else [programs]
