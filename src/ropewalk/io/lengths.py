"""Lengths in tokens, counts and times as people write them: 128k, 1M; 1 row, 2,000 rows; 40 seconds, 9 hours."""

from __future__ import annotations

import re
from fractions import Fraction

from ropewalk.errors import RopewalkError

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_NUMBER = r"(?:[0-9]{1,18}(?:\.[0-9]{1,18})?|[0-9]{1,3}(?:(?:,[0-9]{3}){1,5}|(?:_[0-9]{3}){1,5}))"
_LENGTH = re.compile(rf"({_NUMBER})\s*([km]?)", re.IGNORECASE)
LENGTH_PATTERN = rf"^\s*{_NUMBER}\s*[kKmM]?\s*$"
"""The same for JSON Schema, in which a pattern has no flags."""


def parse_length(text: str) -> int:
    """Parse a length in tokens; ``k`` is 1024 and ``M`` is 1048576, in upper or lower case.

    Thousands may be grouped by commas or underscores: ``131,072``.

    Raises:
        RopewalkError: if the text is not a length, not a whole number of tokens, or less than 1.

    Example:
        >>> parse_length("128k")
        131072
    """
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise RopewalkError(f"{text!r} is not a length; write a number of tokens such as 131072, 128k or 1M")
    # A Fraction instead of a float: rounding could turn 0.1k into a whole number.
    tokens = Fraction(re.sub("[,_]", "", match[1])) * _UNITS[match[2].lower()]
    if tokens.denominator != 1 or tokens < 1:
        raise RopewalkError(
            f"{text!r} is {float(tokens):g} tokens; a length must be a whole number of at least 1"
        )
    return int(tokens)


def format_length(tokens: int) -> str:
    """The shortest exact form of a length that parse_length can read back.

    Example:
        >>> format_length(131072)
        '128k'
    """
    for suffix, unit in (("M", 1024**2), ("k", 1024)):
        if tokens >= unit and tokens % unit == 0:
            return f"{tokens // unit}{suffix}"
    return str(tokens)


def counted(number: int, thing: str) -> str:
    """Format a number with its noun ("1 document", "2,000 tokens")."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def duration(seconds: float) -> str:
    """Format a time with the unit that people would use.

    Example:
        >>> duration(95), duration(2082), duration(33552)
        ('95 seconds', '35 minutes', '9.3 hours')
    """
    if seconds < 10:
        return f"{seconds:.2g} seconds"
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"
