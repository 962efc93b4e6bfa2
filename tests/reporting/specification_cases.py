"""Reading figures that are values: what a panel holds, by name."""

import math
from typing import Any

from ropewalk.reporting.figures.primitives import (
    Boxes,
    Figure,
    Line,
    Note,
    Panel,
    Rule,
    Span,
    Steps,
    Whiskers,
)

NAN = math.nan


def only(figure: Figure) -> Panel:
    (panel,) = figure.panels
    return panel


def of_kind(panel: Panel, kind: type) -> list[Any]:
    return [mark for mark in panel.marks if isinstance(mark, kind)]


def lines(panel: Panel) -> dict[str, Any]:
    """Lines and steps with a name."""
    return {mark.name: mark for mark in panel.marks if isinstance(mark, Line | Steps) and mark.name}


def points(panel: Panel, **look: Any) -> list[tuple[float, float]]:
    """Places of the marks without a line that look so."""
    return [
        place
        for line in of_kind(panel, Line)
        if not line.look.dash and all(getattr(line.look, key) == value for key, value in look.items())
        for place in zip(line.x, line.y, strict=True)
    ]


def notes(panel: Panel) -> list[str]:
    return [note.text for note in of_kind(panel, Note)]


def ends(panel: Panel) -> list[str]:
    """Words at the ends of lines."""
    return [line.end for line in of_kind(panel, Line) if line.end]


def rules(panel: Panel) -> dict[str, float]:
    """Where the lines across a panel lie, by their words or their name."""
    return {rule.words or rule.name: rule.at for rule in of_kind(panel, Rule)}


def names(panel: Panel) -> list[str]:
    """What stands in the key, if the panel has one."""
    found = [getattr(mark, "name", "") for mark in panel.marks] if panel.key else []
    return list(dict.fromkeys(name for name in found if name))


def ticks(axis: Any) -> list[str]:
    return [words for _, words in axis.ticks]


def whiskers(panel: Panel) -> list[tuple[float, float, float]]:
    """Place, low and high end of every interval."""
    return [
        each for mark in of_kind(panel, Whiskers) for each in zip(mark.at, mark.low, mark.high, strict=True)
    ]


def boxes(panel: Panel) -> list[tuple[float, float, float, float]]:
    """Left, right, low and high of every box."""
    return [
        each
        for mark in of_kind(panel, Boxes)
        for each in zip(mark.left, mark.right, mark.low, mark.high, strict=True)
    ]


def spans(panel: Panel) -> list[tuple[float, float]]:
    return [(mark.low, mark.high) for mark in of_kind(panel, Span)]
