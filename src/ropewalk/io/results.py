"""Result: base class of what a package's ``run`` returns: plain values, JSON for programs, a table for notebooks."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import PurePath
from typing import Any

MOST_ROWS = 200
"""Most entries of a list or mapping that a notebook shows; the JSON has all of them."""


class Result:
    """Base class of the results of all jobs. Each result is a frozen dataclass. The base class has no fields."""

    def to_json(self) -> dict[str, Any]:
        """The values as plain JSON values, for ``json.dumps(..., allow_nan=False)``; NaN and infinity become None."""
        plain: dict[str, Any] = plain_json({each.name: getattr(self, each.name) for each in fields(self)})  # type: ignore[arg-type]
        return plain

    def _repr_html_(self) -> str:
        """A readable table for a notebook; all text is escaped."""
        return f"<h4>{escape(type(self).__name__)}</h4>{html_table(self.to_json())}"


def plain_json(value: Any) -> Any:
    """Convert dataclasses, paths and tuples to dictionaries, lists, strings, numbers and None.

    Args:
        value: a dataclass (its own ``to_json`` is used if it has one), mapping, sequence, path or scalar. Scalars of
            NumPy and torch are converted with ``item()``; NaN and infinity, which JSON does not have, become None.

    Raises:
        TypeError: for any other type, which the message names.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # JSON has no NaN or infinity, and strict parsers refuse Python's spelling of them.
        return value if math.isfinite(value) else None
    # By attribute, so that torch and numpy need not be imported: mappings, tensors and numpy numbers alike.
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain_json(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "to_json"):
        return plain_json(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_json(getattr(value, each.name)) for each in fields(value)}
    if hasattr(value, "item"):
        return plain_json(value.item())
    raise TypeError(f"cannot convert {type(value).__name__} to JSON")


def html_table(value: Any) -> str:
    """Nested HTML tables of plain JSON: one row for each key, one table for each list of records; text is escaped."""
    if isinstance(value, dict):
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(str(key))}</th><td>{html_table(item)}</td></tr>"
            for key, item in list(value.items())[:MOST_ROWS]
        )
        return f"<table>{rows}{_more(len(value))}</table>"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        names = list(dict.fromkeys(name for item in value for name in item))
        head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html_table(item.get(name))}</td>' for name in names)}</tr>"
            for item in value[:MOST_ROWS]
        )
        return f"<table><tr>{head}</tr>{rows}{_more(len(value))}</table>"
    if isinstance(value, list):
        shown = ", ".join(html_table(item) for item in value[:MOST_ROWS])
        return shown + (f", and {len(value) - MOST_ROWS:,} more" if len(value) > MOST_ROWS else "")
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else escape(str(value))


def _more(count: int) -> str:
    return f"<tr><td>and {count - MOST_ROWS:,} more</td></tr>" if count > MOST_ROWS else ""
