"""Arrow files of integer lists: written whole or not at all, read through a memory map."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.io.files import replacing

INT32_LIST = pyarrow.list_(pyarrow.int32())
INT64_LIST = pyarrow.list_(pyarrow.int64())
STRING = pyarrow.string()
STRING_LIST = pyarrow.list_(STRING)

Number = TypeVar("Number", bound=np.generic)


class HashingFile:
    """A file, for Arrow to write to, that hashes and counts what is written."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        self.bytes += len(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()


def write_table(
    path: Path, columns: Mapping[str, pyarrow.DataType], batches: Iterable[Mapping[str, Sequence[Any]]]
) -> dict[str, Any]:
    """Write batches of records; the file appears when all are written.

    Args:
        path: the file; one that is there is replaced.
        columns: the columns and their types.
        batches: for each column its values, one a record; a batch is held in memory at a time.

    Returns:
        ``bytes`` and ``sha256`` of the file.

    Raises:
        RopewalkError: if the file cannot be written.
    """
    schema = pyarrow.schema(list(columns.items()))
    with replacing(path) as temporary, temporary.open("wb") as file:
        hashing = HashingFile(file)
        with pyarrow.ipc.new_file(pyarrow.PythonFile(hashing, "w"), schema) as writer:
            for batch in batches:
                arrays = [_array(batch[field.name], field.type) for field in schema]
                writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
    return {"bytes": hashing.bytes, "sha256": hashing.digest.hexdigest()}


def open_table(path: Path, records: int) -> pyarrow.Table:
    """An Arrow file as a memory-mapped table.

    Args:
        path: the file.
        records: how many it must hold.

    Raises:
        RopewalkError: if it cannot be read or holds another number.
    """
    try:
        with pyarrow.memory_map(str(path)) as file:
            table = pyarrow.ipc.open_file(file).read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise RopewalkError(f"cannot read {path}: {error}; delete it and pack again") from error
    if len(table) != records:
        raise RopewalkError(
            f"{path} has {len(table)} records, but its manifest says {records}; delete it and pack again"
        )
    return table


def int32_list(value: Any) -> NDArray[np.int32]:
    """One list of a column as a view of the memory map."""
    return as_numpy(value.values, np.int32)


def checked_index(index: int, length: int) -> int:
    """An index from 0 on for one that may count from the end.

    Raises:
        IndexError: if there is no such item; iteration over a sequence ends by it.
    """
    if not -length <= index < length:
        raise IndexError(f"index {index} of {length} items")
    return index % length


def numbers(values: NDArray[Any]) -> pyarrow.Array:
    """A numpy array as Arrow's; ``pyarrow.array`` would import pandas first, which takes a third of a second."""
    kind = pyarrow.from_numpy_dtype(values.dtype)
    content = pyarrow.py_buffer(np.ascontiguousarray(values))
    return pyarrow.Array.from_buffers(kind, len(values), [None, content])


def as_numpy(array: pyarrow.Array, dtype: type[Number]) -> NDArray[Number]:
    """An Arrow array of numbers as a view; its own ``to_numpy`` would import pandas first."""
    if not len(array):
        return np.zeros(0, dtype)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * size)


def _array(values: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """A column of lists or strings; ``pyarrow.array`` would take lists apart number by number."""
    if kind == STRING:
        return _strings(values)
    offsets = numbers(np.cumsum([0, *map(len, values)], dtype=np.int32))
    if kind == STRING_LIST:
        return pyarrow.ListArray.from_arrays(offsets, _strings(list(chain.from_iterable(values))))
    dtype = np.int32 if kind == INT32_LIST else np.int64
    flat = np.concatenate([np.zeros(0, dtype), *(np.asarray(value, dtype) for value in values)])
    return pyarrow.ListArray.from_arrays(offsets, numbers(flat))


def _strings(values: Sequence[str]) -> pyarrow.Array:
    content = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, content)], dtype=np.int32)
    bounds, letters = pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(content))
    return pyarrow.StringArray.from_buffers(len(content), bounds, letters)
