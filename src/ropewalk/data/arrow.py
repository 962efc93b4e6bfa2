"""Arrow files through ``datasets``: written in constant memory, read through a memory map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

INT32_LIST = pyarrow.list_(pyarrow.int32())
STRING = pyarrow.string()
STRING_LIST = pyarrow.list_(STRING)

_BATCH_TOKENS = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the disk into one sentence.

    Raises:
        RopewalkError: naming the path and the reason (no space, no permission).
    """
    try:
        yield
    except OSError as error:
        raise RopewalkError(f"cannot write {path}: {error.strerror or error}") from error


class TableWriter:
    """Writes records of int32 lists and strings, about a million integers in memory at a time.

    Raises:
        RopewalkError: from every method, if the file cannot be written.
    """

    def __init__(self, path: Path, columns: dict[str, pyarrow.DataType]) -> None:
        from datasets import Features
        from datasets.arrow_writer import ArrowWriter

        self._path = path
        self._schema = pyarrow.schema(list(columns.items()))
        self._columns: dict[str, list[Any]] = {name: [] for name in columns}
        self._tokens = 0
        self.records = 0
        with writing(path):
            self._file = pyarrow.OSFile(str(path), "wb")
        self._writer = ArrowWriter(features=Features.from_arrow_schema(self._schema), stream=self._file)

    def write(self, num_tokens: int, **values: Any) -> None:
        """Add one record, which holds about ``num_tokens`` integers."""
        for name, column in self._columns.items():
            column.append(values[name])
        self._tokens += num_tokens
        self.records += 1
        if self._tokens >= _BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        """Write what is left; a file without a record stays without a table."""
        self._flush()
        with writing(self._path):
            if self.records:
                self._writer.finalize()
            self._file.close()

    def abandon(self) -> None:
        """Let go of the file after a failure; what it holds does not matter any more."""
        # The file's buffer may fail once more while it is thrown away; the first failure is the one to tell.
        with suppress(OSError, pyarrow.ArrowException):
            self._file.close()

    def _flush(self) -> None:
        if not any(self._columns.values()):
            return
        arrays = [_array(self._columns[field.name], field.type) for field in self._schema]
        with writing(self._path):
            self._writer.write_table(pyarrow.Table.from_arrays(arrays, schema=self._schema))
        self._columns = {name: [] for name in self._columns}
        self._tokens = 0


def open_table(path: Path, records: int) -> Any:
    """An Arrow file as a memory-mapped ``datasets.Dataset`` whose items are one-row Arrow tables.

    Args:
        path: the file.
        records: how many it must hold.

    Raises:
        RopewalkError: if it cannot be read or holds another number.
    """
    from datasets import Dataset

    try:
        dataset = Dataset.from_file(str(path), in_memory=False).with_format("arrow")
    except (OSError, pyarrow.ArrowException) as error:
        raise RopewalkError(f"cannot read {path}: {error}; delete its folder and pack again") from error
    if len(dataset) != records:
        raise RopewalkError(
            f"{path} holds {len(dataset)} records where its manifest says {records}; delete its folder and "
            "pack again"
        )
    return dataset


def int32_list(column: pyarrow.ChunkedArray) -> NDArray[np.int32]:
    """The one list in a column of a one-row table, as a view of the memory map where Arrow allows it."""
    ids: NDArray[np.int32] = column.chunk(0).flatten().to_numpy(zero_copy_only=False)
    return ids


def checked_index(index: int, length: int) -> int:
    """An index from 0 on for one that may count from the end.

    Raises:
        IndexError: if there is no such item; iteration over a sequence ends by it.
    """
    if not -length <= index < length:
        raise IndexError(f"index {index} of {length} items")
    return index % length


def _array(values: list[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    if kind != INT32_LIST:
        return pyarrow.array(values, kind)
    # Lists of numpy arrays go in whole; pyarrow.array would take them apart number by number.
    arrays = [np.asarray(value, np.int32) for value in values]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(np.concatenate(arrays)))
