"""``ropewalk data pack`` and ``merge``: documents to packed training rows; the group's other commands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from ropewalk.cli import data_preview, data_stats
from ropewalk.cli.data_options import (
    MaxDocumentsOption,
    PathsArgument,
    SourceFieldOption,
    TextFieldOption,
    WorkersOption,
    numbers,
    packing_progress,
    processes,
    shard_of,
    shares_by_length,
    shares_by_name,
    source_specs,
)
from ropewalk.cli.output import JsonOption, notes, on_interrupt, print_json, results
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data import PackedRows
    from ropewalk.data.rows.store import Part

_CHUNK_DEFAULTS = ("64", "2048", "2,3", "0.2,0.8")
_ROWS, _CHUNKS, _MIXTURE, _WORK = "Rows", "Interleaved chunks", "Mixture", "Work"


def register(app: typer.Typer) -> None:
    """Add the group ``data`` to the program."""
    group = typer.Typer(no_args_is_help=True, help="From documents to packed training rows.")
    group.command(
        "pack",
        epilog="Example: ropewalk data pack books/ web.jsonl.gz --tokenizer meta-llama/Llama-3.1-8B --length 128k",
    )(pack_command)
    group.command("merge", epilog="Example: ropewalk data merge part0 part1 part2 part3 --out rows")(
        merge_command
    )
    data_stats.register(group)
    data_preview.register(group)
    app.add_typer(group, name="data")


def pack_command(
    paths: PathsArgument,
    tokenizer: Annotated[str, typer.Option(help="Model or tokenizer: a folder or a hub name.")],
    length: Annotated[str, typer.Option(help="Tokens of a row: 131072, 128k, 1M.", rich_help_panel=_ROWS)],
    pattern: Annotated[
        str, typer.Option(help="anchor, intra_document or full.", rich_help_panel=_ROWS)
    ] = "anchor",
    positions: Annotated[
        str, typer.Option(help="continuous, or reset in each document.", rich_help_panel=_ROWS)
    ] = "continuous",
    bos: Annotated[
        str, typer.Option(help="Where BOS goes: auto, document, row or none.", rich_help_panel=_ROWS)
    ] = "auto",
    eos: Annotated[bool, typer.Option(help="End every document with EOS.", rich_help_panel=_ROWS)] = True,
    long_documents: Annotated[
        str,
        typer.Option(help="Documents longer than a row: split, truncate or skip.", rich_help_panel=_ROWS),
    ] = "split",
    packing: Annotated[
        str,
        typer.Option(
            help="sequential cuts documents at a row's end; best_fit cuts only those longer than a row, and pads.",
            rich_help_panel=_ROWS,
        ),
    ] = "sequential",
    remainder: Annotated[
        str, typer.Option(help="The row that is not full: drop or pad.", rich_help_panel=_ROWS)
    ] = "drop",
    tag: Annotated[
        str | None,
        typer.Option(help='Text before each document, not trained on: "{source}: ".', rich_help_panel=_ROWS),
    ] = None,
    interleave: Annotated[
        bool, typer.Option(help="Cut documents and shuffle the parts of a row.", rich_help_panel=_CHUNKS)
    ] = False,
    chunk_min: Annotated[
        str, typer.Option(help="Shortest document that is cut.", rich_help_panel=_CHUNKS)
    ] = _CHUNK_DEFAULTS[0],
    chunk_max: Annotated[
        str, typer.Option(help="Longest document that is cut.", rich_help_panel=_CHUNKS)
    ] = _CHUNK_DEFAULTS[1],
    chunk_parts: Annotated[
        str, typer.Option(help="Into how many parts, one of these.", rich_help_panel=_CHUNKS)
    ] = _CHUNK_DEFAULTS[2],
    chunk_cuts: Annotated[
        str,
        typer.Option(help="Cuts lie between these shares of the document.", rich_help_panel=_CHUNKS),
    ] = _CHUNK_DEFAULTS[3],
    weights: Annotated[
        str | None,
        typer.Option(help="How often each source is read: books=2,web=0.5.", rich_help_panel=_MIXTURE),
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(help="Share of tokens of each source: books=0.3,web=0.7.", rich_help_panel=_MIXTURE),
    ] = None,
    total_tokens: Annotated[
        str | None, typer.Option(help="Tokens that the mixture is to have.", rich_help_panel=_MIXTURE)
    ] = None,
    long_from: Annotated[
        str | None, typer.Option(help="A document this long is long: 4k, 32k.", rich_help_panel=_MIXTURE)
    ] = None,
    long_factor: Annotated[
        float | None,
        typer.Option(help="Draw long documents this many times as often.", rich_help_panel=_MIXTURE),
    ] = None,
    long_share: Annotated[
        float | None,
        typer.Option(help="Or: share of tokens in long documents.", rich_help_panel=_MIXTURE),
    ] = None,
    length_shares: Annotated[
        str | None,
        typer.Option(
            help="Or: share of tokens by length, each from: 0=0.3,4k=0.3,32k=0.4.", rich_help_panel=_MIXTURE
        ),
    ] = None,
    per: Annotated[
        str,
        typer.Option(
            help="Upsample long documents within each source (keeps the sources' shares) or over the whole corpus: "
            "source or corpus.",
            rich_help_panel=_MIXTURE,
        ),
    ] = "source",
    max_epochs: Annotated[
        float, typer.Option(help="No document is read more often.", rich_help_panel=_MIXTURE)
    ] = 4.0,
    shortage: Annotated[
        str,
        typer.Option(
            help="Where that is not enough: refuse, or cap at it and say what is missing.",
            rich_help_panel=_MIXTURE,
        ),
    ] = "refuse",
    shuffle: Annotated[
        bool,
        typer.Option(help="Take documents in random order; mixtures always do.", rich_help_panel=_MIXTURE),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the mixture, the order and the chunks.")] = 0,
    validation_documents: Annotated[int, typer.Option(help="Documents to hold out for validation.")] = 0,
    validation_fraction: Annotated[float, typer.Option(help="Or the share of documents to hold out.")] = 0.0,
    text_field: TextFieldOption = "text",
    source_field: SourceFieldOption = "source",
    max_documents: MaxDocumentsOption = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for the rows: new, or of the same command, which it takes up again.")
    ] = Path("packed"),
    shard: Annotated[
        str,
        typer.Option(
            help="This machine's part, 0/4 to 3/4: with one OUT, or one TOKEN_STORE, machines share the work.",
            rich_help_panel=_WORK,
        ),
    ] = "0/1",
    token_store: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps tokenised documents, for other rows of the same documents and for other machines.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    workers: WorkersOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Pack documents into rows of exactly LENGTH tokens; run it again to go on where it was interrupted."""
    from ropewalk.data import InterleaveSettings, MixtureSettings, PackingSettings, ValidationSettings
    from ropewalk.data.rows.store import Job, pack_rows
    from ropewalk.data.rows.stored import is_packed
    from ropewalk.io.lengths import parse_length

    chunks = None
    if not interleave and (chunk_min, chunk_max, chunk_parts, chunk_cuts) != _CHUNK_DEFAULTS:
        raise RopewalkError("--chunk-min, --chunk-max, --chunk-parts and --chunk-cuts need --interleave")
    if interleave:
        low, high = numbers(chunk_cuts, float, "chunk-cuts", 2)
        parts = numbers(chunk_parts, int, "chunk-parts")
        chunks = InterleaveSettings(
            parse_length(chunk_min), parse_length(chunk_max), tuple(parts), (low, high), seed
        )
    settings = PackingSettings(
        context=parse_length(length),
        pattern=cast(Any, pattern),
        positions=cast(Any, positions),
        bos=cast(Any, bos),
        eos=eos,
        long_documents=cast(Any, long_documents),
        tag=tag,
        packing=cast(Any, packing),
        remainder=cast(Any, remainder),
        interleave=chunks,
    )
    mixture = MixtureSettings(
        weights=shares_by_name(weights, "weights"),
        shares=shares_by_name(shares, "shares"),
        tokens=None if total_tokens is None else parse_length(total_tokens),
        long_from=None if long_from is None else parse_length(long_from),
        long_factor=long_factor,
        long_share=long_share,
        length_shares=shares_by_length(length_shares),
        per=cast(Any, per),
        max_epochs=max_epochs,
        shortage=cast(Any, shortage),
        shuffle=shuffle,
        seed=seed,
    )
    specs = source_specs(paths, text_field, source_field, max_documents)
    job = Job(
        specs, tokenizer, settings, mixture, ValidationSettings(validation_documents, validation_fraction)
    )
    complete = is_packed(out.expanduser())
    with on_interrupt(lambda: _so_far(out, token_store)), packing_progress() as (read, written):
        rows = pack_rows(
            job,
            out,
            tokens=token_store,
            workers=processes(workers),
            shard=shard_of(shard),
            progress=read,
            written=written,
        )
    _show(rows, complete, as_json)


def _so_far(out: Path, token_store: Path | None) -> str:
    from ropewalk.data.rows.stored import WORK

    if not (out.expanduser() / WORK).is_dir():
        return "nothing is packed yet; the same command starts again"
    tokens = "" if token_store is None else f", tokenised documents in {token_store}"
    return f"what is packed so far lies in {out}{tokens}; the same command goes on from there"


def merge_command(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PARTS", help="OUT folders of the same pack command.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for all rows; a new one.")],
    as_json: JsonOption = False,
) -> None:
    """Put the parts that several machines packed into folders of their own together."""
    from ropewalk.data.rows.stored import merge_parts

    _show(merge_parts([part.expanduser() for part in parts], out.expanduser()), False, as_json)


def _show(rows: PackedRows | Part, reused: bool, as_json: bool) -> None:
    from ropewalk.data import PackedRows
    from ropewalk.data.rows.manifest import summary

    if not isinstance(rows, PackedRows):
        if as_json:
            told = {"rows": rows.total, "rows_there": rows.rows, "missing": list(rows.missing)}
            print_json({"folder": str(rows.folder), "complete": False, **told})
        else:
            results().print(
                f"{rows.rows:,} of {rows.total:,} rows are there; other shards have yet to write theirs: into this "
                "folder, or into others, to be put together by `ropewalk data merge`"
            )
            results().print()
            results().say(str(rows.folder))
        return
    if as_json:
        told = {"folder": str(rows.folder), "complete": True, "reused": reused, **summary(rows.manifest)}
        print_json({**told, **{key: value for key, value in rows.manifest.items() if key not in told}})
        return
    if reused:
        notes.print("These rows were packed before; nothing was done.")
    _print_packed(rows)


def _print_packed(rows: PackedRows) -> None:
    from ropewalk.data.rows.manifest import token_account

    counts, settings = rows.manifest["counts"], rows.settings
    account, packing, split, reading = (
        token_account(counts),
        counts["packing"],
        counts["split"],
        counts["reading"],
    )
    facts = [
        (f"rows of {settings.context:,} tokens", packing["rows"]),
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
    repeats = rows.manifest["corpus"]["repeats"] or {"documents": 0, "tokens": 0}
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
    console = results()
    console.print(table)
    _print_mixture(rows)
    console.print()
    console.say(str(rows.folder))


def _print_mixture(rows: PackedRows) -> None:
    from ropewalk.data.mixture.report import MixtureReport, explain

    report = rows.manifest["mixture"]
    if report is not None:
        console = results()
        console.print()
        for sentence in explain(MixtureReport.from_dict(report)):
            console.say(sentence)
