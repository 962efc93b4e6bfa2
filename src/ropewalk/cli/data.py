"""``ropewalk data``: documents to packed training rows, and what documents and rows consist of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from rich.table import Table

from ropewalk.cli import data_preview, data_stats
from ropewalk.cli.binding import make_command, make_group
from ropewalk.cli.data_options import Paths, context_of, sources
from ropewalk.cli.options import JsonFlag
from ropewalk.cli.output import notes, on_interrupt, print_json, results
from ropewalk.data.settings import InterleaveSettings, PackConfig, PackSettings, SourceFields
from ropewalk.io.settings import FilePath, Option, Settings

if TYPE_CHECKING:
    from ropewalk.data.run import PackResult


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
    config = PackConfig(**{**dict(settings), "rows": rows, "sources": sources(paths, fields)})
    with on_interrupt(lambda: _so_far(out, store)):
        result = run.pack(config, context_of(out))
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

    _show(run.merge(parts, context_of(out)), as_json)


def _show(result: PackResult, as_json: bool) -> None:
    if as_json:
        print_json(result.to_json())
        return
    console = results()
    if result.manifest is None:
        console.print(
            f"{result.rows:,} of {result.total:,} rows are there; other shards have yet to write theirs: into this "
            "folder, or into others, to be put together by `ropewalk data merge`"
        )
    else:
        if result.reused:
            notes.print("These rows were packed before; nothing was done.")
        _print_packed(result.manifest)
    console.print()
    console.say(str(result.folder))


def _print_packed(manifest: Mapping[str, Any]) -> None:
    from ropewalk.data.rows.manifest import token_account

    counts, context = manifest["counts"], manifest["settings"]["context"]
    account, packing, split, reading = (
        token_account(counts),
        counts["packing"],
        counts["split"],
        counts["reading"],
    )
    facts = [
        (f"rows of {context:,} tokens", packing["rows"]),
        ("documents read", reading["documents"]),
        ("documents held out", split["validation_documents"]),
        ("documents packed, repeated ones each time", packing["documents"]),
        ("documents' own tokens", account["tokens_in"]),
        ("of these in rows or left over at the end", account["own"]),
        ("BOS tokens added", account["bos"]),
        ("EOS tokens added", account["eos"]),
        ("tokens in rows", account["tokens_packed"]),
        ("tokens of the incomplete last row, left out", account["tokens_remainder"]),
        ("documents cut at a row's end", packing["cut_documents"]),
    ]
    repeats = manifest["corpus"]["repeats"] or {"documents": 0, "tokens": 0}
    remarks = [
        ("documents that occur more than once in the input", repeats["documents"]),
        ("tokens of their further copies", repeats["tokens"]),
        ("tokens of tags added, not trained on", account["tags"]),
        ("tokens of padding added, not trained on", account["padding"]),
        ("documents that the mixture leaves out", counts["mixture"]["unread_documents"]),
        ("documents that it repeats", counts["mixture"]["repeated_documents"]),
        ("documents truncated or skipped as longer than a row", packing["long_documents"]),
        ("tokens dropped with them", account["dropped"]),
        ("documents' own BOS tokens that gave way to ours", account["own_bos"]),
        ("empty documents passed over", reading["empty_documents"] + packing["empty_documents"]),
        ("copies of held-out documents, left out", split["withheld_duplicates"]),
        ("binary files passed over", reading["binary_files"]),
        ("hidden files and folders passed over", reading["hidden_entries"]),
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for fact, count in facts + [remark for remark in remarks if remark[1]]:
        table.add_row(fact, f"{count:,}")
    results().print(table)
    _print_mixture(manifest["mixture"])


def _print_mixture(report: Mapping[str, Any] | None) -> None:
    from ropewalk.data.mixture.report import MixtureReport, explain

    if report is not None:
        console = results()
        console.print()
        for sentence in explain(MixtureReport.from_dict(report)):
            console.say(sentence)


PACK_EXAMPLE = "ropewalk data pack books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k"
app = make_group(
    "data",
    "From documents to packed training rows.",
    [
        make_command(pack, "pack", PACK_EXAMPLE),
        make_command(merge, "merge", "ropewalk data merge part0 part1 part2 part3 --out rows"),
        data_stats.command,
        data_preview.command,
    ],
)
