"""One self-contained HTML page: no script, no request, figures inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.io.files import write_text
from ropewalk.reporting.shown_text import harmless
from ropewalk.reporting.tables import ResultTable

MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 52rem; padding: 2.5rem 1.5rem 4rem; color: #222; background: #fff;
  font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 1.5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.5rem; margin: 0; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } figure img { width: 100%; height: auto; }
.scroll { overflow-x: auto; margin-bottom: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; width: 100%; }
caption { text-align: left; color: #444; padding-bottom: .5rem; } caption small { display: block; }
th, td { padding: .3rem .45rem; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #999; font-weight: 600; } th.text, td.text { text-align: left; }
tbody tr:last-child td { border-bottom: 1px solid #999; }
details { margin: 1rem 0; } summary { cursor: pointer; }
details dl { font-size: .9rem; margin: .75rem 0; padding: .75rem 1rem; background: #f6f6f6; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.45; }
@media print { body { max-width: none; padding: 0; } }
"""


@dataclass(frozen=True)
class Examples:
    """Some of many: single cases, to be folded away below a heading.

    Attributes:
        title: what they are examples of, and of how many.
        entries: for each its facts by name, shown as text.
    """

    title: str
    entries: tuple[Mapping[str, str], ...]


def write_report(
    path: Path,
    title: str,
    summary: Mapping[str, object],
    figures: Sequence[Path] = (),
    tables: Sequence[ResultTable] = (),
    details: Mapping[str, str] | None = None,
    examples: Sequence[Examples] = (),
) -> None:
    """Write the page.

    Args:
        path: of the page; complete or not written at all.
        title: heading of the page.
        summary: facts in the order to be read, shown as text.
        figures: PNG or SVG files, put inside; their stems become the alternative texts.
        tables: in order.
        details: texts to fold away by their headings: the recipe, the versions.
        examples: in order, behind the tables.

    Raises:
        RopewalkError: if a figure cannot be read or is of another format, or the page cannot be written.
    """
    parts = [f"<h1>{_html(title)}</h1>", _facts(summary) if summary else ""]
    if figures:
        parts += ["<h2>Figures</h2>", *map(_figure, figures)]
    if tables:
        parts += ["<h2>Numbers</h2>", *map(_table, tables)]
    if examples:
        parts += ["<h2>Examples</h2>", *map(_examples, examples)]
    if details:
        parts += ["<h2>How it was made</h2>"]
        parts += [
            f"<details><summary>{_html(name)}</summary><pre>{_html(text)}</pre></details>"
            for name, text in details.items()
        ]
    body = "\n".join(part for part in parts if part)
    write_text(
        path,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_html(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n",
    )


def _facts(facts: Mapping[str, object]) -> str:
    lines = (f"<dt>{_html(name)}</dt><dd>{_html(str(value))}</dd>\n" for name, value in facts.items())
    return f"<dl>\n{''.join(lines)}</dl>"


def _examples(examples: Examples) -> str:
    entries = "\n".join(map(_facts, examples.entries))
    return f"<details><summary>{_html(examples.title)}</summary>\n{entries}</details>"


def _figure(path: Path) -> str:
    if path.suffix not in MEDIA_TYPES:
        raise RopewalkError(f"a page shows .png and .svg figures, got {path.name}")
    try:
        content = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise RopewalkError(f"cannot read the figure {path}: {error.strerror}") from error
    alternative = _html(path.stem.replace("_", " ").replace("-", " "))
    return (
        f'<figure><img src="data:{MEDIA_TYPES[path.suffix]};base64,{content}" alt="{alternative}"></figure>'
    )


def _table(table: ResultTable) -> str:
    header = "".join(_cell("th", cell, n < table.text_columns) for n, cell in enumerate(table.header))
    rows = "\n".join(
        "<tr>" + "".join(_cell("td", cell, n < table.text_columns) for n, cell in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    notes = "".join(f"<small>{_html(note)}</small>" for note in table.notes)
    return (
        f'<div class="scroll"><table><caption>{_html(table.title)}{notes}</caption>\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cell(tag: str, text: str, is_text: bool) -> str:
    kind = ' class="text"' if is_text else ""
    return f"<{tag}{kind}>{_html(text)}</{tag}>"


def _html(text: str) -> str:
    """Text as HTML, with what could hide or turn it written out."""
    return escape(harmless(text))
