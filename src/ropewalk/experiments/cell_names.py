"""Names of cells: what varies between them, in short words, with short numbers: ``base 1e4``, ``lr 2e-5``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.io.lengths import format_length

WORDS = {"rope_theta": "base", "learning_rate": "lr", "min_learning_rate": "min lr"}
"""Short words for the last part of a key; any other part stands for itself."""
AUTO_BASE = "base auto"
"""Name of a stage's RoPE whose base ropewalk recommends."""
STAGE = re.compile(r"stages\.(\d+)\.")
# Names appear in terminals and on pages, so only characters that are harmless in all of them.
PLAIN = re.compile(r"[A-Za-z0-9 ._,:/+=-]{1,80}")
DIGITS = (3, 6, 12)


def cell_names(
    keys: Sequence[str], combinations: Sequence[Sequence[Any]], folders: Sequence[str]
) -> list[str]:
    """Name each cell by the values in which cells differ.

    Args:
        keys: keys of a recipe that vary, such as ``stages.*.rope.rope_theta``.
        combinations: for each cell the value of each key.
        folders: for each cell the name to use where the short one would be too long, unsafe or not unique.

    Example:
        >>> cell_names(["stages.*.rope.rope_theta"], [[1e4], [3e5]], ["a", "b"])
        ['base 1e4', 'base 3e5']
    """
    words = _words_of(keys)
    for digits in DIGITS:
        names = [
            ", ".join(
                f"{word} {_value(key, value, digits)}".lstrip()
                for key, word, value in zip(keys, words, each, strict=True)
            )
            for each in combinations
        ]
        # Two values that look equal with few digits get more of them.
        if len(set(names)) == len(names):
            break
    return [
        name if PLAIN.fullmatch(name) and names.count(name) == 1 else folder
        for name, folder in zip(names, folders, strict=True)
    ]


def _words_of(keys: Sequence[str]) -> list[str]:
    """A short word for each key; keys that share one are told apart by their stage, or written out."""
    lasts = [_last(key) for key in keys]
    found = []
    for key, last in zip(keys, lasts, strict=True):
        # A RoPE says by itself what it is: its base, or its method.
        word = "" if last == "rope" else WORDS.get(last, last.replace("_", " "))
        if lasts.count(last) > 1:
            stage = STAGE.match(key)
            # Counted from 1, as --from-stage counts them.
            word = f"stage {int(stage[1]) + 1} {word}".rstrip() if stage else key
        found.append(word)
    return found


def _last(key: str) -> str:
    """Last part of a key that is a name: an entry of a list has only a number."""
    parts = key.split(".")
    return next((part for part in reversed(parts) if not part.isdigit()), key)


def _value(key: str, value: Any, digits: int) -> str:
    last = _last(key)
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        # The method theta is nothing but its base. Another names itself: {method: yarn, factor: 4} is "yarn factor 4".
        if last == "rope" and value.get("method", "theta") == "theta":
            value = {"rope_theta": "auto", **{name: each for name, each in value.items() if name != "method"}}
        return " ".join(
            _value(name, each, digits)
            if name == "method"
            else f"{WORDS.get(name, name)} {_value(name, each, digits)}"
            for name, each in value.items()
        )
    if isinstance(value, list | tuple):
        return "+".join(_value(key, each, digits) for each in value)
    if last == "context" and isinstance(value, int):
        return format_length(value)
    if last == "rope" and value == "theta":
        return AUTO_BASE
    number = _number(value)
    # A count of steps or rows is read as it is, a base as a power of ten.
    if number is None or (isinstance(value, int) and last != "rope_theta"):
        return str(value)
    return short_number(number, digits)


def short_number(number: float, digits: int = DIGITS[0]) -> str:
    """Format a number with at most so many digits: ``1e4``, ``3.05e5``."""
    return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", f"{number:.{digits}g}")


def _number(value: Any) -> float | None:
    """The value as a number, also if it is text: YAML reads 1e4 as text. None if it is none, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
