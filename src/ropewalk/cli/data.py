"""``ropewalk data``: documents to packed training rows, and what documents and rows consist of."""

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
from ropewalk.io.settings import FilePath, Option, Settings

if TYPE_CHECKING:
    from ropewalk.data.run import PackResult
    from ropewalk.parallel.context import RunContext

Paths = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="JSON lines (.jsonl, also .gz and .zst), Parquet, text and source files, folders of them, "
        "hf:owner/name[:config][@split], or embedded; records may hold text, or token ids already.",
    ),
]


BY_EMBEDDED = "counted with the tokenizer of the embedded checkpoint; give --tokenizer for your model's"


class PackOptions(Settings):
    """What the command adds to the settings of packing."""

    group: ClassVar[str | None] = "Output"

    interleave: Annotated[bool, Option(group="Rows")] = Field(
        False, description="Cut documents and shuffle the parts of a row; so does any --chunk option."
    )
    out: FilePath = Field(
        Path("packed"),
        description="Folder for the rows: new, or of the same command, which it takes up again.",
    )
    as_json: JsonFlag = False


def pack(paths: Paths, settings: PackSettings, fields: SourceFields, options: PackOptions) -> None:
    """Pack documents into rows of exactly LENGTH tokens; run it again to go on where it was interrupted."""
    from ropewalk.data import run

    rows, store, out = settings.rows, settings.work.token_store, options.out
    if options.interleave or rows.interleave is not None:
        chunks = (rows.interleave or InterleaveSettings()).model_copy(update={"seed": settings.mixture.seed})
        rows = type(rows)(**{**dict(rows), "interleave": chunks})
    config = PackConfig(**{**dict(settings), "rows": rows, "sources": _sources(paths, fields)})
    with on_interrupt(lambda: _so_far(out, store)):
        result = run.pack(config, _context(out))
    _show(result, options.as_json)


def _so_far(out: Path, token_store: Path | None) -> str:
    from ropewalk.data.rows.stored import WORK

    if not (out.expanduser() / WORK).is_dir():
        return "nothing is packed yet; the same command starts again"
    tokens = "" if token_store is None else f", tokenised documents in {token_store}"
    return f"what is packed so far lies in {out}{tokens}; the same command goes on from there"


def merge(
    parts: Annotated[tuple[Path, ...], Field(description="OUT folders of the same pack command.")],
    *,
    out: Annotated[FilePath, Field(description="Folder for all rows; a new one.")],
    as_json: JsonFlag = False,
) -> None:
    """Put the parts that several machines packed into folders of their own together."""
    from ropewalk.data import run

    _show(run.merge(parts, _context(out)), as_json)


def _show(result: PackResult, as_json: bool) -> None:
    from ropewalk.reporting.data import describe_packed

    if as_json:
        print_json(result.to_json())
        return
    if result.manifest is not None and result.reused:
        notes.print("These rows were packed before; nothing was done.")
    show(describe_packed(result))


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
    from ropewalk.planning.inspection import trained_length_beside
    from ropewalk.reporting import draw
    from ropewalk.reporting.data import describe_stats, stats_figure

    config = StatsConfig(**dict(settings), sources=_sources(paths, fields))
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
    """Show the first packed rows: documents, chunks, tags, anchor, padding, and what is never a target."""
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
    """The sources that a command's arguments name, all read alike."""
    return tuple(SourceSpec(path=path, **dict(fields)) for path in paths)


def _context(out: Path | None = None) -> RunContext:
    """A run in this process alone, whose progress is drawn on stderr."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext

    return RunContext(output=out, reporter=ConsoleReporter(notes))


PACK_EXAMPLE = "ropewalk data pack books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
STATS_EXAMPLE = "ropewalk data stats books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
app = make_group(
    "data",
    "From documents to packed training rows.",
    [
        make_command(pack, "pack", PACK_EXAMPLE),
        make_command(merge, "merge", "ropewalk data merge part0 part1 part2 part3 --out rows"),
        make_command(stats, "stats", STATS_EXAMPLE),
        make_command(preview, "preview", "ropewalk data preview packed --rows 1 --tokens 40"),
    ],
)
