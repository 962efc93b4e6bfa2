"""``ropewalk data``: pack documents into training rows, and inspect documents and rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.output import JsonFlag, PlotFile, notes, on_interrupt, print_json, results, show
from ropewalk.data.settings import (
    CountSettings,
    InterleaveSettings,
    PackConfig,
    PackSettings,
    PreviewConfig,
    SourceFields,
    SourceSpec,
    StatsConfig,
)
from ropewalk.io.settings import COMMON, FilePath, Option, Settings

if TYPE_CHECKING:
    from ropewalk.data.run import PackResult
    from ropewalk.parallel.context import RunContext

Paths = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="JSON Lines (.jsonl, .jsonl.gz, .jsonl.zst), Parquet, Arrow, text, source code, token files (see "
        "the end), folders of these, hf:owner/name[:config][@split], or bundled text: embedded. Records hold text or "
        "token ids. Token files are those of Megatron (.bin), datatrove (.ds) and OLMo (.npy).",
    ),
]


BY_EMBEDDED = "counting with the embedded checkpoint's tokenizer; pass --tokenizer to use your model's"


class PackOptions(Settings):
    """Options of the command itself, in addition to the packing settings."""

    group: ClassVar[str | None] = COMMON.group

    interleave: Annotated[bool, Option(group="Rows")] = Field(
        False,
        description="Cut the documents of a row into chunks and shuffle the chunks; any --chunk option implies it.",
    )
    out: Annotated[FilePath, Option(metavar="DIR")] = Field(
        Path("packed"),
        description="Output folder: a new one, or that of an interrupted run of the same command, to resume it.",
    )
    as_json: JsonFlag = False


def pack(paths: Paths, settings: PackSettings, fields: SourceFields, options: PackOptions) -> None:
    """Pack documents into rows of exactly LENGTH tokens. Run the same command again to resume after an interruption."""
    from ropewalk.data import run

    rows, store, out = settings.rows, settings.work.token_store, options.out
    if options.interleave or rows.interleave is not None:
        # One seed for both: that of the interleaving has no option of its own.
        chunks = (rows.interleave or InterleaveSettings()).model_copy(update={"seed": settings.mixture.seed})
        # Built anew instead of copied, because model_copy would skip the validators.
        rows = type(rows)(**{**dict(rows), "interleave": chunks})
    config = PackConfig(**{**dict(settings), "rows": rows, "sources": _sources(paths, fields)})
    with on_interrupt(lambda: _so_far(out, store)):
        result = run.pack(config, _context(out))
    _show(result, options.as_json)


def _so_far(out: Path, token_store: Path | None) -> str:
    from ropewalk.data.rows.stored import WORK

    if not (out.expanduser() / WORK).is_dir():
        return "nothing is packed yet; run the same command to start again"
    tokens = "" if token_store is None else f", tokenised documents in {token_store}"
    return f"the rows packed so far are in {out}{tokens}; run the same command to resume"


def _show(result: PackResult, as_json: bool) -> None:
    from ropewalk.reporting.data import describe_packed

    if as_json:
        print_json(result.to_json())
        return
    if result.manifest is not None and result.reused:
        notes.print("These rows are already packed; nothing to do.")
    show(describe_packed(result))


def stats(
    paths: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="One folder of packed rows, or documents: JSON Lines, Parquet, Arrow, text or source-code "
            "files, folders, hf:owner/name[:config][@split], or bundled text: embedded.",
        ),
    ],
    settings: CountSettings,
    fields: SourceFields,
    *,
    plot: Annotated[PlotFile, COMMON] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Count documents and tokens by source; show lengths, duplicates, and what each attention pattern saves.

    The saving is the share of a full row's attention scores that intra_document and anchor leave out.
    """
    from ropewalk.data import run
    from ropewalk.planning.inspection import trained_length_beside
    from ropewalk.reporting import draw
    from ropewalk.reporting.data import describe_stats, stats_figure

    config = StatsConfig(**dict(settings), sources=_sources(paths, fields))
    # Packed rows state their tokenizer and length; only for documents is there something to fill in.
    if run.folder_of_rows(config) is None:
        if config.tokenizer is None:
            notes.print(BY_EMBEDDED, soft_wrap=True)
        if config.length is None:
            config = config.model_copy(update={"length": trained_length_beside(config.tokenizer)})
    report = run.stats(config, _context()).report
    if plot is not None:
        draw(stats_figure(report), plot)
    if as_json:
        print_json(report)
    else:
        show(describe_stats(report))
        if plot is not None:
            notes.say(f"drawn: {plot}")


def preview(
    folder: Annotated[FilePath, Field(description="Folder of packed rows.")],
    settings: PreviewConfig,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show the first packed rows: documents, chunks, source tags, anchor (first token), padding, untrained tokens."""
    from ropewalk.data import run
    from ropewalk.reporting.data import preview_lines

    result = run.preview(folder, settings)
    if as_json:
        print_json(result.to_json())
        return
    console = results()
    for line in preview_lines(result):
        console.print(line, soft_wrap=True)


def _sources(paths: tuple[str, ...], fields: SourceFields) -> tuple[SourceSpec, ...]:
    """The sources given on the command line, all read with the same fields."""
    return tuple(SourceSpec(path=path, **dict(fields)) for path in paths)


def _context(out: Path | None = None) -> RunContext:
    """A single-process run that reports its progress on stderr."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext

    return RunContext(output=out, reporter=ConsoleReporter(notes))


PACK_EXAMPLE = "ropewalk data pack books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
STATS_EXAMPLE = "ropewalk data stats books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
app = make_group(
    "data",
    "Pack documents into training rows; inspect documents and rows.",
    [
        make_command(pack, "pack", PACK_EXAMPLE),
        make_command(stats, "stats", STATS_EXAMPLE),
        make_command(preview, "preview", "ropewalk data preview packed --rows 1 --tokens 40"),
    ],
)
