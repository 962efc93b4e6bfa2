"""``ropewalk data preview``: packed rows as training sees them, with every boundary visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.options import JsonFlag
from ropewalk.cli.output import print_json, results
from ropewalk.data.settings import PreviewConfig
from ropewalk.io.settings import FilePath

if TYPE_CHECKING:
    from rich.text import Text

    from ropewalk.data.row_preview import Chunk, RowPreview, Span
    from ropewalk.data.run import DataPreview

COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue")
"""Of the documents of a row in turn; each also has a header line, so that colour is no more than a help."""
LEGEND = (
    ("■", "a document, or a chunk of one; □ padding"),
    ("⟦ ⟧", "never a target: the anchor, a tag"),
    ("« »", "special token"),
    ("↵", "new line; \\x1b and the like: control character"),
)


def preview(
    folder: Annotated[FilePath, Field(description="Folder of packed rows.")],
    settings: PreviewConfig,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show the first packed rows: documents, chunks, tags, anchor, padding, and what is never a target."""
    from ropewalk.data import run

    result = run.preview(folder, settings)
    if as_json:
        print_json(result.to_json())
        return
    console = results()
    console.print(_legend(), soft_wrap=True)
    for number, row in enumerate(result.rows):
        for line in _row_lines(result, number, row):
            # The terminal folds: nothing here depends on how wide it is.
            console.print(line, soft_wrap=True)


def _legend() -> Text:
    from rich.text import Text

    legend = Text()
    for mark, meaning in LEGEND:
        legend.append("   " if legend else "").append(mark, "bold").append(f" {meaning}", "dim")
    return legend


def _row_lines(result: DataPreview, number: int, row: RowPreview) -> list[Text]:
    from rich.text import Text

    documents = f"{row.documents:,} {'document' if row.documents == 1 else 'documents'}"
    lines = [
        Text(),
        Text(
            f"row {number} of {result.total:,}: {result.context:,} tokens, {documents}, pattern {result.pattern}",
            "bold",
        ),
    ]
    if row.anchor is not None:
        lines.append(_body([row.anchor], "").append("  anchor, token 0", "dim"))
    for chunk in row.chunks:
        colour = "" if chunk.is_padding else COLOURS[chunk.document % len(COLOURS)]
        lines.append(_header(chunk, colour, number))
        if not chunk.is_padding:
            lines.append(_body(chunk.spans, colour))
    return lines


def _header(chunk: Chunk, colour: str, row: int) -> Text:
    from rich.text import Text

    from ropewalk.reporting.shown_text import shown

    count = chunk.stop - chunk.start
    where = f"tokens {chunk.start:,}..{chunk.stop - 1:,} ({count:,})"
    if chunk.is_padding:
        return Text(f"□ padding, {where}, never a target", "dim")
    header = Text(f"■ document {chunk.number:,}, ", f"bold {colour}")
    header.append(f"{shown(chunk.source, 60)}, {where}")
    if chunk.parts > 1:
        header.append(f", chunk {chunk.part} of {chunk.parts}")
    if chunk.continues:
        header.append(f", goes on from row {row - 1:,}")
    return header


def _body(spans: Sequence[Span], colour: str) -> Text:
    """Spans one after the other in one line, each with its mark; a style never carries a meaning alone."""
    from rich.text import Text

    from ropewalk.reporting.shown_text import shown

    line = Text("  ")
    for span in spans:
        if span.kind == "left_out":
            line.append(f" … {span.stop - span.start:,} tokens … ", "bold")
            continue
        text = span.text or ""
        words = "".join(f"«{shown(each)}»" for each in span.each) or shown(text, max(2, len(text)))
        style = f"{colour} reverse" if span.each else colour
        if span.masked:
            line.append(f"⟦{words}⟧", f"{style} dim strike")
        else:
            line.append(words, style)
    return line


command = make_command(preview, "preview", "ropewalk data preview packed --rows 1 --tokens 40")
