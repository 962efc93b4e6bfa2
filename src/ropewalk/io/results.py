"""Result: base class of what a package's ``run`` returns: plain values, JSON for programs, a table for notebooks."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import fields, is_dataclass
from html import escape
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    import pandas

MOST_ROWS = 200
"""Most entries of a list or mapping that a notebook shows; the JSON has all of them."""
MOST_LINES, WIDTH = 24, 100
"""Lines and columns of the screen that a result is shown on as text."""


class Result:
    """Base class of the results of all jobs. Each result is a frozen dataclass. The base class has no fields."""

    def to_json(self) -> dict[str, Any]:
        """The values as plain JSON values, for ``json.dumps(..., allow_nan=False)``; NaN and infinity become None."""
        plain: dict[str, Any] = plain_json({each.name: getattr(self, each.name) for each in fields(self)})  # type: ignore[arg-type]
        return plain

    def scores(self) -> list[dict[str, Any]]:
        """The scores in long form, one row each; empty for a result without scores."""
        return []

    def overview(self) -> list[dict[str, Any]]:
        """The rows that answer what the job was asked, with few columns of plain values: by default the scores."""
        return self.scores()

    def statement(self) -> list[str]:
        """The answer in words, a line or sentence each; empty if the overview says it all."""
        return []

    def to_frame(self) -> pandas.DataFrame:
        """The rows of ``overview()``, or else a row for each entry of the first list in ``to_json()``.

        Rows of scores have the columns ``suite``, ``task``, ``length`` (tokens), ``when`` (the model, the variant, or
        before and after a run), ``value``, ``low`` and ``high`` (the score and its 95 % interval), ``n`` (samples),
        ``unit``, ``ran``, ``note``, ``metric``, ``depth``, and ``start`` and ``end`` (the first position of a bin and
        the one after its last; missing for a score over all positions). A comparison has ``cell`` for ``when``.

        Raises:
            RopewalkError: if pandas is not installed.
        """
        values = self.to_json()
        lists = (each for each in values.values() if _is_table(each))
        return frame_of(self.overview() or next(lists, [values]), "to_frame()")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Before the decorator of a dataclass, which would write all values on one line.
        cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The answer, or the scores and the other values, on at most a screen; ``to_json()`` has all values."""
        values, scores = self.to_json(), _columns_in_use(self.overview())
        words = [line for each in self.statement() for line in textwrap.wrap(each, WIDTH)]
        table = _text_table(scores)
        if words and len(words) + len(table) >= MOST_LINES:
            table = [f"... {len(scores):,} rows in to_frame()"]
        elif len(table) > MOST_LINES // 2:
            table = [
                *table[: MOST_LINES // 2],
                f"... {len(scores) + 1 - MOST_LINES // 2:,} more in to_frame()",
            ]
        rest = [
            f"{name}: {_compact(value)}"
            for name, value in values.items()
            if not (scores and _is_table(value))
        ]
        lines = [type(self).__name__, *words, *table, *([] if words else rest)]
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], "... more in to_json()"]
        return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)

    def _repr_html_(self) -> str:
        """The answer and tables for a notebook, the scores first; all text is escaped."""
        scores = _columns_in_use(self.overview())
        first = "".join(f"<p>{escape(line)}</p>" for line in self.statement())
        first += html_table(plain_json(scores)) if scores else ""
        return f"<h4>{escape(type(self).__name__)}</h4>{first}{html_table(self.to_json())}"


def frame_of(rows: list[dict[str, Any]], method: str) -> pandas.DataFrame:
    """A pandas data frame of these rows; RopewalkError, which names the method, if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise RopewalkError(f"{method} needs pandas; install it with pip install pandas") from error
    return pandas.DataFrame(rows)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _columns_in_use(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without columns that say nothing: ``ran`` where all have run, ``depth`` where none has one."""
    names = [name for name in (rows[0] if rows else ()) if any(_says(name, row[name]) for row in rows)]
    return [{name: row[name] for name in names} for row in rows]


def _says(name: str, value: Any) -> bool:
    return not (value is None or value == "" or (name == "ran" and value is True))


def _text_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table with aligned columns."""
    if not rows:
        return []
    cells = [list(rows[0]), *([_compact(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _compact(value: Any) -> str:
    """A value on one line, numbers with six digits."""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    if isinstance(value, str):
        return " ".join(value.split())
    return "" if value is None else json.dumps(plain_json(value), ensure_ascii=False)


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
    if _is_table(value):
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
