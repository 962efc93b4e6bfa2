"""Packed rows on disk: open a folder of them, check it, and read rows through a memory map."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
from pydantic import ValidationError

from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.rows.assemble import PADDING, PackedRow
from ropewalk.data.settings import PackingSettings
from ropewalk.data.tokens.arrow import checked_index, int32_list, open_table
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest
from ropewalk.io.files import field_fault, parse_json, plain_name
from ropewalk.io.settings import explain

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row


FORMAT = "ropewalk packed rows"
FORMAT_VERSION = 2
"""Version of the rows and files. Increase it whenever the same inputs and settings would give other rows or files."""

MANIFEST = "manifest.json"
VALIDATION = "validation.arrow"
WORK = "unfinished"
"""Subfolder of the rows' folder for files that are needed only until the rows are complete."""
JOB = "job.json"
"""File in it that says what the rows depend on."""

_OPEN_FILES = 64
_HEAD_BYTES = 256
"""The format is the first key of a manifest, so it occurs within this many bytes."""


def rows_file(number: int) -> str:
    """The name of one file of rows."""
    return f"rows-{number:05d}.arrow"


def _check_list(manifest: Path, row_files: Iterable[Mapping[str, Any]]) -> None:
    """Raise if a manifest lists a file under another name than that of its position, perhaps one in another folder.

    Raises:
        RopewalkError: also if a number of rows is not valid.
    """
    for number, each in enumerate(row_files):
        name, rows = each["name"], each["rows"]
        if plain_name(name, manifest) != rows_file(number):
            raise RopewalkError(
                f"{manifest} is damaged: it lists {name!r} instead of {rows_file(number)}; delete "
                f"the folder {manifest.parent} and pack again"
            )
        if type(rows) is not int or rows < 1:
            raise RopewalkError(
                f"{manifest} is damaged: it says that {name} has {rows!r} rows; delete the folder "
                f"{manifest.parent} and pack again"
            )


class PackedRows:
    """The packed training rows of one folder; indexing reads one row from the memory map.

    Attributes:
        folder: folder of the rows.
        manifest: contents of the manifest: tokenizer, settings, inputs, counts, sources, versions.
        settings: the settings that the rows were packed with.
        validation: the held-out documents.

    Example:
        >>> rows = open_rows("packed")                  # doctest: +SKIP
        >>> rows[0].layout.total_length                 # doctest: +SKIP
        131072
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.settings = PackingSettings.model_validate(manifest["settings"])
        self._files = [(each["name"], each["rows"]) for each in manifest["row_files"]]
        self._bounds = np.cumsum([0, *(rows for _, rows in self._files)])
        # Limit open files: every memory map uses a file descriptor.
        self._open: OrderedDict[int, pyarrow.Table] = OrderedDict()
        self.validation = ValidationDocuments(
            folder / VALIDATION, manifest["counts"]["split"]["validation_documents"]
        )

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Row:
        """Row ``index`` as tensors; a negative index counts from the end.

        Raises:
            IndexError: if there is no such row.
        """
        from ropewalk.data.rows.training_rows import training_row

        return training_row(self.packed(index), self.settings)

    def packed(self, index: int) -> PackedRow:
        """Row ``index`` as plain values; its ``input_ids`` are a view of the memory map."""
        index = checked_index(index, len(self))
        number = int(np.searchsorted(self._bounds, index, side="right")) - 1
        table, row = self._table(number), index - int(self._bounds[number])
        names = ("segment_lengths", "segment_documents", "sources", "numbers", "masked")
        lengths, documents, sources, numbers, masked = (table[name][row].as_py() for name in names)
        return PackedRow(int32_list(table["input_ids"][row]), lengths, documents, sources, numbers, masked)

    def sources(self, index: int) -> list[str]:
        """The source of each document in row ``index``, without padding."""
        row = self.packed(index)
        return [name for name, number in zip(row.sources, row.numbers, strict=True) if number != PADDING]

    def _table(self, number: int) -> pyarrow.Table:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        name, rows = self._files[number]
        table = self._open[number] = open_table(self.folder / name, rows)
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return table


class ValidationDocuments:
    """The held-out documents of a folder of rows: a sequence of TokenisedDocument, without added BOS or EOS."""

    def __init__(self, path: Path, count: int) -> None:
        self._table = open_table(path, count)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> TokenisedDocument:
        index = checked_index(index, len(self))
        return TokenisedDocument(
            int32_list(self._table["input_ids"][index]), self._table["source"][index].as_py()
        )


def open_rows(
    folder: str | Path,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    verify: bool = False,
) -> PackedRows:
    """Open the packed rows in a folder, or in its only subfolder with a manifest.

    Args:
        folder: the folder.
        tokenizer: required tokenizer, as returned by ``tokenizer_identity``; None accepts any.
        verify: read every file and compare its digest with the manifest's.

    Raises:
        RopewalkError: if the folder has no packed rows or several sets of them, if they are damaged, incomplete or
            of another format version, or if the tokenizer differs.
    """
    folder = Path(folder).expanduser()
    if not is_packed(folder):
        # `data pack` and `extend` put rows into a folder named after their digest; its parent is accepted if
        # it holds one.
        within = packed_folders(folder)
        if (folder / WORK).is_dir() or is_unfinished(folder):
            raise _not_complete(folder)
        if len(within) != 1:
            found = (
                f"{len(within)} folders of packed rows; give one of them"
                if within
                else "no packed rows; give the output folder of ropewalk data pack"
            )
            raise RopewalkError(f"{folder} contains {found}")
        folder = within[0]
    manifest = read_manifest(folder)
    assert manifest is not None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise RopewalkError(
            f"the rows in {folder} have format version {manifest.get('format_version')}, but this version of "
            f"ropewalk reads version {FORMAT_VERSION}; pack again"
        )
    try:
        described = [*manifest["row_files"], manifest["validation_file"]]
        if plain_name(described[-1]["name"], folder / MANIFEST) != VALIDATION:
            raise TypeError(f"its validation file is {described[-1]['name']!r} instead of {VALIDATION}")
        _check_list(folder / MANIFEST, manifest["row_files"])
        _check_files(folder, described, verify)
        if tokenizer is not None:
            _refuse_other_tokenizer(folder, manifest["tokenizer"], tokenizer)
        return PackedRows(folder, manifest)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        reason = explain(error, PackingSettings) if isinstance(error, ValidationError) else field_fault(error)
        raise RopewalkError(
            f"{folder / MANIFEST} is damaged: {reason}; delete the folder {folder} and pack again"
        ) from error


def is_packed(folder: Path) -> bool:
    """Whether a folder contains a manifest of packed rows, of any format version."""
    return read_manifest(folder) is not None


def packed_folders(folder: Path) -> list[Path]:
    """The complete folders of packed rows directly below a folder, by name."""
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return [path for path in found if not path.name.startswith(".") and is_packed(path)]


def is_unfinished(folder: Path) -> bool:
    """Whether a folder contains rows without a valid manifest: being written, left behind by a killed run, or damaged.

    A folder of documents may have a subfolder with the name of the writer's; only the files in it tell them apart.
    """

    if is_packed(folder):
        return False
    # At least five digits: names grow longer from file 100,000 on.
    return (folder / WORK / JOB).is_file() or any(folder.glob("rows-[0-9][0-9][0-9][0-9][0-9]*.arrow"))


def holds_rows(folder: Path) -> bool:
    """Whether a folder, or a direct subfolder of it, contains packed rows that ``open_rows`` can open.

    Raises:
        RopewalkError: if it contains rows that are not complete.
    """
    if not folder.is_dir():
        return False
    if is_packed(folder) or packed_folders(folder):
        return True
    below = sorted(path for path in folder.glob("*") if path.is_dir() and not path.name.startswith("."))
    for each in (folder, *below):
        if is_unfinished(each):
            raise _not_complete(each)
    return False


def _not_complete(folder: Path) -> RopewalkError:
    return RopewalkError(
        f"the rows in {folder} are incomplete; to complete them, repeat the command that packed them"
    )


def _check_files(folder: Path, files: list[dict[str, Any]], verify: bool) -> None:
    paths = [folder / each["name"] for each in files]
    for path, each in zip(paths, files, strict=True):
        if not path.is_file():
            raise RopewalkError(f"{path} is missing; delete the folder {folder} and pack again")
        # Sizes are compared always, since that is cheap; contents only on request.
        if path.stat().st_size != each["bytes"]:
            raise RopewalkError(
                f"{path} has {path.stat().st_size} bytes, but its manifest says {each['bytes']}; delete the folder "
                f"{folder} and pack again"
            )
    if verify:
        # hashlib releases the GIL, so threads hash several files at once.
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(FileDigest.of, paths))
        for path, each, content in zip(paths, files, found, strict=True):
            if content.sha256 != each["sha256"]:
                raise RopewalkError(
                    f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; delete the folder {folder} and pack "
                    "again"
                )


def _refuse_other_tokenizer(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if found[name] != value:
            raise RopewalkError(
                f"{folder} was packed with another tokenizer ({found['name_or_path'] or 'without a name'}, {name} "
                f"{found[name]}) than the given one ({name} {value}); give the tokenizer of the rows, or pack again"
            )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in a folder; None if there is none, or if it belongs to another program."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
