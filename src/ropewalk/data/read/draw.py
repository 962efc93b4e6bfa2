"""draw_documents: documents in a random order in which sources, and the files of a source, take turns."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.read.files import existing_path, hidden_entries, is_named, plain_stem
from ropewalk.data.read.input_splits import InputSplit, check_specs, source_splits
from ropewalk.data.read.readers import ReadingCounts, documents_in, no_documents, refuse_token_ids
from ropewalk.data.settings import SourceSpec

POOL_CHARACTERS = SPLIT_BYTES = 1 << 26
"""Number of characters of text to read before the first document is drawn, and size of the splits in bytes."""
OPEN_SPLITS = 16
"""Maximum number of splits to read at a time: each holds a file open, or a connection to the Hub."""

Drawn = TypeVar("Drawn", Document, TokenisedDocument)
Item = TypeVar("Item")


def draw_documents(specs: Sequence[SourceSpec], seed: int) -> Iterator[Document]:
    """Draw the documents of several sources without replacement.

    Sources take turns, and so do the files of a source, until their documents are used up. Which documents come first
    depends on the seed and the texts, not on the order or the names of files. This holds if the sources have at most
    ``POOL_CHARACTERS`` characters. Larger sources are read and drawn from in pools of this size, each from parts of
    several files that the seed chooses.

    Args:
        specs: as in :func:`~ropewalk.data.read.readers.read_documents`; ``embedded`` and the like too.
        seed: random seed.

    Yields:
        Documents whose ``source`` also names the file, if the source is a folder without names of its own for them.
        The beginning of the stream does not depend on how much of it is read.

    Raises:
        RopewalkError: as in :func:`~ropewalk.data.read.readers.read_documents`.
    """
    check_specs(specs)
    pool: list[_Candidate] = []
    characters = 0
    for candidate in _interleaved(specs, seed):
        pool.append(candidate)
        characters += len(candidate.document.text)
        if characters >= POOL_CHARACTERS:
            yield from _in_turns_of_files(pool, seed)
            pool, characters = [], 0
    yield from _in_turns_of_files(pool, seed)


def drawn(documents: Iterable[Drawn], seed: int) -> list[Drawn]:
    """Return documents in a random order in which their sources take turns; it depends on the seed and their content.

    Args:
        documents: texts or token ids.
        seed: random seed.
    """
    return _take_turns(sorted(documents, key=lambda each: _key(each, seed)), lambda each: each.source)


@dataclass(frozen=True)
class _Candidate:
    """A document that may be drawn, and its file; ``own`` is whether the file stands for a source of its own."""

    document: Document
    file: str
    own: bool


def _in_turns_of_files(pool: Iterable[_Candidate], seed: int) -> Iterator[Document]:
    by_key = sorted(pool, key=lambda each: _key(each.document, seed))
    of_files = _take_turns(by_key, lambda each: (each.document.source, each.file))
    for each in _take_turns(of_files, lambda each: each.document.source):
        source = each.document.source
        yield replace(each.document, source=f"{source}/{each.file}" if each.own else source)


def _take_turns(items: Iterable[Item], group: Callable[[Item], Hashable]) -> list[Item]:
    """Put the first item of each group first, then the second of each, and so on; groups keep the order of items."""
    turns: Counter[Hashable] = Counter()
    numbered = []
    for item in items:
        numbered.append((turns[group(item)], item))
        turns[group(item)] += 1
    return [item for _, item in sorted(numbered, key=lambda pair: pair[0])]


def _key(document: Document | TokenisedDocument, seed: int) -> bytes:
    content = (
        np.ascontiguousarray(document.input_ids, "<i4").tobytes()
        if isinstance(document, TokenisedDocument)
        else document.text.encode()
    )
    return hashlib.blake2b(content, digest_size=8, key=str(seed).encode()).digest()


def _interleaved(specs: Sequence[SourceSpec], seed: int) -> Iterator[_Candidate]:
    """Read documents from several splits in turn; the seed decides which splits come first."""
    counts = [ReadingCounts(hidden_entries=hidden_entries([spec])) for spec in specs]
    waiting: list[tuple[int, InputSplit]] = []
    left: Counter[int] = Counter()
    for number, spec in enumerate(specs):
        splits = list(source_splits(spec, SPLIT_BYTES))
        random.Random(seed).shuffle(splits)
        # Parts of a large file wait until each file has had its turn.
        waiting += [
            (number, split) for split in _take_turns(splits, lambda split: split.files or split.start)
        ]
        left[number] = len(splits)
        if not splits:
            raise no_documents(spec, counts[number])
    queue = iter(_take_turns(waiting, lambda pair: pair[0]))
    reading: deque[tuple[int, Iterator[_Candidate]]] = deque()
    while True:
        while len(reading) < OPEN_SPLITS and (following := next(queue, None)) is not None:
            number, split = following
            reading.append((number, _candidates(split, counts[number])))
        if not reading:
            return
        number, documents = reading.popleft()
        found = next(documents, None)
        if found is not None:
            yield found
            reading.append((number, documents))
            continue
        left[number] -= 1
        if not left[number] and not counts[number].documents:
            raise no_documents(specs[number], counts[number])


def _candidates(split: InputSplit, counts: ReadingCounts) -> Iterator[_Candidate]:
    spec = split.spec
    folder = None if is_named(spec.path) else existing_path(spec.path)
    for each in documents_in(split, counts):
        document = refuse_token_ids(spec, each)
        if folder is None or not folder.is_dir():
            yield _Candidate(document, "", own=False)
            continue
        # A text file is a document whose origin is its path; a file of records has a split of its own.
        file = split.files[0] if len(split.files) == 1 else Path(document.origin)
        # A name from the user or from the record says more than the name of the file.
        own = spec.name is None and spec.source_per != "file" and document.source == plain_stem(folder)
        yield _Candidate(document, str(file.relative_to(folder)), own)
