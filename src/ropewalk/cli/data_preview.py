"""``ropewalk data preview``: packed rows as training sees them, with every boundary visible."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.output import JsonOption, print_json, results
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from rich.text import Text

    from ropewalk.data import PackedRows
    from ropewalk.data.stats.preview import Chunk, RowPreview, Span

COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue")
"""Of the documents of a row in turn; each also has a header line, so that colour is no more than a help."""
LEGEND = (
    ("■", "a document, or a chunk of one; □ padding"),
    ("⟦ ⟧", "never a target: the anchor, a tag"),
    ("« »", "special token"),
    ("↵", "new line; \\x1b and the like: control character"),
)


def preview_command(
    folder: Annotated[Path, typer.Argument(metavar="ROWS", help="Folder of packed rows.")],
    rows: Annotated[int, typer.Option(help="How many rows, from the first on.")] = 3,
    tokenizer: Annotated[
        str | None, typer.Option(help="Where the tokenizer is, if no longer where the rows name it.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to show at each end of a document.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Show the first packed rows: documents, chunks, tags, anchor, padding, and what is never a target."""
    from ropewalk.data.rows.stored import open_rows
    from ropewalk.data.stats.preview import preview_row
    from ropewalk.data.tokens.tokenise import load_tokenizer, tokenizer_identity

    if rows < 1:
        raise RopewalkError(f"--rows must be 1 or more, got {rows}")
    if tokens < 1:
        raise RopewalkError(f"--tokens must be 1 or more, got {tokens}")
    _refuse_unpacked(folder)
    packed = open_rows(folder, verify=True)
    name = tokenizer or packed.manifest["tokenizer"]["name_or_path"]
    loaded = load_tokenizer(name)
    open_rows(folder, tokenizer=tokenizer_identity(loaded))
    special = frozenset(loaded.all_special_ids)
    settings = packed.settings
    eos = loaded.eos_token_id if settings.eos else None
    # Best fit has a document's pieces in any rows: whose piece comes next cannot be told from the numbers.
    in_order = settings.packing == "sequential"
    shown, before = [], None
    for row in (packed.packed(index) for index in range(min(rows, len(packed)))):
        preview = preview_row(row, settings.anchor_length, special, tokens, before, eos)
        shown.append((row.input_ids, preview))
        before = row if in_order else None
    if as_json:
        print_json(_plain(packed, name, [_plain_row(each, ids, loaded) for ids, each in shown]))
        return
    console = results()
    console.print(_legend(), soft_wrap=True)
    for index, (ids, each) in enumerate(shown):
        for line in _row_lines(packed, index, each, ids, loaded):
            # The terminal folds: nothing here depends on how wide it is.
            console.print(line, soft_wrap=True)


def register(data_app: typer.Typer) -> None:
    """Add the command ``preview`` to the group ``data``."""
    data_app.command("preview", epilog="Example: ropewalk data preview packed --rows 1 --tokens 40")(
        preview_command
    )


def _refuse_unpacked(folder: Path) -> None:
    from ropewalk.data.rows.stored import holds_rows

    place = folder.expanduser()
    if not place.exists():
        raise RopewalkError(f"there is no folder {str(folder)!r}")
    if not holds_rows(place):
        raise RopewalkError(
            f"{folder} holds no packed rows; pack documents first: ropewalk data pack {folder} --tokenizer MODEL "
            "--length 128k --out rows"
        )


def _legend() -> Text:
    from rich.text import Text

    legend = Text()
    for mark, meaning in LEGEND:
        legend.append("   " if legend else "").append(mark, "bold").append(f" {meaning}", "dim")
    return legend


def _row_lines(packed: PackedRows, index: int, row: RowPreview, ids: Any, tokenizer: Any) -> list[Text]:
    from rich.text import Text

    settings = packed.settings
    documents = len({chunk.document for chunk in row.chunks if not chunk.is_padding})
    lines = [
        Text(),
        Text(
            f"row {index} of {len(packed):,}: {len(ids):,} tokens, {documents:,} "
            f"{'document' if documents == 1 else 'documents'}, pattern {settings.pattern}",
            "bold",
        ),
    ]
    if row.anchor is not None:
        lines.append(_body([row.anchor], "", ids, tokenizer).append("  anchor, token 0", "dim"))
    for chunk in row.chunks:
        colour = "" if chunk.is_padding else COLOURS[chunk.document % len(COLOURS)]
        lines.append(_header(chunk, colour, index))
        if not chunk.is_padding:
            lines.append(_body(chunk.spans, colour, ids, tokenizer))
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


def _body(spans: Any, colour: str, ids: Any, tokenizer: Any) -> Text:
    """Spans one after the other in one line, each with its mark; a style never carries a meaning alone."""
    from rich.text import Text

    line = Text("  ")
    for span in spans:
        if span.kind == "left_out":
            line.append(f" … {span.stop - span.start:,} tokens … ", "bold")
            continue
        alone = span.kind in ("special", "anchor")
        words = _words(span, ids, tokenizer, alone)
        style = f"{colour} reverse" if alone else colour
        if span.masked:
            line.append(f"⟦{words}⟧", f"{style} dim strike")
        else:
            line.append(words, style)
    return line


def _words(span: Span, ids: Any, tokenizer: Any, alone: bool) -> str:
    """The text of a span, safe to print; of special tokens each in its own marks."""
    from ropewalk.reporting.shown_text import shown

    if alone:
        each = (_decoded(start, start + 1, ids, tokenizer) for start in range(span.start, span.stop))
        return "".join(f"«{shown(text)}»" for text in each)
    text = _decoded(span.start, span.stop, ids, tokenizer)
    return shown(text, max(2, len(text)))


def _decoded(start: int, stop: int, ids: Any, tokenizer: Any) -> str:
    return str(
        tokenizer.decode(
            ids[start:stop].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def _plain(packed: PackedRows, tokenizer: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    settings = packed.settings
    return {
        "folder": str(packed.folder),
        "tokenizer": tokenizer,
        "context": settings.context,
        "pattern": settings.pattern,
        "rows_there": len(packed),
        "rows": [{"row": index, **row} for index, row in enumerate(rows)],
    }


def _plain_row(row: RowPreview, ids: Any, tokenizer: Any) -> dict[str, Any]:
    def told(span: Span) -> dict[str, Any]:
        left_out = span.kind in ("left_out", "padding")
        return {**asdict(span), "text": None if left_out else _decoded(span.start, span.stop, ids, tokenizer)}

    return {
        "anchor": None if row.anchor is None else told(row.anchor),
        "chunks": [
            {**asdict(chunk), "padding": chunk.is_padding, "spans": [told(span) for span in chunk.spans]}
            for chunk in row.chunks
        ],
    }
