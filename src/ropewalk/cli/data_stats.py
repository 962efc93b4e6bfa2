"""``ropewalk data stats``: what documents or packed rows consist of, and how much attention they leave out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.data_options import context_of, sources
from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import notes, print_json, print_whole, results
from ropewalk.data.settings import CountSettings, SourceFields, StatsConfig
from ropewalk.errors import RopewalkError

BY_EMBEDDED = "counted with the tokenizer of the embedded checkpoint; give --tokenizer for your model's"


def stats(
    paths: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="One folder of packed rows; or documents: JSON lines, Parquet, text and source files, folders, "
            "hf:owner/name[:config][@split], embedded.",
        ),
    ],
    settings: CountSettings,
    fields: SourceFields,
    *,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Count documents and tokens by source, with lengths, repeats, and what attention leaves out."""
    from ropewalk.data import run

    config = StatsConfig(**dict(settings), sources=sources(paths, fields))
    if run.folder_of_rows(config) is None:
        if config.tokenizer is None:
            notes.print(BY_EMBEDDED, soft_wrap=True)
        if config.length is None:
            config = config.model_copy(update={"length": _trained_length(config.tokenizer)})
    report = run.stats(config, context_of()).report
    if plot is not None:
        _draw(report, plot)
    if as_json:
        print_json(report)
    else:
        _print(report)
        if plot is not None:
            notes.say(f"drawn: {plot}")


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


def _print(report: Mapping[str, Any]) -> None:
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
        print_whole(histogram_table(report).rich())
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


def _is_mixed(report: Mapping[str, Any]) -> bool:
    """Whether a mixture changed anything, so that there is a before and an after."""
    return report["mixture"] is not None and not report["mixture"]["as_is"]


def _draw(report: Mapping[str, Any], plot: Path) -> None:
    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.data import length_figure, source_lengths

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
    draw(length_figure(states, title, caption), plot)


command = make_command(
    stats,
    "stats",
    "ropewalk data stats books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k",
)
