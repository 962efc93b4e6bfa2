"""Documents to token ids: in worker processes, in order, in bounded memory, without special tokens."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ropewalk.data.documents import Document
from ropewalk.data.embedded import resolve_model
from ropewalk.errors import RopewalkError

Progress = Callable[[int, int], None]
"""Called with the documents and the tokens so far, after each batch."""

BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 1 << 20
"""A batch ends at whichever comes first, so that a batch of books is no larger than one of tweets."""


@dataclass(frozen=True, eq=False)
class TokenisedDocument:
    """A document's own tokens.

    Attributes:
        input_ids: int32 ``[num_tokens]``, no special token added; it may be empty.
        source: as in Document.
    """

    input_ids: NDArray[np.int32]
    source: str


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that packing adds.

    Attributes:
        bos: beginning of a document, None where the tokenizer has none (Qwen).
        eos: end of a document, None where the tokenizer has none.
        anchor: the token that every document of a row sees: bos, or eos where there is no bos.
    """

    bos: int | None
    eos: int | None
    anchor: int


def load_tokenizer(path_or_name: str) -> Any:
    """A transformers tokenizer from a folder, the hub, or ``embedded``; no code of the repository is run.

    Raises:
        RopewalkError: if there is none, or it has no fast (``tokenizers``) backend.
    """
    from transformers import AutoTokenizer

    path = resolve_model(path_or_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise RopewalkError(f"cannot load a tokenizer from {path_or_name!r}: {reason}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise RopewalkError(
            f"the tokenizer of {path_or_name!r} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "convert it to a fast tokenizer"
        )
    return tokenizer


def special_ids(tokenizer: Any) -> SpecialTokens:
    """The special tokens of a transformers tokenizer.

    Raises:
        RopewalkError: if it has neither a bos nor an eos token.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    anchor = eos if bos is None else bos
    if anchor is None:
        raise RopewalkError(
            f"the tokenizer {tokenizer.name_or_path!r} has neither a bos nor an eos token to begin a row with"
        )
    return SpecialTokens(bos, eos, anchor)


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """What makes two tokenizers give the same ids, as plain values for a manifest.

    Returns:
        ``sha256`` over the whole backend (vocabulary, merges, normalizer, added tokens), ``vocab_size`` with
        the added tokens, ``bos_token_id`` and ``eos_token_id``. The name or path is no part of it.
    """
    return {
        "sha256": hashlib.sha256(_backend_state(tokenizer).encode()).hexdigest(),
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def tokenise(
    documents: Iterable[Document],
    tokenizer: Any,
    workers: int = 1,
    batch_documents: int = BATCH_DOCUMENTS,
    batch_characters: int = BATCH_CHARACTERS,
    progress: Progress | None = None,
) -> Iterator[TokenisedDocument]:
    """Tokenise a stream of documents; one comes out for each that goes in, in the same order.

    Special tokens are never added here: the packer does, by a policy that one can read. Text that spells a
    special token (``<s>``) becomes that token, as in transformers.

    Args:
        documents: read no further ahead than the batches under way, so memory does not grow with the corpus.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        workers: processes; 1 tokenises in this process, and so does a corpus of a single batch. With more, a
            script needs the usual ``if __name__ == "__main__"``, since the processes are spawned.
        batch_documents: most documents of a batch.
        batch_characters: a batch ends with the document that reaches this many characters.
        progress: called after each batch.

    Raises:
        RopewalkError: if ``workers`` is less than 1, the tokenizer cannot be loaded, or a worker dies.
    """
    if workers < 1:
        raise RopewalkError(f"workers must be 1 or more, got {workers}")
    state = _backend_state(load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer)
    batches = _batches(documents, batch_documents, batch_characters)
    first = list(islice(batches, 2))
    batches = chain(first, batches)
    # A corpus of one batch is tokenised sooner than a process starts.
    alone = workers == 1 or len(first) < 2
    encoded = _in_process(batches, state) if alone else _in_workers(batches, state, workers)
    num_documents = num_tokens = 0
    for sources, lengths, flat in encoded:
        num_documents += len(lengths)
        num_tokens += len(flat)
        for source, ids in zip(sources, np.split(flat, np.cumsum(lengths)[:-1]), strict=True):
            yield TokenisedDocument(ids, source)
        if progress is not None:
            progress(num_documents, num_tokens)


_Batch = tuple[list[str], list[str]]
_Encoded = tuple[list[int], NDArray[np.int32]]


def _backend_state(tokenizer: Any) -> str:
    """The backend as JSON, without the truncation and padding that many a tokenizer.json carries along."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend.to_str()


def _batches(documents: Iterable[Document], most: int, characters: int) -> Iterator[_Batch]:
    texts: list[str] = []
    sources: list[str] = []
    size = 0
    for document in documents:
        texts.append(document.text)
        sources.append(document.source)
        size += len(document.text)
        if len(texts) >= most or size >= characters:
            yield texts, sources
            texts, sources, size = [], [], 0
    if texts:
        yield texts, sources


def _encode(tokenizer: Tokenizer, texts: list[str]) -> _Encoded:
    """Lengths and one flat array: a worker's answer that costs little to send back."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    lengths = [len(each) for each in ids]
    flat = np.fromiter(chain.from_iterable(ids), np.int32, sum(lengths))
    return lengths, flat


def _in_process(batches: Iterator[_Batch], state: str) -> Iterator[tuple[list[str], list[int], NDArray[Any]]]:
    tokenizer = Tokenizer.from_str(state)
    for texts, sources in batches:
        yield sources, *_encode(tokenizer, texts)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(state: str) -> None:
    global _worker_tokenizer
    # A terminal interrupts every process of a command; the parent alone answers, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = Tokenizer.from_str(state)


def _end_with_parent() -> None:
    """Leave when the parent is killed; the pool's queue alone would keep a worker waiting for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: list[str]) -> _Encoded:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, texts)


def _in_workers(
    batches: Iterator[_Batch], state: str, workers: int
) -> Iterator[tuple[list[str], list[int], NDArray[Any]]]:
    # Spawned, not forked: the parent may hold threads and locks (torch, tokenizers) that a fork would copy.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(state,))
    window: deque[tuple[list[str], Future[_Encoded]]] = deque()
    try:
        for texts, sources in batches:
            window.append((sources, pool.submit(_encode_in_worker, texts)))
            if len(window) > 2 * workers:
                sources, future = window.popleft()
                yield sources, *future.result()
        while window:
            sources, future = window.popleft()
            yield sources, *future.result()
    except BrokenProcessPool as error:
        raise RopewalkError(
            "a tokenisation worker died; it may have run out of memory, or the script that started it "
            'lacks `if __name__ == "__main__":`'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
