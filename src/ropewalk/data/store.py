"""prepare_rows: from sources to packed rows on disk, once; the same inputs and settings find them again."""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ropewalk
from ropewalk.data.arrow import INT32_LIST, STRING, STRING_LIST, TableWriter, writing
from ropewalk.data.documents import Document, SourceSpec
from ropewalk.data.identity import digest, inputs_identity
from ropewalk.data.pack import PackingCounts, PackingSettings, pack
from ropewalk.data.readers import ReadingCounts, read_documents
from ropewalk.data.rows import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    ROWS,
    VALIDATION,
    PackedRows,
    is_packed,
    open_rows,
    packed_folders,
)
from ropewalk.data.split import SplitCounts, ValidationSettings, split_documents
from ropewalk.data.tokenise import (
    Progress,
    TokenisedDocument,
    load_tokenizer,
    special_ids,
    tokenise,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError

_PARTIAL = ".partial-"
_LIBRARIES = ("datasets", "numpy", "pyarrow", "tokenizers", "transformers")


def prepare_rows(
    specs: Sequence[SourceSpec],
    tokenizer: Any,
    settings: PackingSettings,
    cache_dir: str | Path,
    validation: ValidationSettings | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> PackedRows:
    """Read, split, tokenise and pack documents, or open the rows that the same call made before.

    The rows lie in a folder below ``cache_dir`` whose name is a digest of all they depend on: the sources'
    files, the tokenizer, the settings, the validation split and this format's version. It is written under
    a temporary name and renamed when complete, so a killed run leaves nothing that a later one would use,
    and processes that prepare the same rows at once end up with one folder.

    Args:
        specs: the sources, in the order their documents are to be packed.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        settings: how documents become rows.
        cache_dir: the folder to keep packed rows in; it is made if need be.
        validation: which documents to hold out; None holds out none.
        workers: tokenisation processes.
        progress: called with documents and tokens so far; not at all where the rows are found.

    Raises:
        RopewalkError: for bad sources or settings, for too few tokens to fill one row, if a file changed
            while it was read, or if ``cache_dir`` cannot be written.
    """
    validation = validation or ValidationSettings()
    cache = Path(cache_dir).expanduser()
    _refuse_circles(specs, cache)
    named = tokenizer if isinstance(tokenizer, str) else tokenizer.name_or_path
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    settings.bos_policy(special_ids(loaded))
    inputs = inputs_identity(specs)
    identity = tokenizer_identity(loaded)
    dependencies = {
        "format_version": FORMAT_VERSION,
        "inputs": inputs,
        "settings": asdict(settings),
        "specs": [asdict(spec) for spec in specs],
        "tokenizer": identity,
        "validation": asdict(validation),
    }
    key = digest(dependencies)[:32]
    folder = cache / key
    if is_packed(folder):
        return open_rows(folder)
    partial = folder.with_name(f"{_PARTIAL}{key}-{uuid.uuid4().hex[:8]}")
    with writing(partial):
        partial.mkdir(parents=True)
    try:
        run = _Run(specs, loaded, settings, validation, workers, progress)
        run.write(partial)
        if inputs_identity(specs) != inputs:
            raise RopewalkError("a file changed while it was being packed; pack again when it is complete")
        manifest = {
            "format": FORMAT,
            "digest": key,
            **dependencies,
            "tokenizer": {"name_or_path": named, **identity},
            "counts": run.counts(),
            "sources": run.training_sources,
            "validation_sources": run.validation_sources,
            "versions": {
                "ropewalk": ropewalk.__version__,
                "python": platform.python_version(),
                **{name: version(name) for name in _LIBRARIES},
            },
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with writing(partial / MANIFEST):
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_rows(folder)


def _refuse_circles(specs: Sequence[SourceSpec], cache: Path) -> None:
    """Rows must not become documents of the next run, and so change what the next run depends on."""
    for spec in specs:
        path = Path(spec.path).expanduser()
        if not path.is_dir():
            continue
        if cache.resolve().is_relative_to(path.resolve()):
            raise RopewalkError(f"packed rows cannot be kept in {cache}, inside the source {spec.path}")
        if is_packed(path) or packed_folders(path):
            raise RopewalkError(f"{spec.path} holds rows that are packed already, not documents")


def _publish(partial: Path, folder: Path) -> None:
    """Give a complete folder its name; where another process was first, its folder holds the same rows."""
    try:
        partial.rename(folder)
    except OSError as error:
        if not is_packed(folder):
            raise RopewalkError(f"cannot write {folder}: {error.strerror}") from error


@dataclass
class _Run:
    """One pass over the documents, and what it counted."""

    specs: Sequence[SourceSpec]
    tokenizer: Any
    settings: PackingSettings
    validation: ValidationSettings
    workers: int
    progress: Progress | None
    reading: ReadingCounts = field(default_factory=ReadingCounts)
    split: SplitCounts = field(default_factory=SplitCounts)
    packing: PackingCounts = field(default_factory=PackingCounts)
    training_sources: dict[str, dict[str, int]] = field(default_factory=dict)
    validation_sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write rows and validation documents; every row, document and token is counted on the way."""
        rows = TableWriter(
            folder / ROWS,
            {
                "input_ids": INT32_LIST,
                "segment_lengths": INT32_LIST,
                "segment_documents": INT32_LIST,
                "sources": STRING_LIST,
            },
        )
        held_out = TableWriter(folder / VALIDATION, {"input_ids": INT32_LIST, "source": STRING})
        try:
            special = special_ids(self.tokenizer)
            for row in pack(self._training(held_out), self.settings, special, self.packing):
                rows.write(
                    self.settings.context + 2 * len(row.segment_lengths),
                    input_ids=row.input_ids,
                    segment_lengths=row.segment_lengths,
                    segment_documents=row.segment_documents,
                    sources=row.sources,
                )
            if rows.records == 0:
                held = self.split.validation_documents + self.split.withheld_duplicates
                aside = f" ({held} more are held out for validation: hold out fewer)" if held else ""
                raise RopewalkError(
                    f"not one row is full: {self.packing.remainder_tokens} training tokens in "
                    f"{self.packing.documents} documents{aside}, and a row takes {self.settings.context}"
                )
            rows.close()
            held_out.close()
        finally:
            rows.abandon()
            held_out.abandon()

    def counts(self) -> dict[str, dict[str, int]]:
        return {
            "reading": asdict(self.reading),
            "split": asdict(self.split),
            "packing": asdict(self.packing),
        }

    def _training(self, held_out: TableWriter) -> Iterator[TokenisedDocument]:
        marks: deque[bool] = deque()
        documents = self._documents(marks)
        for document in tokenise(documents, self.tokenizer, self.workers, progress=self.progress):
            # Tokenising keeps the order, so the oldest mark is this document's.
            validation = marks.popleft()
            sources = self.validation_sources if validation else self.training_sources
            totals = sources.setdefault(document.source, {"documents": 0, "tokens": 0})
            totals["documents"] += 1
            totals["tokens"] += len(document.input_ids)
            if validation:
                held_out.write(len(document.input_ids), input_ids=document.input_ids, source=document.source)
            else:
                yield document

    def _documents(self, marks: deque[bool]) -> Iterator[Document]:
        documents = read_documents(self.specs, self.reading)
        for document, validation in split_documents(documents, self.validation, self.split):
            marks.append(validation)
            yield document
