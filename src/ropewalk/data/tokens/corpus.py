"""The corpus: tokenised splits on disk presented as one sequence of documents, with an index in memory."""

from __future__ import annotations

import hashlib
import math
import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from ropewalk.data.mixture.gzip_ratio import gzip_ratio
from ropewalk.data.read.documents import Document, TokenisedDocument, text_hash, token_hash
from ropewalk.data.read.input_splits import NO_DOCUMENTS, InputSplit, changed, read_input_split
from ropewalk.data.read.readers import (
    Reader,
    ReadingCounts,
    no_documents,
    refuse_unused_spans,
    training_documents,
)
from ropewalk.data.settings import SourceSpec, WorkSettings, processes
from ropewalk.data.tokens.arrow import checked_index
from ropewalk.data.tokens.chat import required_template
from ropewalk.data.tokens.token_shards import (
    COLUMNS,
    FORMAT,
    SUFFIX,
    ShardFile,
    TokenShard,
    open_shard,
    writing_shard,
)
from ropewalk.data.tokens.tokenise import (
    Encoder,
    Progress,
    load_tokenizer,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest
from ropewalk.io.files import remove_left_overs
from ropewalk.runs.tasks import Executor, Processes, own_first, run_tasks

OPEN_SHARDS = 256
"""Maximum number of shards that a corpus keeps open, because the number of file descriptors is limited."""

PROCESS_BYTES = 1 << 20
"""Bytes of documents for which it is worth to start another process."""

_THREADS = 8

ALONE = WorkSettings(workers=1)
"""One machine, one process."""


class TokenReader:
    """Reads the documents' tokens, without their index; another process that gets it opens the shards itself.

    Args:
        paths: the shards, in order.
        starts: number of the first document of each shard, and the number of all documents.
    """

    def __init__(self, paths: Sequence[Path], starts: Sequence[int]) -> None:
        self._paths = paths
        self._starts = starts
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with own tokens of document ``number`` (from 0), starting at its token ``first``.

        Raises:
            RopewalkError: if its shard is missing.
        """
        shard = bisect_right(self._starts, number) - 1
        file = self._open.get(shard)
        if file is None:
            # The shard that was used least recently goes first: rows read documents from many shards in turn.
            while len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
            file = self._open[shard] = ShardFile(self._paths[shard])
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
        gzip_ratios: float64 ``[documents]``, gzip ratio of the text, NaN for a chat; None if they were not asked for.
        zlib: version of zlib that they are from; None likewise.
        digest: SHA-256 over ids, lengths, sources and hashes of all documents; equal on every machine.
        reader: reads the tokens.
    """

    def __init__(self, shards: deque[TokenShard], splits: int) -> None:
        """Concatenate the shards' indexes; empties ``shards`` on the way, so that no index is held twice for long.

        Raises:
            RopewalkError: if different versions of zlib made their gzip ratios.
        """
        self.zlib = _one_zlib(shards)
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
        self.gzip_ratios = None if self.zlib is None else np.empty(documents, np.float64)
        self.reading = ReadingCounts.total([shard.reading for shard in shards])
        state = hashlib.sha256()
        sources: dict[str, int] = {}
        for start, stop in pairwise(starts):
            shard = shards.popleft()
            state.update(bytes.fromhex(shard.digest))
            # Shards number their sources independently; map them to the numbers of the corpus.
            ids = np.array([sources.setdefault(name, len(sources)) for name in shard.sources], np.int32)
            self.source_ids[start:stop] = ids[shard.source_ids]
            for name in COLUMNS:
                if name != "source_ids":
                    getattr(self, name)[start:stop] = getattr(shard, name)
            if self.gzip_ratios is not None:
                self.gzip_ratios[start:stop] = shard.gzip_ratios
        for name in COLUMNS:
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
        self.reader.read_tokens(number, 0, ids)
        return ids

    def close(self) -> None:
        """Close the shards' files; later reads open them again."""
        self.reader.close()


def _one_zlib(shards: Sequence[TokenShard]) -> str | None:
    """The version of zlib that made the gzip ratios of all shards; None if they have none."""
    versions = {shard.zlib: shard.path for shard in shards}
    if len(versions) > 1:
        (one, path), (other, another) = sorted(versions.items(), key=str)[:2]
        raise RopewalkError(
            f"zlib {one} made the gzip ratios in {path}, but zlib {other} those in {another}, and their sizes differ; "
            "delete the files of one version, and run again with the other"
        )
    return next(iter(versions), None)


def tokenise_splits(
    splits: Sequence[InputSplit],
    tokenizer: Any,
    folder: Path,
    *,
    work: WorkSettings = ALONE,
    executor: Executor | None = None,
    progress: Progress | None = None,
    read: Reader = read_input_split,
    gzip_ratios: bool = False,
) -> Corpus:
    """Tokenise the splits that are not on disk yet, and open the whole corpus.

    Each split is a shard, whose name is a digest of the split's identity and the tokenizer's; an interrupted run
    resumes after the complete ones. Machines that share the folder share the work: each machine first tokenises its
    own splits, then, from last to first, those of other machines that are still missing. So each machine alone would
    finish the work. At worst two machines tokenise the same split, and write the same bytes. A split that occurs twice
    in ``splits`` is tokenised once, and its documents occur twice in the corpus.

    Args:
        splits: input splits in reading order, at least one.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        folder: folder of the shards; created if missing.
        work: ``shard`` is (this machine, number of machines): split k belongs to machine k % number, both from 0.
            ``workers`` is the number of processes.
        executor: runs each split as a task; None for processes of this machine.
        progress: called with the numbers of documents and tokens so far, including those found on disk.
        read: yields a split's records.
        gzip_ratios: also measure how well each text compresses. Ratios that are on disk are kept as they are.

    Raises:
        RopewalkError: if a source has no documents, token ids do not fit the tokenizer, a shard is damaged or cannot
            be written, or reading fails. Complete shards are kept.
    """
    if not splits:
        raise RopewalkError(NO_DOCUMENTS)
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    identity = tokenizer_identity(tokenizer)
    chats = {}
    if any(split.spec.messages_field for split in splits):
        chats = {"chat_template": required_template(tokenizer).digest}
    names = [
        digest(
            [
                FORMAT,
                # Another version may tokenise the same text differently.
                tokenizers.__version__,
                {**identity, **(chats if split.spec.messages_field else {})},
                split.identity,
                *(["gzip ratios"] if gzip_ratios else []),
            ]
        )[:32]
        for split in splits
    ]
    # Absolute, because a task may have another working directory.
    place = folder.absolute()
    paths = [place / f"{name}{SUFFIX}" for name in names]
    shards = _Shards(dict(zip(paths, splits, strict=True)), progress)
    missing = [
        (path, shards.splits[path]) for path in own_first(paths, work.shard) if path not in shards.found
    ]
    if executor is None:
        executor = processes_for([split for _, split in missing], work.workers)
    job = (Encoder.of(tokenizer), read, gzip_ratios)
    for _ in run_tasks(executor, _write_split, job, missing, lambda item: shards.look(item[0]), folder):
        pass
    # They are complete, so temporary files of these names are those of killed runs.
    remove_left_overs(folder, *(path.name for path in paths))
    found = deque(shards.found[path] for path in paths)
    # Corpus drops each index once it has copied it, which frees nothing while another reference is left.
    shards.found.clear()
    corpus = Corpus(found, len(splits))
    refuse_unused_spans([split.spec for split in splits], corpus.reading)
    return corpus


def processes_for(splits: Sequence[InputSplit], workers: int) -> Processes:
    """As many processes as are worth to start for reading splits, and no more than the workers of the settings."""
    # A size of 0 is unknown.
    size = sum(split.size or PROCESS_BYTES for split in splits)
    return Processes(min(processes(workers), -(-size // PROCESS_BYTES) or 1))


class _Shards:
    """The shards of a corpus that are on disk.

    Args:
        splits: the splits by the paths of their shards.
        progress: called with the numbers of documents and tokens so far.
    """

    def __init__(self, splits: dict[Path, InputSplit], progress: Progress | None) -> None:
        self.splits = splits
        self.found: dict[Path, TokenShard] = {}
        self._progress = progress
        self._waiting = Counter(split.spec for split in splits.values())
        self._documents = self._tokens = 0
        # Threads suffice: opening a shard hashes all of it, and hashlib releases the GIL meanwhile.
        with ThreadPoolExecutor(_THREADS) as pool:
            for shard in pool.map(open_shard, [path for path in splits if path.exists()]):
                self._add(shard)
        if self._documents:
            self._report()

    def look(self, path: Path) -> bool:
        """Whether a shard is on disk; opens and reports it if it is new."""
        if path not in self.found and path.exists():
            self._add(open_shard(path))
            self._report()
        return path in self.found

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._documents, self._tokens)

    def _add(self, shard: TokenShard) -> None:
        self.found[shard.path] = shard
        self._documents += len(shard.lengths)
        self._tokens += shard.tokens
        spec = self.splits[shard.path].spec
        self._waiting[spec] -= 1
        # Judged once all splits of a source are there, because single splits may be empty.
        if not self._waiting[spec]:
            _refuse_no_documents(
                spec, [self.found[path] for path, split in self.splits.items() if split.spec == spec]
            )


def _refuse_no_documents(spec: SourceSpec, shards: Sequence[TokenShard]) -> None:
    counts = ReadingCounts.total([shard.reading for shard in shards])
    if not counts.documents:
        raise no_documents(spec, counts)


def _write_split(job: tuple[Encoder, Reader, bool], item: tuple[Path, InputSplit]) -> None:
    """Tokenise one split; a task."""
    (encoder, read, measured), (path, split) = job, item
    # Another machine may have written it since the task was given out.
    if path.exists():
        return
    with writing_shard(path, zlib.ZLIB_RUNTIME_VERSION if measured else None) as shard:
        for document, ids in encoder.encode_documents(training_documents(split, shard.reading, read)):
            ratio = _ratio(document, encoder) if measured else math.nan
            if isinstance(document, Document):
                shard.add(ids, document.source, text_hash(document.text), len(document.text), ratio)
            else:
                shard.add(ids, document.source, token_hash(ids), 0, ratio)
        if changed(split):
            raise RopewalkError(
                f"a file of {split.spec.path} changed during packing; pack again when no program writes to the file"
            )


def _ratio(document: Document | TokenisedDocument, encoder: Encoder) -> float:
    """The gzip ratio of a document's text; NaN for a chat, which is no text, and for one without text."""
    if isinstance(document, Document):
        return math.nan if document.chat else gzip_ratio(document.text)
    text = encoder.decode(document.input_ids)
    return gzip_ratio(text) if text else math.nan
