"""Write packed rows: claim the folder, write its files as tasks on one or several machines, and complete it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.report import REPORTS
from ropewalk.data.rows.assemble import PlannedRows, assemble_rows
from ropewalk.data.rows.packed_rows import (
    FORMAT_VERSION,
    JOB,
    MANIFEST,
    VALIDATION,
    WORK,
    PackedRows,
    is_packed,
    open_rows,
    read_manifest,
    rows_file,
)
from ropewalk.data.rows.weave import WovenReader
from ropewalk.data.settings import WorkSettings, processes
from ropewalk.data.tokens.arrow import INT32_LIST, INT64_LIST, STRING, STRING_LIST, write_table
from ropewalk.data.tokens.chat import token_ids
from ropewalk.data.tokens.corpus import Corpus
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, damage, digest
from ropewalk.io.files import parse_json, remove_left_overs, room_for, write_json, writing
from ropewalk.runs.identity import Difference, refuse_other
from ropewalk.runs.tasks import Executor, Processes, own_first, run_tasks

MOST_FILE_TOKENS, LEAST_FILE_TOKENS, FILES = 1 << 25, 1 << 16, 64
"""Bounds on the tokens of a row file, and the intended number of files. A file is the unit that machines share, and the
most that a killed run repeats."""

BATCH_TOKENS = 1 << 20
"""Tokens that are assembled in memory before they are written."""

ID_BYTES = np.dtype(np.int32).itemsize
"""Bytes of a token of a row on disk."""
PROCESS_TOKENS = 1 << 22
"""Tokens of rows for which it is worth to start another process."""

_COLUMNS = {
    "input_ids": INT32_LIST,
    "segment_lengths": INT32_LIST,
    "segment_documents": INT32_LIST,
    "sources": STRING_LIST,
    "numbers": INT64_LIST,
    "masked": INT32_LIST,
}

Writing = Callable[[int, int], None]
"""Called with the number of rows on disk, and the total."""


def row_files(packed: PlannedRows) -> list[tuple[str, int]]:
    """Name and number of rows of each file, all equal but the last.

    They depend only on the number of rows and their length, so machines agree on them.
    """
    rows, context = packed.num_rows, packed.settings.context
    least, most = (max(1, tokens // context) for tokens in (LEAST_FILE_TOKENS, MOST_FILE_TOKENS))
    each = min(most, max(least, -(-rows // FILES)))
    return [(rows_file(n), min(each, rows - first)) for n, first in enumerate(range(0, rows, each))]


def begin(folder: Path, job: dict[str, Any]) -> bool:
    """Create a folder for a job, or resume the job in an existing folder.

    Args:
        folder: the folder.
        job: everything that the rows depend on, JSON values.

    Returns:
        Whether the rows are already complete.

    Raises:
        RopewalkError: if the folder contains complete or unfinished rows of another job, or other files.
    """
    if (found := read_manifest(folder)) is not None:
        if found.get("format_version") != FORMAT_VERSION:
            raise RopewalkError(
                f"{folder} holds rows of format version {found.get('format_version')}; choose another folder"
            )
        _refuse_other(folder, found, job, "holds rows")
        # Left behind if a run is killed right after it wrote the manifest.
        shutil.rmtree(folder / WORK, ignore_errors=True)
        return True
    if folder.exists() and (not folder.is_dir() or not _is_ours(folder)):
        raise RopewalkError(f"{folder} contains other files; give a new or empty folder for the rows")
    known = folder / WORK / JOB
    with writing(folder):
        (folder / WORK).mkdir(parents=True, exist_ok=True)
        claim(known, job)
    _refuse_other(folder, _read(known), job, "holds unfinished rows")
    return False


def _is_ours(folder: Path) -> bool:
    # A folder with WORK alone is one that another process has just begun.
    return (folder / WORK / JOB).is_file() or all(path.name == WORK for path in folder.iterdir())


def claim(path: Path, job: dict[str, Any]) -> None:
    """Write a job's file unless it exists; if several processes try at once, exactly one succeeds."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")
    try:
        # Link instead of rename: a link fails if the target exists, so only one process can claim the folder.
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise
        # A file system without hard links: here the last of several processes wins.
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def release(folder: Path) -> None:
    """Make a folder without rows available to jobs with other settings, which can reuse its tokens."""
    # The records of complete files tie the folder to its job.
    if not any((folder / WORK).glob("*.arrow.json")):
        (folder / WORK / JOB).unlink(missing_ok=True)


@dataclass(frozen=True)
class RowsWriter:
    """Writes a folder of rows.

    Attributes:
        folder: the folder.
        manifest: contents of the manifest without the list of files.
        files: name and number of rows of every row file.
    """

    folder: Path
    manifest: dict[str, Any]
    files: Sequence[tuple[str, int]]

    @property
    def rows_digest(self) -> str:
        """Digest of everything that the files' contents depend on; equal on every machine."""
        # Not the inputs, whose paths may differ: the digest of the tokens covers what was read.
        keys = ["format_version", "settings", "mixing", "validation", "tokenizer", "tokens_digest"]
        # What gzip ratios drop depends on the zlib that made them, and synthetic tasks on how they are worded.
        keys += [key for key in REPORTS if key in self.manifest]
        return digest({key: self.manifest[key] for key in keys})

    def commit(self, name: str, written: FileDigest) -> None:
        """Record that a file is complete, with its size, its digest and the rows that it belongs to."""
        write_json(self.folder / WORK / f"{name}.json", {**asdict(written), "of": self.rows_digest})

    def committed(self, name: str) -> FileDigest | None:
        """Recorded size and digest of a file; None if it is missing or incomplete.

        Raises:
            RopewalkError: if it belongs to other rows.
        """
        record = self.folder / WORK / f"{name}.json"
        if not record.is_file() or not (self.folder / name).is_file():
            return None
        found = _read(record)
        if found.get("of") != self.rows_digest:
            raise RopewalkError(
                f"{self.folder / name} belongs to other rows; delete {self.folder} and pack again"
            )
        return FileDigest(found["bytes"], found["sha256"])

    def intact(self, name: str) -> bool:
        """Whether a file is complete. The record of a damaged one is removed, so that it is written again."""
        found = self.committed(name)
        if found is None or damage(self.folder / name, found) is None:
            return found is not None
        (self.folder / WORK / f"{name}.json").unlink(missing_ok=True)
        return False

    def finish(self) -> None:
        """Write the manifest, and delete the files that only the writer needs.

        Raises:
            RopewalkError: if a file is not complete, or belongs to other rows.
        """
        # Another machine may have written it between our last file and this check, and then the records are gone.
        if not is_packed(self.folder):
            described = [{"name": name, "rows": rows, **self._digest(name)} for name, rows in self.files]
            validation = {"name": VALIDATION, **self._digest(VALIDATION)}
            # Last, because its presence is what marks the rows as complete.
            write_json(
                self.folder / MANIFEST,
                {**self.manifest, "row_files": described, "validation_file": validation},
            )
        shutil.rmtree(self.folder / WORK, ignore_errors=True)
        remove_left_overs(self.folder)

    def _digest(self, name: str) -> dict[str, Any]:
        found = self.committed(name)
        if found is None:
            raise RopewalkError(
                f"{self.folder / name} was removed while rows were packed; repeat the command"
            )
        return asdict(found)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RopewalkError(f"cannot read {path}: {error}; delete its folder and pack again") from error
    if not isinstance(value, dict):
        raise RopewalkError(f"{path} contains no JSON object; delete its folder and pack again")
    return value


def _refuse_other(folder: Path, existing: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Raise if two jobs differ.

    Raises:
        RopewalkError: with the first difference.
    """

    def said(found: Difference) -> str:
        key, *within = found.key.split(".")
        if key == "inputs":
            how = "made from other files, or from files that have changed since"
        else:
            name = ".".join([{"mixing": "mixture", "specs": "sources"}.get(key, key), *within])
            name = name.removeprefix("settings.")
            how = f"packed with {name}: {_in_words(found.was)}, but you gave {name}: {_in_words(found.now)}"
        return f"{folder} {what} {how}; give another folder, or delete this folder"

    # The digest follows from the other keys, and tells a user nothing. A manifest has more of them, and the name of the
    # tokenizer, on which the rows do not depend.
    now = {key: value for key, value in wanted.items() if key != "digest"}
    then = {key: existing.get(key) for key in now}
    if isinstance(then["tokenizer"], dict):
        then["tokenizer"] = {key: value for key, value in then["tokenizer"].items() if key != "name_or_path"}
    refuse_other(then, now, said)


def _in_words(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        # Leave out settings that are off, so that the message stays short.
        return ", ".join(
            f"{key} {_in_words(each)}" for key, each in value.items() if each not in (None, False)
        )
    return str(value)


def write_rows(
    writer: RowsWriter,
    packed: PlannedRows,
    corpus: Corpus,
    reader: WovenReader,
    validation: NDArray[np.int64],
    work: WorkSettings,
    executor: Executor | None,
    written: Writing | None,
    note: Callable[[str], None] | None = None,
) -> PackedRows:
    """Write the files that are missing, this machine's share before those of others, and complete the folder."""
    folder, done = writer.folder, 0
    waiting = sum(rows for name, rows in writer.files if writer.committed(name) is None)
    said = room_for(folder, waiting * packed.settings.context * ID_BYTES, "the rows that are not written yet")
    if said is not None and note is not None:
        note(said)
    firsts = [0, *accumulate(rows for _, rows in writer.files)]
    if not writer.intact(VALIDATION):
        columns = {"input_ids": INT32_LIST, "source": STRING}
        writer.commit(VALIDATION, write_table(folder / VALIDATION, columns, _held_out(corpus, validation)))

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if written is not None:
            written(done, packed.num_rows)

    def missing() -> Iterator[tuple[str, PlannedRows]]:
        for number in own_first(range(len(writer.files)), work.shard):
            name, rows = writer.files[number]
            if writer.intact(name):
                count(rows)
            else:
                # Made as tasks are started: a file's share of the plan takes megabytes.
                yield name, packed.rows(firsts[number], firsts[number + 1])

    def is_there(part: tuple[str, PlannedRows]) -> bool:
        # Whoever completes the folder removes the records.
        return writer.committed(part[0]) is not None or is_packed(folder)

    if executor is None:
        worth = -(-waiting * packed.settings.context // PROCESS_TOKENS)
        executor = Processes(min(processes(work.workers), worth or 1))
    # Absolute, because a task may have another working directory.
    shared = (replace(writer, folder=folder.absolute()), reader)
    for _, part in run_tasks(executor, _write_rows, shared, missing(), is_there, folder):
        count(part.num_rows)
    writer.finish()
    return open_rows(folder)


def _write_rows(shared: tuple[RowsWriter, WovenReader], part: tuple[str, PlannedRows]) -> None:
    """Write one file of rows; a task."""
    (writer, corpus), (name, packed) = shared, part
    try:
        writer.commit(name, write_table(writer.folder / name, _COLUMNS, _batches(packed, corpus)))
    finally:
        corpus.close()


def _held_out(corpus: Corpus, validation: NDArray[np.int64]) -> Iterator[dict[str, list[Any]]]:
    """Yield the validation documents in batches of about ``BATCH_TOKENS``."""
    ends = np.cumsum(corpus.lengths[validation])
    for batch in np.split(validation, np.flatnonzero(np.diff(ends // BATCH_TOKENS)) + 1):
        yield {
            "input_ids": [token_ids(corpus.tokens(n)) for n in batch.tolist()],
            "source": [corpus.sources[s] for s in corpus.source_ids[batch]],
        }


def _batches(packed: PlannedRows, corpus: WovenReader) -> Iterator[dict[str, list[Any]]]:
    # Batches bound memory only; a row does not depend on its batch.
    step = max(1, BATCH_TOKENS // packed.settings.context)
    for first in range(0, packed.num_rows, step):
        rows = assemble_rows(packed, corpus, first, min(packed.num_rows, first + step))
        yield {name: [getattr(row, name) for row in rows] for name in _COLUMNS}
