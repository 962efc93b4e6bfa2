"""Public functions of data preparation: pack documents, count documents or rows, preview rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.data.read.embedded import EMBEDDED
from ropewalk.data.read.input_splits import check_specs
from ropewalk.data.row_preview import RowPreview, preview_row, with_texts
from ropewalk.data.rows.manifest import summary
from ropewalk.data.rows.pack import pack_rows
from ropewalk.data.rows.packed_rows import PackedRows, holds_rows, is_packed, open_rows
from ropewalk.data.rows.writer import Writing
from ropewalk.data.settings import PackConfig, PreviewConfig, StatsConfig
from ropewalk.data.statistics import rows_report, statistics_report
from ropewalk.data.tokens.count import count_splits
from ropewalk.data.tokens.samples import sample_tokens
from ropewalk.data.tokens.special_ids import TokenUse, special_ids, tokens_of_rows
from ropewalk.data.tokens.tokenise import Progress, load_tokenizer, tokenizer_identity
from ropewalk.errors import RopewalkError
from ropewalk.io.results import Result, plain_json

if TYPE_CHECKING:
    from ropewalk.parallel.context import RunContext


@dataclass(frozen=True)
class PackResult(Result):
    """Result of packing.

    Attributes:
        folder: folder of the rows.
        reused: whether the rows existed already and nothing was done.
        manifest: settings, inputs and counts of the rows.
    """

    folder: Path
    reused: bool
    manifest: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.manifest["counts"]["packing"]["rows"])

    def open(self) -> PackedRows:
        """The rows."""
        return open_rows(self.folder)

    def to_json(self) -> dict[str, Any]:
        """Folder, counts, the account of all tokens, and the manifest, as JSON values."""
        values = {"folder": str(self.folder), "reused": self.reused, **summary(self.manifest)}
        values |= {key: value for key, value in self.manifest.items() if key not in values}
        plain: dict[str, Any] = plain_json(values)
        return plain


@dataclass(frozen=True)
class DataStats(Result):
    """Statistics of documents or packed rows, including the share of attention that each pattern skips.

    Attributes:
        report: result of :func:`ropewalk.data.statistics.rows_report`, or of ``statistics_report`` for documents, and
            the name of the tokenizer.
    """

    report: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; the share of an empty whole is None."""
        plain: dict[str, Any] = plain_json(self.report)
        return plain


@dataclass(frozen=True)
class DataPreview(Result):
    """Preview of the first packed rows of a folder.

    Attributes:
        folder: folder of the rows.
        tokenizer: name of the tokenizer that decoded the texts.
        context: tokens of a row.
        pattern: attention pattern of the rows.
        total: number of rows in the folder.
        rows: previews of the first rows.
        tokens: the tokens that packing added.
        kind: the documents that were packed, such as ``documents of at most 4,096 tokens``; None, and left out of JSON,
            for documents of any length.
    """

    folder: Path
    tokenizer: str
    context: int
    pattern: str
    total: int
    rows: tuple[RowPreview, ...]
    tokens: tuple[TokenUse, ...] = ()
    kind: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``rows_there`` is the number of rows in the folder."""
        return {
            "folder": str(self.folder),
            "tokenizer": self.tokenizer,
            "context": self.context,
            "pattern": self.pattern,
            **({} if self.kind is None else {"kind": self.kind}),
            "tokens": [asdict(token) for token in self.tokens],
            "rows_there": self.total,
            "rows": [{"row": number, **row.to_json()} for number, row in enumerate(self.rows)],
        }


def pack(config: PackConfig, context: RunContext) -> PackResult:
    """Pack documents into rows on disk; call it again with the same arguments to resume after an interruption.

    Args:
        config: the documents, the settings of the rows, and this machine's shard of the work.
        context: ``output`` is the folder for the rows. It must be new or empty, or contain the same rows. The reporter
            shows progress.

    Returns:
        ``open()`` gives the rows as a sequence of :class:`ropewalk.Row`; ``manifest`` has their settings, inputs and
            counts.

    Raises:
        RopewalkError: if sources or settings are invalid, if the tokens do not fill one row, if a file changes while it
            is read, or if the folder contains other files or cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from ropewalk.data import PackConfig, pack
        >>> from ropewalk.parallel.context import RunContext
        >>> source = {"path": "embedded:validation", "max_documents": 20}
        >>> config = PackConfig(sources=[source], tokenizer="embedded", rows={"context": "1k"})
        >>> result = pack(config, RunContext(output=Path(mkdtemp(), "rows")))
        >>> result.open()[0].layout.total_length
        1024
    """
    if context.output is None:
        raise RopewalkError("packing needs an output folder; give RunContext(output=FOLDER)")
    folder = context.output.expanduser()
    # Asked before packing, after which the folder is packed in any case.
    reused = is_packed(folder)
    with _progress(context) as (read, written):
        made = pack_rows(config, folder, progress=read, written=written, note=context.rank_0_reporter.note)
    return PackResult(made.folder, reused, made.manifest)


@contextmanager
def _progress(context: RunContext) -> Iterator[tuple[Progress, Writing]]:
    """Progress callbacks: documents, tokens and speed while sources are read, then rows written."""
    first: tuple[float, int, int] | None = None
    with context.rank_0_reporter.bar("packing", None) as advance:

        def read(documents: int, tokens: int) -> None:
            nonlocal first
            now = time.monotonic()
            text = f"{documents:,} documents, {tokens:,} tokens"
            if first is None:
                # The speed counts from here: neither starting up nor finding earlier tokens is part of it.
                first = now, documents, tokens
            elif now > first[0]:
                speeds = [
                    (count - before) / (now - first[0])
                    for count, before in zip((documents, tokens), first[1:], strict=True)
                ]
                text += f", {speeds[0]:,.0f} documents/s, {speeds[1]:,.0f} tokens/s"
            advance(documents, text)

        yield read, lambda rows, total: advance(rows, f"{rows:,} of {total:,} rows written")


def stats(config: StatsConfig, context: RunContext) -> DataStats:
    """Count documents and tokens by source, with lengths, repeats, and the share of attention that each pattern skips.

    Args:
        config: a folder of packed rows, whose digests are verified; or documents and a tokenizer.
        context: run context whose reporter shows progress.

    Raises:
        RopewalkError: if packed rows are combined with documents, a tokenizer or a length, and for errors in opening
            rows or reading documents.

    Example:
        >>> from ropewalk.data import StatsConfig, stats
        >>> from ropewalk.parallel.context import RunContext
        >>> source = {"path": "embedded:validation", "max_documents": 20}
        >>> stats(StatsConfig(sources=[source], length="1k"), RunContext()).report["documents"]
        20
    """
    folder = folder_of_rows(config)
    if folder is not None:
        rows = open_rows(folder, verify=True)
        with context.rank_0_reporter.bar("rows", None) as advance:
            report = rows_report(rows, lambda done: advance(done, f"{done:,} of {len(rows):,}"))
        return DataStats({**report, "samples": None, "tokenizer": rows.manifest["tokenizer"]["name_or_path"]})
    name = EMBEDDED if config.tokenizer is None else config.tokenizer
    tokenizer = load_tokenizer(name)
    check_specs(config.sources)
    samples = [asdict(sample) for sample in sample_tokens(config.sources, tokenizer)]
    with context.rank_0_reporter.bar("documents", None) as advance:
        counted = count_splits(
            config.sources,
            tokenizer,
            config.workers,
            lambda done, tokens: advance(done, f"{tokens:,} tokens"),
        )
        report = statistics_report(counted.statistics(config.length))
    return DataStats(
        # Keys that only packed rows have are None, so that both reports have the same keys.
        {
            **report,
            "tokenizer": name,
            "samples": samples,
            **dict.fromkeys(("pieces", "in_rows", "mixture", "corpus")),
        }
    )


def folder_of_rows(config: StatsConfig) -> Path | None:
    """The folder of packed rows that the sources name; None if they name documents."""
    folders = [Path(source.path).expanduser() for source in config.sources]
    packed = [folder for folder in folders if holds_rows(folder)]
    if not packed:
        return None
    if len(folders) > 1:
        raise RopewalkError(
            f"{packed[0]} holds packed rows, which cannot be combined with other sources; give this folder alone"
        )
    for option, given in (("tokenizer", config.tokenizer), ("length", config.length)):
        if given is not None:
            raise RopewalkError(
                f"{packed[0]} holds packed rows, which state their own {option}; omit {option} (--{option})"
            )
    return packed[0]


def preview(folder: Path, config: PreviewConfig) -> DataPreview:
    """Preview the first packed rows: documents, chunks, tags, anchor, padding, and tokens that are never targets.

    Args:
        folder: folder of packed rows; the digests of its files are verified.
        config: how many rows to show, and how much of each document.

    Raises:
        RopewalkError: if the folder has no rows, they are damaged, or the tokenizer is missing or a different one.
    """
    place = folder.expanduser()
    if not place.exists():
        raise RopewalkError(f"there is no folder {str(folder)!r}")
    if not holds_rows(place):
        raise RopewalkError(
            f"{folder} holds no packed rows; pack documents first: ropewalk data pack {folder} --tokenizer MODEL "
            "--length 128k --out rows"
        )
    packed = open_rows(folder, verify=True)
    name = config.tokenizer or packed.manifest["tokenizer"]["name_or_path"]
    tokenizer = load_tokenizer(name)
    # Opened again to compare the tokenizer: another one would decode the ids into other text.
    open_rows(folder, tokenizer=tokenizer_identity(tokenizer))
    settings, added = packed.settings, special_ids(tokenizer, packed.settings)
    chosen = {each for each in (added.bos, added.eos, added.anchor) if each is not None}
    special = chosen.union(tokenizer.all_special_ids)
    eos = added.eos if settings.eos else None

    def decode(ids: list[int]) -> str:
        # Without clean-up, which would hide spaces that the model sees.
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    shown, before = [], None
    for index in range(min(config.rows, len(packed))):
        row = packed.packed(index)
        each = preview_row(row, settings.anchor_length, special, config.tokens, before, eos)
        shown.append(with_texts(each, row.input_ids, decode))
        # Best fit may put a document's pieces into any rows, so consecutive numbers do not mean a continuation.
        before = row if settings.packing == "sequential" else None
    tokens = tokens_of_rows(tokenizer, settings)
    return DataPreview(
        packed.folder,
        name,
        settings.context,
        settings.pattern,
        len(packed),
        tuple(shown),
        tokens,
        settings.kind,
    )
