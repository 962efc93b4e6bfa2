"""The corpus: tokenised splits on disk presented as one sequence of documents, with an index in memory."""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ropewalk.data.cluster import RayCluster, wait_until
from ropewalk.data.read.documents import Document, Record, TokenisedDocument, token_hash
from ropewalk.data.read.input_splits import NO_DOCUMENTS, InputSplit, changed, is_blank, read_input_split
from ropewalk.data.read.readers import ReadingCounts, no_documents
from ropewalk.data.settings import SourceSpec, WorkSettings, processes
from ropewalk.data.tokens.arrow import checked_index
from ropewalk.data.tokens.chat import ChatTemplate, chat_template, required_template
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
    EncodedTexts,
    Progress,
    Text,
    backend_tokenizer,
    check_ids,
    encode_batches,
    encode_here,
    in_batches,
    load_tokenizer,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest

OPEN_SHARDS = 256
"""Maximum number of shards that a corpus keeps open, because the number of file descriptors is limited."""

INDEX = ("lengths", "source_ids", "hashes", "characters", "first_ids", "last_ids")
"""The columns of the index, in shards and in the corpus."""

_THREADS = 8

ALONE = WorkSettings(workers=1)
"""One machine, one process."""

Reader = Callable[[InputSplit, int], Iterator[Record]]
"""Yields the records of a split after skipping the first ones, like ``read_input_split``."""


class TokenReader:
    """Reads the documents' tokens, without their index; another process that gets it opens the shards itself.

    Args:
        paths: the shards, in order.
        starts: number of the first document of each shard, and the number of all documents.
    """

    def __init__(self, paths: Sequence[Path], starts: Sequence[int]) -> None:
        self._paths = paths
        self._starts = starts
        self._open: OrderedDict[int, TokenFile] = OrderedDict()

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """As in :class:`Corpus`."""
        shard = bisect_right(self._starts, number) - 1
        file = self._open.get(shard)
        if file is None:
            # The shard that was used least recently goes first: rows read documents from many shards in turn.
            while len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
            file = self._open[shard] = TokenFile(self._paths[shard])
        else:
            self._open.move_to_end(shard)
        file.read(int(file.offsets[number - self._starts[shard]]) + first, out)

    def close(self) -> None:
        """Close the shards' files; later reads open them again."""
        while self._open:
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        # Absolute, because another process may have another working directory.
        paths = [path.absolute() for path in self._paths]
        return {"_paths": paths, "_starts": self._starts, "_open": OrderedDict()}


class Corpus:
    """All documents in reading order: an index of 36 bytes a document in memory, and token ids on disk.

    The arrays are read-only.

    Attributes:
        lengths: int64 ``[documents]``, number of own tokens; 0 if the tokenizer gave none.
        source_ids: int32 ``[documents]``, index into ``sources``.
        sources: names of the sources, in the order of their first documents.
        hashes: uint64 ``[documents]``, ``text_hash`` of the text, or ``token_hash`` if the input was tokenised.
        characters: int64 ``[documents]``, characters of the text; 0 if the input was tokenised.
        first_ids, last_ids: int32 ``[documents]``, first and last token; -1 for an empty document.
        reading: numbers of documents read and of records skipped.
        splits: number of input splits that the documents come from.
        digest: SHA-256 over ids, lengths, sources and hashes of all documents; equal on every machine.
        reader: reads the tokens.
    """

    def __init__(self, shards: deque[TokenShard], splits: int) -> None:
        """Concatenate the shards' indexes; empties ``shards`` on the way, so that no index is held twice for long."""
        self.splits = splits
        starts = [0, *accumulate(len(shard.lengths) for shard in shards)]
        self.reader = TokenReader([shard.path for shard in shards], starts)
        documents = starts[-1]
        self.lengths = np.empty(documents, np.int64)
        self.source_ids = np.empty(documents, np.int32)
        self.hashes = np.empty(documents, np.uint64)
        self.characters = np.empty(documents, np.int64)
        self.first_ids = np.empty(documents, np.int32)
        self.last_ids = np.empty(documents, np.int32)
        self.reading = ReadingCounts(documents)
        state = hashlib.sha256()
        sources: dict[str, int] = {}
        for start, stop in pairwise(starts):
            shard = shards.popleft()
            state.update(bytes.fromhex(shard.digest))
            self.reading.empty_documents += shard.empty_documents
            self.reading.binary_files += shard.binary_files
            self.reading.dropped_nulls += shard.dropped_nulls
            # Shards number their sources independently; map them to the numbers of the corpus.
            ids = np.array([sources.setdefault(name, len(sources)) for name in shard.sources], np.int32)
            self.source_ids[start:stop] = ids[shard.source_ids]
            for name in INDEX:
                if name != "source_ids":
                    getattr(self, name)[start:stop] = getattr(shard, name)
        for name in INDEX:
            getattr(self, name).flags.writeable = False
        self.sources = tuple(sources)
        self.digest = state.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, number: int) -> NDArray[np.int32]:
        """Own tokens of a document; those of a chat that are never targets as ``~id``.

        Args:
            number: index of the document in reading order; a negative one counts from the end.

        Returns:
            int32 ``[lengths[number]]``.

        Raises:
            IndexError: if there is no such document.
            RopewalkError: if its shard is missing.
        """
        number = checked_index(number, len(self))
        ids = np.empty(int(self.lengths[number]), np.int32)
        self.read_tokens(number, 0, ids)
        return ids

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with own tokens of document ``number`` (from 0), starting at its token ``first``.

        Raises:
            RopewalkError: if its shard is missing.
        """
        self.reader.read_tokens(number, first, out)

    def close(self) -> None:
        """Close the shards' files; later reads open them again."""
        self.reader.close()


def tokenise_splits(
    splits: Sequence[InputSplit],
    tokenizer: Any,
    folder: Path,
    *,
    work: WorkSettings = ALONE,
    cluster: RayCluster | None = None,
    progress: Progress | None = None,
    read: Reader = read_input_split,
) -> Corpus:
    """Tokenise the splits that are not on disk yet, and open the whole corpus.

    Each split has a folder of shards, named by a digest of its identity and the tokenizer's. Shards are written in
    order, and an interrupted run resumes after the last complete one. Machines that share the folder share the work:
    each machine first tokenises its own splits, then, from last to first, those of other machines that are still
    missing. So each machine alone would finish the work. At worst two machines tokenise the same split, and write the
    same bytes. A split that occurs twice in ``splits`` is tokenised once, and its documents occur twice in the corpus.

    Args:
        splits: input splits in reading order, at least one.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        folder: parent of the splits' folders; created if missing.
        work: ``shard`` is (this machine, number of machines): split k belongs to machine k % number, both from 0.
            ``workers`` is the number of processes, as in :func:`ropewalk.data.tokens.tokenise.encode_batches`.
        cluster: runs each split as a task of its own; None for processes of this machine.
        progress: called with the numbers of documents and tokens so far, including those found on disk.
        read: yields a split's records.

    Raises:
        RopewalkError: if a source has no documents, token ids do not fit the tokenizer, a shard is damaged or cannot
            be written, or reading fails. Complete shards are kept, and the next run resumes after them.
    """
    index, machines = work.shard
    if not splits:
        raise RopewalkError(NO_DOCUMENTS)
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    identity = tokenizer_identity(tokenizer)
    chats = {}
    if any(split.spec.messages_field for split in splits):
        chats = {"chat_template": required_template(tokenizer).digest}
    folders = [
        folder
        / digest(
            [
                FORMAT,
                # Another version may tokenise the same text differently.
                tokenizers.__version__,
                {**identity, **(chats if split.spec.messages_field else {})},
                split.identity,
            ]
        )[:32]
        for split in splits
    ]
    made = _Work(dict(zip(folders, splits, strict=True)), progress)
    own = folders[index::machines]
    # Other machines work from the front of their splits, so taking over from the back collides last.
    order = list(dict.fromkeys([*own, *reversed(folders)]))
    if cluster is None:
        vocabulary, count = len(tokenizer), processes(work.workers)
        _write(made, order, read, vocabulary, lambda batches: encode_batches(batches, tokenizer, count))
    else:
        state = backend_tokenizer(tokenizer).to_str()
        job = _Job(state, chat_template(tokenizer), len(tokenizer), read)
        missing = [(path.absolute(), made.splits[path]) for path in order if not _is_done(made.shards[path])]
        # Largest first, so that no node works alone on a large split at the end.
        missing.sort(key=lambda item: -item[1].size)
        places = {path.absolute(): path for path in order}
        for (path, _), _ in cluster.run(_write_split, job, missing):
            place = places[path]
            wait_until(lambda place=place: made.look(place), place)  # type: ignore[misc]
            made.report()
    shards = deque(shard for path in folders for shard in made.shards[path])
    # Corpus drops each index once it has copied it, which frees nothing while another reference is left.
    made.shards.clear()
    return Corpus(shards, len(splits))


@dataclass(frozen=True)
class _Job:
    """What a task needs to tokenise a split, without transformers.

    Attributes:
        state: the tokenizer's backend as JSON.
        template: its chat template, if it has one.
        vocabulary: number of its tokens.
        read: yields a split's records.
    """

    state: str
    template: ChatTemplate | None
    vocabulary: int
    read: Reader


def _write_split(job: _Job, item: tuple[Path, InputSplit]) -> None:
    """Tokenise one split in this process; a task of Ray."""
    folder, split = item
    made = _Work({folder: split}, None, whole=False)
    encode = partial(encode_here, state=job.state, template=job.template)
    _write(made, [folder], job.read, job.vocabulary, encode)


def _write(
    made: _Work,
    folders: Iterable[Path],
    read: Reader,
    vocabulary: int,
    encode: Callable[[Iterator[tuple[list[Text], list[_Step]]]], Generator[tuple[list[_Step], EncodedTexts]]],
) -> None:
    """Tokenise the splits of these folders that are not on disk yet."""
    steps = _with_documents(_steps(folders, made, read), vocabulary)
    batches = in_batches(steps, BATCH_DOCUMENTS, BATCH_CHARACTERS)
    with closing(encode(batches)) as encoded:
        for entries, batch in encoded:
            texts = zip(batch.documents(), batch.hashes.tolist(), strict=True)
            for path, record in entries:
                made.add(path, record, texts)
            made.report()


class _Work:
    """State of each split: its shards on disk, and the writer of a split that is being tokenised.

    Args:
        splits: the splits by the folders of their shards.
        progress: called with the numbers of documents and tokens so far.
        whole: whether these are all splits of their sources, so that a source without documents can be refused.
    """

    def __init__(
        self,
        splits: dict[Path, InputSplit],
        progress: Progress | None,
        whole: bool = True,
    ) -> None:
        self.splits = splits
        self._progress = progress
        self._whole = whole
        self._writers: dict[Path, ShardWriter] = {}
        self._waiting = Counter(split.spec for split in splits.values())
        self._documents = self._tokens = 0
        # Threads suffice: opening a shard hashes all of it, and hashlib releases the GIL meanwhile.
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(committed_shards, splits)
            self.shards: dict[Path, tuple[TokenShard, ...]] = dict(zip(splits, found, strict=True))
        for folder, shards in self.shards.items():
            self._count(shards)
            if _is_done(shards):
                self._finished(folder)
        if self._documents:
            self.report()

    def begin(self, folder: Path) -> int | None:
        """Start or resume a split; return the number of its records on disk, or None if it is complete."""
        if self.look(folder):
            return None
        remove_leftovers(folder)
        shards = self.shards[folder]
        self._writers[folder] = ShardWriter(folder, shards)
        return sum(shard.records for shard in shards)

    def look(self, folder: Path) -> bool:
        """Open the shards that others have written since this run started; whether the split is complete."""
        known = self.shards[folder]
        if _is_done(known):
            return True
        new = committed_shards(folder, known)[len(known) :]
        shards = self.shards[folder] = (*known, *new)
        self._count(shards[len(known) :])
        if not _is_done(shards):
            return False
        self._finished(folder)
        return True

    def add(
        self, folder: Path, record: Record | None, texts: Iterator[tuple[NDArray[np.int32], int]]
    ) -> None:
        """Write a record of a split; None finishes the split. ``texts`` yields the ids and hashes of its texts."""
        if record is None:
            if changed(self.splits[folder]):
                # Delete the shards: if the old file came back, its identity would match these wrong tokens.
                shutil.rmtree(folder, ignore_errors=True)
                raise RopewalkError(
                    f"a file of {self.splits[folder].spec.path} changed during packing; pack again when no program "
                    "writes to the file"
                )
            known = self.shards[folder]
            new = self._writers.pop(folder).finish()[len(known) :]
            self.shards[folder] = (*known, *new)
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
                writer.add_nulls(document.dropped_nulls)
                characters = len(document.text)
            writer.add(ids, document.source, text_hash, characters)
            self._documents += 1
            self._tokens += len(ids)

    def report(self) -> None:
        if self._progress is not None:
            self._progress(self._documents, self._tokens)

    def _count(self, shards: Iterable[TokenShard]) -> None:
        for shard in shards:
            self._documents += len(shard.lengths)
            self._tokens += shard.tokens

    def _finished(self, folder: Path) -> None:
        spec = self.splits[folder].spec
        self._waiting[spec] -= 1
        # Judged once all splits of a source are there, because single splits may be empty.
        if self._whole and not self._waiting[spec]:
            folders = [path for path, split in self.splits.items() if split.spec == spec]
            _refuse_no_documents(spec, [shard for path in folders for shard in self.shards[path]])


def _is_done(shards: Sequence[TokenShard]) -> bool:
    return bool(shards) and shards[-1].last


def _refuse_no_documents(spec: SourceSpec, shards: Sequence[TokenShard]) -> None:
    if not any(len(shard.lengths) for shard in shards):
        empty = sum(shard.empty_documents for shard in shards)
        raise no_documents(spec, ReadingCounts(0, empty, sum(shard.binary_files for shard in shards)))


_Step = tuple[Path, Record | None]
"""A split's folder, and its next record; None at the end of the split."""


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
    """Yield each step with the documents of its record that are not blank.

    Raises:
        RopewalkError: for token ids outside the vocabulary.
    """
    for step in steps:
        record = step[1]
        documents = [] if record is None else [each for each in record.documents if not is_blank(each)]
        for document in documents:
            if isinstance(document, TokenisedDocument):
                check_ids(document, vocabulary)
        yield step, documents
