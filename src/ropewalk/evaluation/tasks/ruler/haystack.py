"""Text that hides something: lines or sentences with other lines between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Percent: the depths at which essays hide a needle, 40 from 0 to 100, rounded to whole ones."""


def hide_in_lines(lines: Sequence[str], hidden: Sequence[str], positions: Sequence[int]) -> str:
    """Lines with others between them.

    Args:
        lines: the haystack.
        hidden: what is put in, in order of its position.
        positions: for each the line of the haystack that it stands before, ascending.

    Returns:
        All lines, a newline between them.
    """
    parts: list[str] = []
    done = 0
    for line, position in zip(hidden, positions, strict=True):
        parts += lines[done:position]
        parts.append(line)
        done = position
    parts += lines[done:]
    return "\n".join(parts)


def hide_in_sentences(
    prose: Callable[[int, int], str], sentences: int, hidden: Sequence[str], depths: Sequence[int]
) -> str:
    """Sentences with others between them.

    Args:
        prose: the haystack from one sentence to before another, joined by spaces; empty between equal ones.
        sentences: how many the haystack has.
        hidden: what is put in, in order of its depth.
        depths: percent of the sentences that stand before each.

    Returns:
        The stretches of prose and what is hidden, a space between them. One stands at either end also where
        there is no prose, as upstream's joining has it.
    """
    parts: list[str] = []
    done = 0
    for line, depth in zip(hidden, sorted(depths), strict=True):
        position = int(sentences * (depth / 100))
        parts += [prose(done, position), line]
        done = position
    return " ".join([*parts, prose(done, sentences)])


def depth_of(line: str, context: str) -> float:
    """Share of the context's characters that stand before a line; 0 is the beginning."""
    return round(context.index(line) / len(context), 4)
