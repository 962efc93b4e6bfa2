"""The corpus: tokenised splits on disk presented as one sequence of documents, with an index in memory."""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ropewalk.data.read.documents import Document, Record, TokenisedDocument, token_hash
from ropewalk.data.read.input_splits import NO_DOCUMENTS, InputSplit, changed, is_blank, read_input_split
from ropewalk.data.read.readers import ReadingCounts, no_documents
from ropewalk.data.settings import SourceSpec, WorkSettings, processes
from ropewalk.data.tokens.arrow import checked_index
from ropewalk.data.tokens.token_shards import (
    FORMAT,
    ShardWriter,
    TokenFile,
    TokenShard,
    committed_shards,
    remove_leftovers,
)
from ropewalk.data.tokens.tokenise import (
    BATCH_CHARACTERS,
    BATCH_DOCUMENTS,
    Progress,
    check_ids,
    encode_batches,
    in_batches,
    load_tokenizer,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest

OPEN_SHARDS = 256
"""Shards that a corpus keeps open at a time: file descriptors, of which a process has few."""

_THREADS = 8

ALONE = WorkSettings(workers=1)
"""One machine, one process."""

Reader = Callable[[InputSplit, int], Iterator[Record]]
"""The records of a split without the first few, as ``read_input_split``."""


class Corpus:
    """All documents in reading order: an index in memory (36 bytes a document), token ids on disk.

    The arrays are not to be written to.

    Attributes:
        lengths: int64 ``[documents]``, a document's own tokens; 0 where a text gave none.
        source_ids: int32 ``[documents]``, into ``sources``.
        sources: names, in the order of their first documents.
        hashes: uint64 ``[documents]``, ``text_hash`` of the text, or of the ids of a document that came as tokens.
        characters: int64 ``[documents]``, 0 for a document that came as tokens.
        first_ids, last_ids: int32 ``[documents]``, the ends of its tokens; -1 where it has none.
        reading: documents, and what reading passed over.
        splits: how many the documents come from.
        digest: SHA-256 over ids, lengths, sources and hashes of all documents, the same on every machine.
    """

    def __init__(self, shards: deque[TokenShard], splits: int) -> None:
        """Put the shards' indexes together; ``shards`` is emptied on the way, so as not to hold all twice."""
        self.splits = splits
        self._paths = [shard.path for shard in shards]
        self._starts = [0, *accumulate(len(shard.lengths) for shard in shards)]
        documents = self._starts[-1]
        self.lengths = np.empty(documents, np.int64)
        self.source_ids = np.empty(documents, np.int32)
        self.hashes = np.empty(documents, np.uint64)
        self.characters = np.empty(documents, np.int64)
        self.first_ids = np.empty(documents, np.int32)
        self.last_ids = np.empty(documents, np.int32)
        self.reading = ReadingCounts(documents)
        state = hashlib.sha256()
        sources: dict[str, int] = {}
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            shard = shards.popleft()
            state.update(bytes.fromhex(shard.digest))
            self.reading.empty_documents += shard.empty_documents
            self.reading.binary_files += shard.binary_files
            ids = np.array([sources.setdefault(name, len(sources)) for name in shard.sources], np.int32)
            self.source_ids[start:stop] = ids[shard.source_ids]
            for name in ("lengths", "hashes", "characters", "first_ids", "last_ids"):
                getattr(self, name)[start:stop] = getattr(shard, name)
        for array in (
            self.lengths, self.source_ids, self.hashes, self.characters, self.first_ids, self.last_ids
        ):  # fmt: skip
            array.flags.writeable = False
        self.sources = tuple(sources)
        self.digest = state.hexdigest()
        self._open: OrderedDict[int, TokenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, number: int) -> NDArray[np.int32]:
        """A document's own tokens.

        Args:
            number: in reading order; from the end if negative.

        Returns:
            int32 ``[lengths[number]]``.

        Raises:
            IndexError: if there is no such document.
            RopewalkError: if its shard is gone.
        """
        number = checked_index(number, len(self))
        ids = np.empty(int(self.lengths[number]), np.int32)
        self.read_tokens(number, 0, ids)
        return ids

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with own tokens of document ``number`` (from 0), from its token ``first`` on.

        Raises:
            RopewalkError: if its shard is gone.
        """
        shard = bisect_right(self._starts, number) - 1
        file = self._open.get(shard)
        if file is None:
            while len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
            file = self._open[shard] = TokenFile(self._paths[shard])
        else:
            self._open.move_to_end(shard)
        file.read(int(file.offsets[number - self._starts[shard]]) + first, out)

    def close(self) -> None:
        """Give the shards' files back; they are opened again where need be."""
        while self._open:
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens the shards itself."""
        return {**self.__dict__, "_open": OrderedDict()}


def tokenise_splits(
    splits: Sequence[InputSplit],
    tokenizer: Any,
    folder: Path,
    *,
    work: WorkSettings = ALONE,
    progress: Progress | None = None,
    read: Reader = read_input_split,
) -> Corpus:
    """Tokenise what is not on disk yet, and open the whole corpus.

    Each split has a folder of shards, named by a digest of its identity and the tokenizer's. Shards are
    written in order, and a run that was stopped goes on after the last of them. Machines that share the
    folder share the work: each first makes the splits that are its own, then, from the last to the first,
    those of the others that are not there when their turn comes; so any of them alone makes everything, at
    worst a split is made twice, with the same bytes. One that stands in ``splits`` twice is tokenised
    once, and its documents are in the corpus twice.

    Args:
        splits: in reading order, at least one.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        folder: of the splits' folders; made where it is missing.
        work: its ``shard``, this machine and the number of machines: split k, counted from 0, is machine k % number's;
            and its ``workers``, processes that tokenise, as in :func:`ropewalk.data.tokens.tokenise.encode_batches`.
        progress: called with the documents and tokens so far, those found on disk among them.
        read: gives a split's records.

    Raises:
        RopewalkError: if a source gives no document at all, token ids do not fit
            the tokenizer, a shard is damaged or cannot be written; and as reading does. What was written
            stays, and the next run goes on from there.
    """
    index, machines = work.shard
    if not splits:
        raise RopewalkError(NO_DOCUMENTS)
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    identity = tokenizer_identity(tokenizer)
    folders = [
        folder / digest([FORMAT, tokenizers.__version__, identity, split.identity])[:32] for split in splits
    ]
    made = _Work(dict(zip(folders, splits, strict=True)), progress)
    own = folders[index::machines]
    order = dict.fromkeys([*own, *reversed(folders)])
    steps = _with_documents(_steps(order, made, read), len(tokenizer))
    batches = in_batches(steps, BATCH_DOCUMENTS, BATCH_CHARACTERS)
    with closing(encode_batches(batches, tokenizer, processes(work.workers))) as encoded:
        for entries, batch in encoded:
            texts = zip(batch.documents(), batch.hashes.tolist(), strict=True)
            for path, record in entries:
                made.add(path, record, texts)
            made.tell()
    shards = deque(shard for path in folders for shard in made.shards[path])
    made.shards.clear()
    return Corpus(shards, len(splits))


class _Work:
    """What of each split is on disk, and what is under way."""

    def __init__(self, splits: dict[Path, InputSplit], progress: Progress | None) -> None:
        self.splits = splits
        self._progress = progress
        self._writers: dict[Path, ShardWriter] = {}
        self._waiting = Counter(split.spec for split in splits.values())
        self._documents = self._tokens = 0
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(committed_shards, splits)
            self.shards: dict[Path, tuple[TokenShard, ...]] = dict(zip(splits, found, strict=True))
        for folder, shards in self.shards.items():
            self._count(shards)
            if _is_done(shards):
                self._finished(folder)
        if self._documents:
            self.tell()

    def begin(self, folder: Path) -> int | None:
        """Take up a split: how many of its records are on disk, or None if it is done."""
        known = self.shards[folder]
        if _is_done(known):
            return None
        # Another machine may have written shards since they were looked for.
        shards = self.shards[folder] = committed_shards(folder, known)
        self._count(shards[len(known) :])
        if _is_done(shards):
            self._finished(folder)
            return None
        remove_leftovers(folder)
        self._writers[folder] = ShardWriter(folder, shards)
        return sum(shard.records for shard in shards)

    def add(
        self, folder: Path, record: Record | None, texts: Iterator[tuple[NDArray[np.int32], int]]
    ) -> None:
        """Write a record of a split, or its end; ``texts`` goes on with the ids and hashes of its texts."""
        if record is None:
            if changed(self.splits[folder]):
                # Delete the shards: if the old file came back, its identity would match these wrong tokens.
                shutil.rmtree(folder, ignore_errors=True)
                raise RopewalkError(
                    f"a file of {self.splits[folder].spec.path} changed during packing; pack again when the file is "
                    "complete"
                )
            self.shards[folder] = self._writers.pop(folder).finish()
            self._finished(folder)
            return
        writer = self._writers[folder]
        writer.next_record(record.binary)
        for document in record.documents:
            if is_blank(document):
                writer.add_empty()
                continue
            if isinstance(document, TokenisedDocument):
                ids, text_hash, characters = document.input_ids, token_hash(document.input_ids), 0
            else:
                ids, text_hash = next(texts)
                characters = len(document.text)
            writer.add(ids, document.source, text_hash, characters)
            self._documents += 1
            self._tokens += len(ids)

    def tell(self) -> None:
        if self._progress is not None:
            self._progress(self._documents, self._tokens)

    def _count(self, shards: Iterable[TokenShard]) -> None:
        for shard in shards:
            self._documents += len(shard.lengths)
            self._tokens += shard.tokens

    def _finished(self, folder: Path) -> None:
        spec = self.splits[folder].spec
        self._waiting[spec] -= 1
        if not self._waiting[spec]:
            folders = [path for path, split in self.splits.items() if split.spec == spec]
            _refuse_no_documents(spec, [shard for path in folders for shard in self.shards[path]])


def _is_done(shards: Sequence[TokenShard]) -> bool:
    return bool(shards) and shards[-1].last


def _refuse_no_documents(spec: SourceSpec, shards: Sequence[TokenShard]) -> None:
    if not any(len(shard.lengths) for shard in shards):
        empty = sum(shard.empty_documents for shard in shards)
        raise no_documents(spec, ReadingCounts(0, empty, sum(shard.binary_files for shard in shards)))


_Step = tuple[Path, Record | None]
"""A split's folder, and its next record or None at its end."""


def _steps(folders: Iterable[Path], work: _Work, read: Reader) -> Iterator[_Step]:
    for folder in folders:
        skip = work.begin(folder)
        if skip is None:
            continue
        for record in read(work.splits[folder], skip):
            yield folder, record
        yield folder, None


def _with_documents(
    steps: Iterable[_Step], vocabulary: int
) -> Iterator[tuple[_Step, list[Document | TokenisedDocument]]]:
    """Each step with the documents of its record that have any tokens.

    Raises:
        RopewalkError: for token ids that do not fit the vocabulary.
    """
    for step in steps:
        record = step[1]
        documents = [] if record is None else [each for each in record.documents if not is_blank(each)]
        for document in documents:
            if isinstance(document, TokenisedDocument):
                check_ids(document, vocabulary)
        yield step, documents
