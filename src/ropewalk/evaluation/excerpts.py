"""Excerpts of prompts, kept with the answers so that people can read them: both ends, and what the answer needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ropewalk.evaluation.prompt import turn_starts
from ropewalk.evaluation.samples import Sample

Part = tuple[int, str, str]
"""The index of a character in the prompt, the text that begins there, and the role of its turn: empty without turns."""

AT_EACH_END = 1000
"""Characters kept of the beginning and of the end of a long prompt."""
AROUND = 300
"""Characters kept on each side of what the answer needs within a long prompt."""
MOST_PLACES = 8
"""Most places within a long prompt that are kept."""


def excerpt(sample: Sample) -> tuple[Part, ...]:
    """Parts of a sample's prompt: all of a short one; otherwise its beginning, what the answer needs, and its end."""
    text, turns = sample.whole, turn_starts(sample.earlier, sample.text)
    wanted = [(0, AT_EACH_END), (len(text) - AT_EACH_END, len(text))]
    # A long reference, such as a whole sentence, is cut as well.
    wanted += [
        (start - AROUND, min(end, start + AROUND) + AROUND)
        for start, end in needles(text, sample.references, sample.details.get("spans", ()))[:MOST_PLACES]
    ]
    return parts_of(text, wanted, turns)


def needles(
    text: str, references: Sequence[str], spans: Sequence[Sequence[int]] = ()
) -> list[tuple[int, int]]:
    """First and last character (exclusive) of what the answer needs.

    Args:
        text: the whole prompt.
        references: strings that a correct answer contains. Without spans, the first place of any of them counts.
        spans: the places, if the task says them.
    """
    if spans:
        return [(start, end) for start, end in spans]
    places = [(text.find(each), len(each)) for each in references if each]
    return sorted((place, place + length) for place, length in places if place >= 0)[:1]


def parts_of(
    text: str, wanted: Sequence[tuple[int, int]], turns: Sequence[tuple[int, str]] = ()
) -> tuple[Part, ...]:
    """The wanted places of a text in order, without overlaps, cut where turns begin.

    Args:
        text: the whole prompt.
        wanted: first and last character (exclusive) of each place; may overlap, and exceed the text.
        turns: first character and role of each turn.
    """
    merged: list[tuple[int, int]] = []
    for start, end in sorted((max(0, start), min(len(text), end)) for start, end in wanted):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    found: list[Part] = []
    borders = [*turns, (len(text), "")] if turns else [(0, ""), (len(text), "")]
    for (begun, role), (ended, _) in pairwise(borders):
        within = [(max(start, begun), min(end, ended)) for start, end in merged]
        found += [(start, text[start:end], role) for start, end in within if start < end]
    return tuple(found)


def unmarked(text: str, role: str) -> str:
    """The text of a part without the mark by which :func:`~ropewalk.evaluation.prompt.plain_chat` begins a turn."""
    mark = f"{role.capitalize()}:"
    return text.removeprefix(mark).removeprefix(" ") if role and text.startswith(mark) else text


def gaps(parts: Sequence[Part], characters: int) -> Iterator[tuple[Part, int]]:
    """Each part of a prompt with so many characters with the number of characters left out after it."""
    starts = [*(start for start, _, _ in parts), characters]
    for part, (start, following) in zip(parts, pairwise(starts), strict=True):
        yield part, following - start - len(part[1])
