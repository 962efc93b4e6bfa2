"""``ropewalk data``: pack documents into training rows, and inspect documents and rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.output import (
    JsonFlag,
    PlotFile,
    figure_of,
    notes,
    print_json,
    results,
    resumable,
    run_context,
    show,
)
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

DOCUMENTS = (
    "files of JSON Lines (.jsonl, .jsonl.gz, .jsonl.zst), Parquet, Arrow, text or source code; token files of Megatron "
    "(.bin), datatrove (.ds) or OLMo (.npy); folders of these; Hub data sets (hf:owner/name[:config][@split]); or text "
    "that ropewalk ships (embedded)"
)
"""What may be packed and counted."""

Paths = Annotated[tuple[str, ...], Field(min_length=1, description=f"Documents: {DOCUMENTS}.")]


BY_EMBEDDED = "counting with the embedded checkpoint's tokenizer; pass --tokenizer to use your model's"


class PackOptions(Settings):
    """Options of the command itself, in addition to the packing settings."""

    group: ClassVar[str | None] = COMMON.group

    interleave: Annotated[bool, Option(group="Rows")] = Field(
        default=False,
        description="Cut the documents of each row into chunks and shuffle the chunks within the row. Implied by any "
        "--chunk option.",
    )
    out: Annotated[FilePath, Option(metavar="DIR")] = Field(
        default=Path("packed"),
        description="New folder for the rows. To resume packing, give the same folder again.",
    )
    as_json: JsonFlag = False


def pack(paths: Paths, settings: PackSettings, fields: SourceFields, options: PackOptions) -> None:
    """Pack documents into rows, which are training sequences of exactly --length tokens.

    Every document belongs to a source. The source is the value of the record field that --source-field names. If a
    record lacks this field, the source is the name of its file or folder in PATHS, without the suffix (web for
    web.jsonl.gz).

    After an interruption, run the same command again to resume.
    """
    from ropewalk.data import run

    rows, store, out = settings.rows, settings.work.token_store, options.out
    if options.interleave or rows.interleave is not None:
        # One seed for both: that of the interleaving has no option of its own.
        chunks = (rows.interleave or InterleaveSettings()).model_copy(update={"seed": settings.mixture.seed})
        # Built anew instead of copied, because model_copy would skip the validators.
        rows = type(rows)(**{**dict(rows), "interleave": chunks})
    config = PackConfig(**{**dict(settings), "rows": rows, "sources": _sources(paths, fields)})

    def so_far() -> str:
        return _so_far(out, store)

    with resumable(so_far):
        result = run.pack(config, run_context(output=out))
    _show(result, options.as_json)


def _so_far(out: Path, token_store: Path | None) -> str:
    from ropewalk.data.rows.packed_rows import WORK

    if not (out.expanduser() / WORK).is_dir():
        return "nothing is packed yet; run the same command to start again"
    tokens = "" if token_store is None else f", tokenised documents in {token_store}"
    return f"the rows packed so far are in {out}{tokens}; run the same command to resume"


def _show(result: PackResult, as_json: bool) -> None:
    from ropewalk.reporting.data import describe_packed

    if as_json:
        print_json(result.to_json())
        return
    if result.reused:
        notes.print("These rows are already packed; nothing to do.")
    show(describe_packed(result))


def stats(
    paths: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description=f"One folder of packed rows (training sequences), or documents: {DOCUMENTS}.",
        ),
    ],
    settings: CountSettings,
    fields: SourceFields,
    *,
    plot: Annotated[PlotFile, COMMON, figure_of("the document lengths of each source")] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Count the documents and tokens of each source. Also show document lengths, duplicates, and how much computation
    attention needs in packed rows, compared with full attention.

    Every document belongs to a source. The source is the value of the record field that --source-field names. If a
    record lacks this field, the source is the name of its file or folder in PATHS, without the suffix (web for
    web.jsonl.gz).

    In packed rows, each token attends only to its own document (pattern intra_document), or also to the first token
    of the row (anchor). For each pattern, the command shows the share of full attention's query-key pairs that is left.
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
    report = run.stats(config, run_context()).report
    if plot is not None:
        draw(stats_figure(report), plot)
    if as_json:
        print_json(report)
    else:
        show(describe_stats(report))
        if plot is not None:
            notes.say(f"drawn: {plot}")


def preview(
    folder: Annotated[FilePath, Field(description="Folder of rows that `ropewalk data pack` wrote.")],
    settings: PreviewConfig,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Print the first packed rows (training sequences), and mark documents, padding, and tokens excluded from the
    loss.
    """
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


PACK_EXAMPLE = "ropewalk data pack books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
STATS_EXAMPLE = "ropewalk data stats books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
app = make_group(
    "data",
    "Pack documents into rows (training sequences), count documents and tokens, or print packed rows.",
    [
        make_command(pack, "pack", PACK_EXAMPLE),
        make_command(stats, "stats", STATS_EXAMPLE),
        make_command(preview, "preview", "ropewalk data preview packed --rows 1 --tokens 40"),
    ],
)
