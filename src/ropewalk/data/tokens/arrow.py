"""Arrow files of integer lists, written atomically and read through a memory map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, HashedFile
from ropewalk.io.files import replacing

INT32_LIST = pyarrow.list_(pyarrow.int32())
INT64_LIST = pyarrow.list_(pyarrow.int64())
STRING = pyarrow.string()
STRING_LIST = pyarrow.list_(STRING)

Number = TypeVar("Number", bound=np.generic)


def write_table(
    path: Path, columns: Mapping[str, pyarrow.DataType], batches: Iterable[Mapping[str, Sequence[Any]]]
) -> FileDigest:
    """Write batches of records to a file, atomically.

    Args:
        path: the file; an existing one is replaced.
        columns: names and types of the columns.
        batches: values of each column, one per record; one batch is held in memory at a time.

    Returns:
        The digest of the file.

    Raises:
        RopewalkError: if the file cannot be written.
    """
    schema = pyarrow.schema(list(columns.items()))
    # Hashed while it is written, so that the file need not be read again.
    with replacing(path) as temporary, HashedFile(temporary) as file:
        with pyarrow.ipc.new_file(pyarrow.PythonFile(file, "w"), schema) as writer:
            for batch in batches:
                arrays = [_array(batch[field.name], field.type) for field in schema]
                writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
        return file.digest()


def open_table(path: Path, records: int) -> pyarrow.Table:
    """Open an Arrow file as a memory-mapped table.

    Args:
        path: the file.
        records: expected number of records.

    Raises:
        RopewalkError: if the file cannot be read, or has another number of records.
    """
    try:
        with pyarrow.memory_map(str(path)) as file:
            table = pyarrow.ipc.open_file(file).read_all()
    except (OSError, pyarrow.ArrowException) as error:
        raise RopewalkError(
            f"cannot read {path}: {error}; delete the folder {path.parent} and pack again"
        ) from error
    if len(table) != records:
        raise RopewalkError(
            f"{path} has {len(table)} records, but its manifest says {records}; delete the folder {path.parent} and "
            "pack again"
        )
    return table


def int32_list(value: Any) -> NDArray[np.int32]:
    """One list of a column as a view of the memory map."""
    return as_numpy(value.values, np.int32)


def checked_index(index: int, length: int) -> int:
    """Convert an index that may be negative to one from 0 to ``length - 1``.

    Raises:
        IndexError: if it is out of range. Iteration over a sequence without ``__iter__`` relies on this.
    """
    if not -length <= index < length:
        raise IndexError(f"index {index} of {length} items")
    return index % length


def numbers(values: NDArray[Any]) -> pyarrow.Array:
    """Convert a numpy array to Arrow, without ``pyarrow.array``, which imports pandas first (a third of a second)."""
    kind = pyarrow.from_numpy_dtype(values.dtype)
    content = pyarrow.py_buffer(np.ascontiguousarray(values))
    return pyarrow.Array.from_buffers(kind, len(values), [None, content])


def as_numpy(array: pyarrow.Array, dtype: type[Number]) -> NDArray[Number]:
    """View an Arrow array of numbers as numpy, without its ``to_numpy``, which imports pandas first."""
    if not len(array):
        return np.zeros(0, dtype)
    size = np.dtype(dtype).itemsize
    # Buffer 0 would be the bitmap of nulls.
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * size)


def _array(values: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """Build a column of lists or strings from buffers; ``pyarrow.array`` would convert lists number by number."""
    if kind == STRING:
        return _strings(values)
    offsets = numbers(np.cumsum([0, *map(len, values)], dtype=np.int32))
    if kind == STRING_LIST:
        return pyarrow.ListArray.from_arrays(offsets, _strings(list(chain.from_iterable(values))))
    dtype = np.int32 if kind == INT32_LIST else np.int64
    # The empty array comes first because np.concatenate refuses an empty list.
    flat = np.concatenate([np.zeros(0, dtype), *(np.asarray(value, dtype) for value in values)])
    return pyarrow.ListArray.from_arrays(offsets, numbers(flat))


def _strings(values: Sequence[str]) -> pyarrow.Array:
    content = [value.encode() for value in values]
    offsets = np.cumsum([0, *map(len, content)], dtype=np.int32)
    bounds, letters = pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(content))
    return pyarrow.StringArray.from_buffers(len(content), bounds, letters)
