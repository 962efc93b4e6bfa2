"""Show what other programs make of a checkpoint's RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from ropewalk.compatibility import Reading
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.rope.methods.longrope import RIGHT_AT_EVERY_LENGTH


def verdict_cell(reading: Reading) -> str:
    """The verdict, with the length up to which inputs differ although longer ones do not."""
    if reading.short is None:
        return reading.verdict
    differs = f"differs up to {reading.short:,}"
    return differs if reading.verdict == "long inputs only" else f"{reading.verdict}, then {differs}"


def readers_parts(found: Sequence[Reading], title: str) -> Iterator[Part]:
    """A table with a line for each program, what the differences are, and a table of how to start each program."""
    yield ResultTable(
        title,
        ("program", "RoPE", "default tokens"),
        tuple(
            (each.program, verdict_cell(each), MISSING if each.served is None else f"{each.served:,}")
            for each in found
        ),
        text_columns=2,
        notes=(
            "same: the program computes the same frequencies and attention factor as transformers 5",
            "default tokens: context length that it serves without an option",
            *([RIGHT_AT_EVERY_LENGTH] if any(each.short is not None for each in found) else []),
        ),
    )
    # Sentences are not cells: they would make the table wider than any terminal. Programs may share one.
    programs: dict[str, list[str]] = {}
    for each in found:
        if each.detail:
            programs.setdefault(each.detail, []).append(each.program)
    for detail, names in programs.items():
        yield Text(f"- {', '.join(names)}: {detail}")
    # A table of its own, because a command with overrides is longer than a terminal is wide.
    lines = tuple(
        (f"{each.program}, {inputs}" if inputs else each.program, command)
        for each in found
        for inputs, command in each.commands
    )
    if not lines:
        return
    # The file that a command names first: with `ropewalk export --gguf`, FILE.gguf is made of it.
    needed = next(
        (name for name in ("CONVERTED.gguf", "FILE.gguf") for _, line in lines if name in line), None
    )
    yield ResultTable(
        "Commands that serve the whole context correctly",
        ("program", "command"),
        lines,
        text_columns=2,
        notes=()
        if needed is None
        else (f"{needed}: the model as converted by llama.cpp's convert_hf_to_gguf.py",),
    )
