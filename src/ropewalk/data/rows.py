"""Packed rows as they lie on disk: a folder with a manifest, read through a memory map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ropewalk.data.arrow import checked_index, int32_list, open_table
from ropewalk.data.pack import PackedRow, PackingSettings, row_from_arrays
from ropewalk.data.tokenise import TokenisedDocument
from ropewalk.errors import RopewalkError
from ropewalk.packing import Row

FORMAT = "ropewalk packed rows"
FORMAT_VERSION = 1
"""Raised whenever the same inputs and settings would give other rows or other files."""

MANIFEST = "manifest.json"
ROWS = "rows.arrow"
VALIDATION = "validation.arrow"


class PackedRows:
    """The packed training rows of one folder; indexing reads one row from the memory map.

    Attributes:
        folder: where they lie.
        manifest: how they came to be: tokenizer, settings, inputs, counts, sources, versions.
        settings: the settings they were packed with.
        validation: the documents that were held out.

    Example:
        >>> rows = open_rows("packed/1f0c…")            # doctest: +SKIP
        >>> rows[0].layout.total_length                 # doctest: +SKIP
        131072
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.settings = PackingSettings(**manifest["settings"])
        self._table = open_table(folder / ROWS, manifest["counts"]["packing"]["rows"])
        self.validation = ValidationDocuments(
            folder / VALIDATION, manifest["counts"]["split"]["validation_documents"]
        )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        """Row ``index``, counted from the end where negative.

        Raises:
            IndexError: if there is no such row.
        """
        row = self.packed(index)
        return row_from_arrays(row.input_ids, row.segment_lengths, row.segment_documents, self.settings)

    def packed(self, index: int) -> PackedRow:
        """Row ``index`` as plain values, its ids a view of the memory map."""
        record = self._table[checked_index(index, len(self))]
        lengths, documents = (record[name][0].as_py() for name in ("segment_lengths", "segment_documents"))
        return PackedRow(int32_list(record["input_ids"]), lengths, documents, self.sources(index))

    def sources(self, index: int) -> list[str]:
        """The source of each document in row ``index``."""
        sources: list[str] = self._table[checked_index(index, len(self))]["sources"][0].as_py()
        return sources


class ValidationDocuments:
    """The held-out documents of one folder, as a sequence of TokenisedDocument (ids without BOS or EOS)."""

    def __init__(self, path: Path, count: int) -> None:
        self._table = open_table(path, count) if count else None
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> TokenisedDocument:
        index = checked_index(index, len(self))
        assert self._table is not None
        record = self._table[index]
        return TokenisedDocument(int32_list(record["input_ids"]), record["source"][0].as_py())


def open_rows(folder: str | Path) -> PackedRows:
    """The packed rows in a folder that holds a manifest, or in whose one subfolder one lies.

    Raises:
        RopewalkError: if the folder holds none or several, or what it holds is of another format version or
            damaged.
    """
    folder = Path(folder).expanduser()
    if not is_packed(folder):
        within = packed_folders(folder)
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
        return PackedRows(folder, manifest)
    except (KeyError, TypeError) as error:
        raise RopewalkError(f"{folder / MANIFEST} is damaged: {error}; pack again") from error


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a manifest of packed rows, complete or of another format version."""
    return _manifest(folder) is not None


def packed_folders(folder: Path) -> list[Path]:
    """The complete folders of packed rows directly below a folder, by name."""
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return [path for path in found if not path.name.startswith(".") and is_packed(path)]


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in a folder, None where there is none or it is some other program's."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
