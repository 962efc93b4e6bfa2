"""``ropewalk data stats``: what documents or packed rows consist of, and how much attention they leave out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.data_options import (
    MaxDocumentsOption,
    SourceFieldOption,
    TextFieldOption,
    WorkersOption,
    processes,
    source_specs,
)
from ropewalk.cli.options import PlotOption, check_plot
from ropewalk.cli.output import JsonOption, notes, print_json, print_whole, results
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data import PackedRows

BY_EMBEDDED = "counted with the tokenizer of the embedded checkpoint; give --tokenizer for your model's"


def stats_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATHS | ROWS",
            help="One folder of packed rows; or documents: JSON lines, Parquet, text and source files, folders, "
            r"hf:owner/name\[:config]\[@split], embedded.",
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model or tokenizer to count documents with; the embedded checkpoint's otherwise."),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a row, to count attention on documents: 64k. If not given, what the model beside the "
            "tokenizer is trained for; without a model there, attention is not counted."
        ),
    ] = None,
    text_field: TextFieldOption = "text",
    source_field: SourceFieldOption = "source",
    max_documents: MaxDocumentsOption = 0,
    workers: WorkersOption = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count documents and tokens by source, with lengths, repeats, and what attention leaves out."""
    from ropewalk.data.rows.stored import open_rows

    check_plot(plot)
    folder = _rows_among(paths)
    if folder is not None:
        for option, given in (("--tokenizer", tokenizer), ("--length", length)):
            if given is not None:
                raise RopewalkError(f"{folder} holds packed rows, which have their own; leave {option} out")
        report = _report_of_rows(open_rows(folder, verify=True))
    else:
        specs = source_specs(paths, text_field, source_field, max_documents)
        if tokenizer is None:
            notes.print(BY_EMBEDDED, soft_wrap=True)
        report = _report_of_documents(specs, tokenizer, length, processes(workers))
    if plot is not None:
        _draw(report, plot)
    if as_json:
        print_json(report)
    else:
        _print(report)
        if plot is not None:
            notes.say(f"drawn: {plot}")


def register(data_app: typer.Typer) -> None:
    """Add the command ``stats`` to the group ``data``."""
    data_app.command(
        "stats",
        epilog="Example: ropewalk data stats books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k",
    )(stats_command)


def _rows_among(paths: list[str]) -> Path | None:
    """The folder of packed rows, if that is what is meant."""
    from ropewalk.data.rows.stored import holds_rows

    packed = [folder for folder in (Path(path).expanduser() for path in paths) if holds_rows(folder)]
    if packed and len(paths) > 1:
        raise RopewalkError(f"{packed[0]} holds packed rows; count one folder of rows alone")
    return packed[0] if packed else None


def _report_of_rows(rows: PackedRows) -> dict[str, Any]:
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.data.stats.stats import rows_report

    # In a log file a bar that knows its end says when it is there, and the result says as much.
    with ConsoleReporter(notes).bar("rows", len(rows) if notes.is_terminal else None) as advance:
        report = rows_report(rows, lambda done: advance(done, ""))
    return {**report, "tokenizer": rows.manifest["tokenizer"]["name_or_path"]}


def _report_of_documents(
    specs: list[Any], tokenizer: str | None, length: str | None, workers: int
) -> dict[str, Any]:
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.data.read.embedded import EMBEDDED
    from ropewalk.data.stats.stats import source_documents, statistics_report, tokenised_statistics
    from ropewalk.data.tokens.tokenise import tokenise
    from ropewalk.io.lengths import parse_length

    row_length = _trained_length(tokenizer) if length is None else parse_length(length)
    if row_length is not None and row_length < 2:
        raise RopewalkError(f"a row takes 2 tokens or more, got --length {length}")
    name = EMBEDDED if tokenizer is None else tokenizer
    with ConsoleReporter(notes).bar("documents", None) as advance:

        def read(documents: int, tokens: int) -> None:
            advance(documents, f"{tokens:,} tokens")

        documents = tokenise(source_documents(specs), name, workers, progress=read)
        statistics = tokenised_statistics(documents, row_length)
    only_rows = dict.fromkeys(("pieces", "in_rows", "mixture", "corpus"))
    return {**statistics_report(statistics), "tokenizer": name, **only_rows}


def _trained_length(tokenizer: str | None) -> int | None:
    """Tokens that the model beside a tokenizer is trained for; None where no model with RoPE lies there."""
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.planning.inspection import read_checkpoint as read_config

    if tokenizer is None or not (Path(resolve_model(tokenizer)) / "config.json").is_file():
        return None
    try:
        return read_config(resolve_model(tokenizer)).trained_length
    except RopewalkError:
        # Counting tokens needs no model, whatever lies beside its tokenizer.
        return None


def _print(report: dict[str, Any]) -> None:
    from ropewalk.reporting.data_tables import (
        attention_sentence,
        histogram_table,
        mixture_table,
        pieces_table,
        repeats_sentence,
        rows_sentence,
        source_table,
    )

    print_whole(source_table(report).rich())
    console = results()
    if report["histogram"]:
        console.print()
        print_whole(histogram_table(report))
    if _is_mixed(report):
        console.print()
        print_whole(mixture_table(report["mixture"]).rich())
    if report["packed"]:
        console.print()
        print_whole(pieces_table(report).rich())
    sentences = [rows_sentence(report), attention_sentence(report), repeats_sentence(report)]
    for sentence in filter(None, sentences):
        console.print()
        console.say(sentence)


def _is_mixed(report: dict[str, Any]) -> bool:
    """Whether a mixture changed anything, so that there is a before and an after."""
    return report["mixture"] is not None and not report["mixture"]["as_is"]


def _draw(report: dict[str, Any], plot: Path) -> None:
    from ropewalk.reporting.data_figures import length_figure, source_lengths

    caption = "Bins from a power of two to the next; bars of one kind add up to 100 % in each panel."
    if _is_mixed(report):
        states = {"before": source_lengths(report["corpus"]), "after": source_lengths(report)}
        title = "Document lengths before and after the mixture"
        caption += " Repeated documents count each time."
    else:
        states = {"documents": source_lengths(report)}
        title = "Document lengths"
    if report["packed"]:
        caption += f" Documents are whole here; rows of {report['row_length']:,} tokens cut them."
    length_figure(states, plot, title, caption)
