"""``ropewalk data``: pack documents into training rows, and count what a corpus consists of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Table

from ropewalk.cli.output import JsonOption, notes, print_json, results
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data import DataStatistics, PackedRows, SourceSpec
    from ropewalk.data.stats import SourceStatistics

MOST_WORKERS = 8

data_app = typer.Typer(no_args_is_help=True, help="From documents to packed training rows.")

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATHS",
        help="JSON lines (.jsonl, also .gz and .zst), Parquet, text and source files, folders of them, "
        r"hf:owner/name\[:config]\[@split], or embedded.",
    ),
]
TextFieldOption = Annotated[str, typer.Option(help="Field of a record that holds the text.")]
SourceFieldOption = Annotated[
    str, typer.Option(help='Field that names the source, where there is one; "" reads none.')
]
WorkersOption = Annotated[
    int, typer.Option(help=f"Tokenisation processes; 0 takes a core each, up to {MOST_WORKERS}.")
]


def register(app: typer.Typer) -> None:
    """Add the group ``data`` to the program."""
    app.add_typer(data_app, name="data")


@data_app.command(
    "pack",
    epilog="Example: ropewalk data pack books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --context 1M",
)
def pack_command(
    paths: PathsArgument,
    tokenizer: Annotated[str, typer.Option(help="Model or tokenizer: a folder or a hub name.")],
    context: Annotated[str, typer.Option(help="Tokens of a row: 131072, 128k, 1M.")],
    pattern: Annotated[str, typer.Option(help="anchor, intra_document or full.")] = "anchor",
    positions: Annotated[str, typer.Option(help="continuous, or reset in each document.")] = "continuous",
    bos: Annotated[str, typer.Option(help="Where BOS goes: auto, document, row or none.")] = "auto",
    eos: Annotated[bool, typer.Option(help="End every document with EOS.")] = True,
    long_documents: Annotated[
        str, typer.Option(help="Documents longer than a row: split, truncate or skip.")
    ] = "split",
    validation_documents: Annotated[int, typer.Option(help="Documents to hold out for validation.")] = 0,
    validation_fraction: Annotated[float, typer.Option(help="Or the share of documents to hold out.")] = 0.0,
    text_field: TextFieldOption = "text",
    source_field: SourceFieldOption = "source",
    out: Annotated[Path, typer.Option(help="Folder to keep packed rows in, each set in its own.")] = Path(
        "packed"
    ),
    workers: WorkersOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Pack documents into rows of exactly CONTEXT tokens, once: the same call finds them again."""
    from ropewalk.data import PackingSettings, ValidationSettings, prepare_rows
    from ropewalk.lengths import parse_length

    settings = PackingSettings(
        context=parse_length(context),
        pattern=cast(Any, pattern),
        positions=cast(Any, positions),
        bos=cast(Any, bos),
        eos=eos,
        long_documents=cast(Any, long_documents),
    )
    validation = ValidationSettings(validation_documents, validation_fraction)
    specs = _specs(paths, text_field, source_field)
    with _progress() as progress:
        rows = prepare_rows(specs, tokenizer, settings, out, validation, _processes(workers), progress)
    if as_json:
        print_json({"folder": str(rows.folder), "reused": not progress.called, **rows.manifest})
        return
    if not progress.called:
        notes.print("These rows were packed before; nothing was done.")
    _print_packed(rows)


@data_app.command(
    "stats",
    epilog="Example: ropewalk data stats books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B",
)
def stats_command(
    paths: PathsArgument,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model or tokenizer to count with; packed rows need none.")
    ] = None,
    text_field: TextFieldOption = "text",
    source_field: SourceFieldOption = "source",
    workers: WorkersOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Count documents and tokens by source, with lengths, of documents or of one folder of packed rows."""
    from ropewalk.data import open_rows, packed_statistics, read_documents, tokenised_statistics
    from ropewalk.data.rows import is_packed, packed_folders
    from ropewalk.data.tokenise import tokenise

    folder = Path(paths[0]).expanduser()
    if len(paths) == 1 and (is_packed(folder) or packed_folders(folder)):
        statistics = packed_statistics(open_rows(folder))
    elif tokenizer is None:
        raise RopewalkError(f"give --tokenizer to count the tokens of {', '.join(paths)}")
    else:
        documents = read_documents(_specs(paths, text_field, source_field))
        with _progress() as progress:
            statistics = tokenised_statistics(
                tokenise(documents, tokenizer, _processes(workers), progress=progress)
            )
    if as_json:
        print_json(asdict(statistics))
    else:
        _print_statistics(statistics)


def _specs(paths: list[str], text_field: str, source_field: str) -> list[SourceSpec]:
    from ropewalk.data import SourceSpec

    return [SourceSpec(path, text_field=text_field, source_field=source_field or None) for path in paths]


def _processes(workers: int) -> int:
    if workers:
        return workers
    return min(MOST_WORKERS, os.cpu_count() or 1)


class _Shown:
    """A progress callback that draws, and remembers whether there was anything to draw."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self._show = show
        self.called = False

    def __call__(self, documents: int, tokens: int) -> None:
        self.called = True
        self._show(documents, tokens)


@contextmanager
def _progress() -> Iterator[_Shown]:
    """A line on stderr that shows documents, tokens and speed, and goes away at the end."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("reading")

        def show(documents: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            speed = f", {tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            bar.update(task, description=f"{documents:,} documents, {tokens:,} tokens{speed}")

        yield _Shown(show)


def _print_packed(rows: PackedRows) -> None:
    counts, settings = rows.manifest["counts"], rows.settings
    packing, split, reading = counts["packing"], counts["split"], counts["reading"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    facts = [
        (f"rows of {settings.context:,} tokens", packing["rows"]),
        ("documents in training", split["training_documents"]),
        ("documents held out", split["validation_documents"]),
        ("documents' own tokens", packing["document_tokens"]),
        ("BOS tokens added", packing["bos_tokens"]),
        ("EOS tokens added", packing["eos_tokens"]),
        ("tokens of the incomplete last row, left out", packing["remainder_tokens"]),
        ("documents cut at a row's end", packing["cut_documents"]),
    ]
    remarks = [
        ("documents truncated or skipped as longer than a row", packing["long_documents"]),
        ("tokens dropped with them", packing["dropped_tokens"]),
        ("empty documents passed over", reading["empty_documents"] + packing["empty_documents"]),
        ("copies of held-out documents, left out", split["withheld_duplicates"]),
        ("binary files passed over", reading["binary_files"]),
        ("hidden files and folders passed over", reading["hidden_entries"]),
    ]
    for fact, count in facts + [remark for remark in remarks if remark[1]]:
        table.add_row(fact, f"{count:,}")
    console = results()
    console.print(table)
    console.print(f"\n{rows.folder}", soft_wrap=True, markup=False)


def _print_statistics(statistics: DataStatistics) -> None:
    console = results()
    what = "pieces" if statistics.packed else "documents"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("source", overflow="fold")
    for heading in (what, "share", "tokens", "share", "mean", "median", "90 %", "longest"):
        # Only names fold where the terminal is narrow; half a number is worse than none.
        table.add_column(heading, justify="right", no_wrap=True)
    for name, source in statistics.sources.items():
        table.add_row(*_statistics_line(escape(name), source))
    if len(statistics.sources) > 1:
        table.add_row(*_statistics_line("all", statistics.total))
    console.print(table)
    bins = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("length in tokens", what, "tokens", "share of tokens"):
        bins.add_column(heading, justify="right")
    for each in statistics.total.histogram:
        share = each.tokens / statistics.total.tokens if statistics.total.tokens else 0.0
        bins.add_row(
            f"{each.start:,} to {each.end - 1:,}", f"{each.documents:,}", f"{each.tokens:,}", f"{share:.1%}"
        )
    console.print()
    console.print(bins)
    if statistics.rows is not None:
        console.print(f"\n{statistics.rows:,} rows, {statistics.documents_per_row:.1f} documents a row")


def _statistics_line(name: str, source: SourceStatistics) -> tuple[str, ...]:
    lengths = (source.mean_length, *(source.quantiles[key] for key in ("0.5", "0.9", "1")))
    return (
        name,
        f"{source.documents:,}",
        f"{source.mixture_ratio:.1%}",
        f"{source.tokens:,}",
        f"{source.token_ratio:.1%}",
        *(f"{length:,.0f}" for length in lengths),
    )
