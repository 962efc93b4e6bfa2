"""Packed rows as they lie on disk: a folder with a manifest, read through a memory map."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.rows.assemble import PADDING, PackedRow
from ropewalk.data.rows.settings import PackingSettings
from ropewalk.data.tokens.arrow import checked_index, int32_list, open_table
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, plain_name

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row

FORMAT = "ropewalk packed rows"
FORMAT_VERSION = 2
"""Raised whenever the same inputs and settings would give other rows or other files."""

MANIFEST = "manifest.json"
VALIDATION = "validation.arrow"
WORK = "unfinished"
"""Folder within the rows' folder that holds what is needed until they are complete."""

_OPEN_FILES = 64
_READ_BYTES = 1 << 20
_HEAD_BYTES = 256
"""A manifest names its format within its first bytes."""


def rows_file(number: int) -> str:
    """The name of one file of rows."""
    return f"rows-{number:05d}.arrow"


def listed_files(manifest: Path, row_files: Iterable[tuple[Any, Any]]) -> list[tuple[str, int]]:
    """Names and numbers of rows of the files of rows, as a manifest lists them.

    Args:
        manifest: the file, for messages.
        row_files: name and number of rows of each.

    Raises:
        RopewalkError: if a name is not the one that :func:`rows_file` gives the file in its place, so that nothing
            outside the folder is read or written, or a number is none.
    """
    files = []
    for number, (name, rows) in enumerate(row_files):
        if plain_name(name, manifest) != rows_file(number):
            raise RopewalkError(
                f"{manifest} is damaged: it lists {name!r} in the place of {rows_file(number)}"
            )
        if type(rows) is not int or rows < 1:
            raise RopewalkError(f"{manifest} is damaged: it gives {name} {rows!r} rows")
        files.append((name, rows))
    return files


class PackedRows:
    """The packed training rows of one folder; indexing reads one row from the memory map.

    Attributes:
        folder: where they lie.
        manifest: how they came to be: tokenizer, settings, inputs, counts, sources, versions.
        settings: the settings they were packed with.
        validation: the documents that were held out.

    Example:
        >>> rows = open_rows("packed")                  # doctest: +SKIP
        >>> rows[0].layout.total_length                 # doctest: +SKIP
        131072
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.settings = PackingSettings.from_dict(manifest["settings"])
        self._files = [(each["name"], each["rows"]) for each in manifest["row_files"]]
        self._bounds = np.cumsum([0, *(rows for _, rows in self._files)])
        # Mapped files are file descriptors, of which a process has few.
        self._open: OrderedDict[int, pyarrow.Table] = OrderedDict()
        self.validation = ValidationDocuments(
            folder / VALIDATION, manifest["counts"]["split"]["validation_documents"]
        )

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Row:
        """Row ``index``, counted from the end where negative.

        Raises:
            IndexError: if there is no such row.
        """
        from ropewalk.data.rows.training_row import training_row

        return training_row(self.packed(index), self.settings)

    def packed(self, index: int) -> PackedRow:
        """Row ``index`` as plain values, its ids a view of the memory map."""
        index = checked_index(index, len(self))
        number = int(np.searchsorted(self._bounds, index, side="right")) - 1
        table, row = self._table(number), index - int(self._bounds[number])
        names = ("segment_lengths", "segment_documents", "sources", "numbers", "masked")
        lengths, documents, sources, numbers, masked = (table[name][row].as_py() for name in names)
        return PackedRow(int32_list(table["input_ids"][row]), lengths, documents, sources, numbers, masked)

    def sources(self, index: int) -> list[str]:
        """The source of each document in row ``index``, the padding left out."""
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
    """The held-out documents of one folder, as a sequence of TokenisedDocument (ids without BOS or EOS)."""

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
    settings: PackingSettings | None = None,
    verify: bool = False,
) -> PackedRows:
    """The packed rows in a folder that holds a manifest, or in whose one subfolder one lies.

    Args:
        folder: the folder.
        tokenizer: refuse rows of another tokenizer than this one (``tokenizer_identity``).
        settings: refuse rows that were packed with other settings.
        verify: read every file and compare its digest with the manifest's.

    Raises:
        RopewalkError: if the folder holds none or several, if what it holds is of another format version,
            damaged or not complete, or if the tokenizer or a setting is another.
    """
    folder = Path(folder).expanduser()
    if not is_packed(folder):
        within = packed_folders(folder)
        if (folder / WORK).is_dir() or is_unfinished(folder):
            raise _not_complete(folder)
        if len(within) != 1:
            found = f"{len(within)} folders of packed rows; name one" if within else "no packed rows"
            raise RopewalkError(f"{folder} holds {found}")
        folder = within[0]
    manifest = _manifest(folder)
    assert manifest is not None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise RopewalkError(
            f"{folder} has format version {manifest.get('format_version')}, this ropewalk reads "
            f"{FORMAT_VERSION}; pack again"
        )
    try:
        described = [*manifest["row_files"], manifest["validation_file"]]
        if plain_name(described[-1]["name"], folder / MANIFEST) != VALIDATION:
            raise TypeError(f"its validation file is {described[-1]['name']!r} and not {VALIDATION}")
        listed_files(folder / MANIFEST, ((each["name"], each["rows"]) for each in described[:-1]))
        _check_files(folder, described, verify)
        if tokenizer is not None:
            _refuse_other_tokenizer(folder, manifest["tokenizer"], tokenizer)
        rows = PackedRows(folder, manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise RopewalkError(
            f"{folder / MANIFEST} is damaged: {error}; delete the folder {folder} and pack again"
        ) from error
    if settings is not None and settings != rows.settings:
        raise RopewalkError(f"{folder} was packed with {difference(rows.settings, settings)}")
    return rows


def difference(there: PackingSettings, wanted: PackingSettings) -> str:
    """The first setting in which two differ, in words."""
    for name in there.__dataclass_fields__:
        ours, theirs = getattr(wanted, name), getattr(there, name)
        if ours != theirs:
            return f"{name} {theirs}, not {ours}"
    raise AssertionError("equal settings do not differ")


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def file_digests(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file; several at a time, since hashing leaves Python's lock."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(file_digest, paths))


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a manifest of packed rows, complete or of another format version."""
    return _manifest(folder) is not None


def packed_folders(folder: Path) -> list[Path]:
    """The complete folders of packed rows directly below a folder, by name."""
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return [path for path in found if not path.name.startswith(".") and is_packed(path)]


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds rows and no manifest that says which: in the making, left behind or damaged.

    A folder of documents may have a subfolder of the same name as the one that the making keeps; what lies in
    it decides.
    """
    from ropewalk.data.rows.publish import JOB, PLAN

    if is_packed(folder):
        return False
    return (
        any((folder / WORK / name).is_file() for name in (JOB, PLAN))
        or any(folder.glob("rows-[0-9][0-9][0-9][0-9][0-9]*.arrow"))
        or _is_broken(folder / MANIFEST)
    )


def holds_rows(folder: Path) -> bool:
    """Whether ``open_rows`` is meant: a folder has packed rows in it, or in a folder directly below.

    Raises:
        RopewalkError: if the rows that are there are not complete.
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
        f"the rows in {folder} are not complete; run the same command again, every shard of it, or merge the parts"
    )


def _is_broken(manifest: Path) -> bool:
    """Whether a file begins as a manifest of ours, and is no JSON."""
    if not manifest.is_file():
        return False
    try:
        content = manifest.read_bytes()
    except OSError as error:
        raise RopewalkError(f"cannot read {manifest}: {error.strerror}") from error
    if FORMAT.encode() not in content[:_HEAD_BYTES]:
        return False
    try:
        parse_json(content)
    except ValueError:
        return True
    return False


def _check_files(folder: Path, files: list[dict[str, Any]], verify: bool) -> None:
    paths = [folder / each["name"] for each in files]
    for path, each in zip(paths, files, strict=True):
        if not path.is_file():
            raise RopewalkError(f"{path} is missing; delete the folder {folder} and pack again")
        if path.stat().st_size != each["bytes"]:
            raise RopewalkError(
                f"{path} has {path.stat().st_size} bytes where its manifest says {each['bytes']}; delete the folder "
                f"{folder} and pack again"
            )
    if verify:
        for path, each, digest in zip(paths, files, file_digests(paths), strict=True):
            if digest != each["sha256"]:
                raise RopewalkError(
                    f"{path} is damaged: its digest is not the manifest's; delete the folder {folder} and pack again"
                )


def _refuse_other_tokenizer(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if there[name] != value:
            raise RopewalkError(
                f"{folder} was packed with another tokenizer ({there['name_or_path']}): its {name} is "
                f"{there[name]}, not {value}"
            )


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in a folder, None where there is none or it is some other program's."""
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
