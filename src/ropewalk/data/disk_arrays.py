"""Arrays that move to a file on disk when they take too much memory: for the index of very many documents."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ropewalk.io.files import writing

MEMORY_BYTES = 1 << 28
"""Bytes of arrays that stay in memory; 7 million documents of an index."""

CHUNK = 1 << 22
"""Items that are worked on in memory at a time."""

_MAPPED_BYTES = 1 << 28

Number = TypeVar("Number", bound=np.generic)


class DiskArrays:
    """Makes arrays: the first in memory, later ones in files without a name that end with the process.

    The operating system keeps the pages of such a file in memory while there is room, and writes them out where there
    is not.

    Args:
        folder: where the files lie; created when it is first needed. None keeps everything in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._left = MEMORY_BYTES
        self._open: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def empty(self, length: int, dtype: type[Number]) -> NDArray[Number]:
        """A new array ``[length]`` of any content.

        Raises:
            RopewalkError: if the disk is full.
        """
        size = length * np.dtype(dtype).itemsize
        self._left -= size
        if self._folder is None or self._left >= 0 or not size:
            return np.empty(length, dtype)
        # Small arrays share a file: the number of a process's memory maps is limited.
        padded = -(-size // 8) * 8
        if padded > len(self._open):
            self._open = _mapped(max(padded, _MAPPED_BYTES), self._folder)
        piece, self._open = self._open[:size], self._open[padded:]
        return piece.view(dtype)

    def keep(self, values: NDArray[Number]) -> NDArray[Number]:
        """The array itself while there is memory for it, or else a copy on disk."""
        if self._folder is None or self._left >= values.nbytes:
            self._left -= values.nbytes
            return values
        copy: NDArray[Number] = self.empty(len(values), values.dtype.type)
        copy[:] = values
        return copy

    def take(self, values: NDArray[Number], index: NDArray[np.int64] | slice) -> NDArray[Number]:
        """``values[index]``; a view where the index is a slice."""
        if isinstance(index, slice):
            return values[index]
        taken: NDArray[Number] = self.empty(len(index), values.dtype.type)
        for part in chunks(len(index)):
            taken[part] = values[index[part]]
        return taken


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most ``CHUNK`` items that cover ``length`` items."""
    for start in range(0, length, CHUNK):
        yield slice(start, min(length, start + CHUNK))


def _mapped(size: int, folder: Path) -> NDArray[Any]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved now: a full disk would kill a process that writes to a mapped file.
            os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, np.uint8, "r+", shape=(size,)).view(np.ndarray)
