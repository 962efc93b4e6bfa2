"""Tokenise documents in worker processes, in order and in bounded memory, without special tokens."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ropewalk.data.read.documents import Document, TokenisedDocument, text_hash
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.tokens.chat import (
    ChatTemplate,
    Conversation,
    chat_template,
    encode_conversation,
    token_ids,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.files import (
    check_model_place,
    json_fault,
    not_found,
    parse_json,
    refuse_adapter,
    refuse_lfs_pointer,
    writing,
)

Progress = Callable[[int, int], None]
"""Called after each batch with the numbers of documents and tokens so far."""

TOKENIZER_ERRORS = (
    *(OSError, ValueError, LookupError, ImportError),
    *(TypeError, AttributeError, StrictDataclassError),
)
"""Exceptions that transformers raises for files that it cannot make a tokenizer of."""
BATCH_DOCUMENTS = 4096
BATCH_CHARACTERS = 1 << 18
"""A batch ends at whichever limit is reached first, so that a batch of books is no larger than one of short texts."""

Carried = TypeVar("Carried")

Text = str | Conversation
"""What a worker encodes: a text, or a conversation that it renders first."""


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The tokens of a batch of texts, as arrays that cost little to send from one process to another.

    Attributes:
        lengths: int64 ``[texts]``, tokens of each text.
        hashes: uint64 ``[texts]``, ``text_hash`` of each text.
        input_ids: int32 ``[tokens]``, ids of all texts, concatenated, without special tokens; ``~id`` for tokens of a
            chat that are never targets.
    """

    lengths: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    input_ids: NDArray[np.int32]

    def documents(self) -> list[NDArray[np.int32]]:
        """The ids of each text, as views."""
        ends = np.cumsum(self.lengths).tolist()
        return (
            [self.input_ids[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
            if ends
            else []
        )


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that packing adds.

    Attributes:
        bos: beginning of a document; None if the tokenizer has none (Qwen).
        eos: end of a document; None if the tokenizer has none.
        anchor: the token that every document of a row attends to: bos, or eos if there is no bos.
    """

    bos: int | None
    eos: int | None
    anchor: int


def load_tokenizer(path_or_name: str, embedding_rows: int | None = None) -> Any:
    """Load a transformers tokenizer from a folder, the Hub, or ``embedded``, without running code of its repository.

    Args:
        path_or_name: folder or Hub id.
        embedding_rows: rows of the embedding of the model that reads the tokens (``vocab_size``); None if no model
            reads them, or it is not known here.

    Raises:
        RopewalkError: if there is no tokenizer, or it has no fast (``tokenizers``) backend, no ordinary tokens, or more
            tokens than the model's embedding has rows.
    """
    from transformers import AutoTokenizer

    path = resolve_model(path_or_name)
    check_model_place(path)
    refuse_adapter(path, beside_weights=False)
    for file in Path(path).glob("tokenizer.*"):
        refuse_lfs_pointer(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except TOKENIZER_ERRORS as error:
        if not Path(path).exists():
            raise not_found(path_or_name, "tokenizer", error) from error
        lines = json_fault(error).strip().splitlines()
        reason = _no_object(Path(path)) or (lines[0] if lines else type(error).__name__)
        folder = Path(path)
        if folder.is_dir() and not any(folder.glob("*token*")):
            reason = "the folder has no tokenizer.json or other tokenizer file"
        raise RopewalkError(f"cannot load a tokenizer from {path_or_name!r}: {reason}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise RopewalkError(
            f"the tokenizer of {path_or_name!r} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "convert it to a fast tokenizer"
        )
    # transformers makes such a one of a folder without files of a tokenizer: all text would become unknown tokens.
    if len(tokenizer.get_added_vocab()) >= len(tokenizer):
        raise RopewalkError(
            f"the tokenizer of {path_or_name!r} has only special tokens; add the model's tokenizer.json"
        )
    # An embedding with more rows than the tokenizer has tokens is fine: many are padded to a round number.
    if embedding_rows is not None and _tokens_of_text(tokenizer) > embedding_rows:
        raise RopewalkError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has only {embedding_rows} rows; use "
            "the tokenizer that belongs to the model"
        )
    return tokenizer


def _tokens_of_text(tokenizer: Any) -> int:
    """Number of tokens without the placeholders of images, sounds and videos, which no text contains.

    Gemma 3's tokenizer has one for images, for which its model of texts has no row.
    """
    named = [getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "audio", "video")]
    return len(tokenizer) - len(set(tokenizer.get_added_vocab()).intersection(filter(None, named)))


def _no_object(folder: Path) -> str | None:
    """Which file of a tokenizer is JSON but no object, which transformers' own errors do not say; None if none is."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        try:
            found = parse_json((folder / name).read_bytes())
        except (OSError, json.JSONDecodeError):
            continue
        if not isinstance(found, dict):
            return f"{name} must contain a JSON object, got {type(found).__name__}"
    return None


def special_ids(tokenizer: Any) -> SpecialTokens:
    """The special tokens of a transformers tokenizer.

    Raises:
        RopewalkError: if it has neither a bos nor an eos token.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    anchor = eos if bos is None else bos
    if anchor is None:
        raise RopewalkError(
            f"the tokenizer {tokenizer.name_or_path!r} has neither a BOS nor an EOS token to start a row with; "
            "use a tokenizer that has one of them"
        )
    return SpecialTokens(bos, eos, anchor)


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """Identity of a tokenizer for a manifest; tokenizers with equal identities give equal ids.

    Returns:
        ``sha256`` over the whole backend (vocabulary, merges, normalizer, added tokens), ``vocab_size`` including
        added tokens, ``bos_token_id`` and ``eos_token_id``. The name and path are not part of it.
    """
    return {
        "sha256": hashlib.sha256(backend_tokenizer(tokenizer).to_str().encode()).hexdigest(),
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def tokenise(
    documents: Iterable[Document | TokenisedDocument],
    tokenizer: Any,
    workers: int = 1,
    batch_documents: int = BATCH_DOCUMENTS,
    batch_characters: int = BATCH_CHARACTERS,
    progress: Progress | None = None,
) -> Iterator[TokenisedDocument]:
    """Tokenise a stream of documents, in order.

    No special tokens are added; packing adds them by the policy in its settings. Text that spells a special token
    (``<s>``) becomes that token, as in transformers.

    Args:
        documents: read only as far ahead as the batches in progress, so memory does not grow with the corpus.
            Tokenised documents pass through unchanged.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        workers: number of processes, as in :func:`encode_batches`.
        batch_documents: maximum number of documents per batch.
        batch_characters: a batch ends with the document that reaches this many characters; tokens of tokenised
            documents count as characters.
        progress: called after each batch.

    Raises:
        RopewalkError: as in :func:`encode_batches` and :func:`check_ids`.
    """
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    vocabulary = len(tokenizer)
    num_documents = num_tokens = 0
    # Keep only the source of a text while a worker tokenises it; the text itself would double the memory.
    items = (
        (document if isinstance(document, TokenisedDocument) else document.source, (document,))
        for document in documents
    )
    batches = in_batches(items, batch_documents, batch_characters)
    with closing(encode_batches(batches, tokenizer, workers)) as encoded:
        for entries, batch in encoded:
            texts = iter(batch.documents())
            for entry in entries:
                if isinstance(entry, TokenisedDocument):
                    check_ids(entry, vocabulary)
                    document = entry
                else:
                    stored = next(texts)
                    trained = int((stored >= 0).sum())
                    # A chat that is trained on whole counts as plain text.
                    document = TokenisedDocument(
                        token_ids(stored), entry, None if trained == len(stored) else trained
                    )
                num_tokens += len(document.input_ids)
                yield document
            num_documents += len(entries)
            if progress is not None:
                progress(num_documents, num_tokens)


def check_ids(document: TokenisedDocument, vocabulary: int) -> None:
    """Raise if a tokenised document has ids outside the tokenizer's vocabulary.

    Raises:
        RopewalkError: with the first id that is not from 0 to ``vocabulary - 1``.
    """
    ids = document.input_ids
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        wrong = ids[(ids < 0) | (ids >= vocabulary)][0]
        place = f"{document.origin}: " if document.origin else ""
        raise RopewalkError(
            f"{place}a tokenised document of source {document.source!r} contains token id {wrong}, but the tokenizer's "
            f"vocabulary has ids from 0 to {vocabulary - 1}; give the tokenizer that produced the ids"
        )


def encode_batches(
    batches: Iterable[tuple[list[Text], Carried]], tokenizer: Any, workers: int = 1
) -> Generator[tuple[Carried, EncodedTexts], None, None]:
    """Tokenise batches of texts; each batch comes with a value that stays in this process and is yielded beside it.

    Args:
        batches: pairs of texts and a value; read only as far ahead as the batches in progress.
        tokenizer: a transformers tokenizer with a fast backend.
        workers: number of processes. With 1, or for a single batch, this process tokenises. With more, a script needs
            the usual ``if __name__ == "__main__"``, because processes are spawned. Tokenisation takes 200 to 400
            bytes of memory per token of a batch, so a single text of 50 MB takes 5 to 7 GB.

    Raises:
        RopewalkError: if ``workers`` is less than 1, or a worker dies.
    """
    if workers < 1:
        raise RopewalkError(f"workers must be 1 or more, got {workers}")
    state = backend_tokenizer(tokenizer).to_str()
    stream = iter(batches)
    # Two, to learn whether there is more than one batch.
    first = list(islice(stream, 2))
    stream = chain(first, stream)
    # Starting a process takes longer than tokenising a single batch.
    alone = workers == 1 or len(first) < 2
    template = chat_template(tokenizer)
    return encode_here(stream, state, template) if alone else _in_workers(stream, state, template, workers)


def backend_tokenizer(tokenizer: Any) -> Tokenizer:
    """A copy of the tokenizer's backend without truncation and padding, which some ``tokenizer.json`` files enable."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def in_batches(
    items: Iterable[tuple[Carried, Iterable[Document | TokenisedDocument]]],
    most: int,
    characters: int,
) -> Iterator[tuple[list[Text], list[Carried]]]:
    """Group items into batches for :func:`encode_batches`.

    Args:
        items: pairs of a value and its documents. Tokenised documents add to the size of a batch but not to its texts.
        most: maximum number of items per batch.
        characters: a batch ends with the item that reaches this many characters; tokens of tokenised documents count
            as characters.

    Yields:
        Texts of a batch, and the values of its items.
    """
    texts: list[Text] = []
    carried: list[Carried] = []
    size = 0
    for item, documents in items:
        carried.append(item)
        for document in documents:
            if isinstance(document, TokenisedDocument):
                size += len(document.input_ids)
            else:
                texts.append(Conversation(document.text, document.origin) if document.chat else document.text)
                size += len(document.text)
        if len(carried) >= most or size >= characters:
            yield texts, carried
            texts, carried, size = [], [], 0
    if carried:
        yield texts, carried


def _encode(tokenizer: Tokenizer, texts: list[Text], template: ChatTemplate | None) -> EncodedTexts:
    plain = [text for text in texts if isinstance(text, str)]
    # Special tokens are the packing's business: their policy may differ between runs over the same shards.
    encodings = iter(tokenizer.encode_batch_fast(plain, add_special_tokens=False))
    ids = [
        np.array(next(encodings).ids, np.int32)
        if isinstance(text, str)
        else encode_conversation(text, template, tokenizer)
        for text in texts
    ]
    return EncodedTexts(
        np.fromiter(map(len, ids), np.int64, len(ids)),
        np.fromiter(map(_text_hash, texts), np.uint64, len(texts)),
        np.concatenate(ids) if ids else np.zeros(0, np.int32),
    )


def _text_hash(text: Text) -> int:
    return text_hash(text if isinstance(text, str) else text.content)


def encode_here(
    batches: Iterable[tuple[list[Text], Carried]], state: str, template: ChatTemplate | None
) -> Generator[tuple[Carried, EncodedTexts], None, None]:
    """Tokenise batches as :func:`encode_batches` does, in this process and without transformers.

    Args:
        batches: pairs of texts and a value.
        state: the tokenizer's backend as JSON, from :func:`backend_tokenizer`.
        template: the tokenizer's chat template; None without chats.
    """
    tokenizer = Tokenizer.from_str(state)
    for texts, carried in batches:
        yield carried, _encode(tokenizer, texts, template)


_worker_tokenizer: Tokenizer | None = None
_worker_template: ChatTemplate | None = None


def _start_worker(state: Path, template: ChatTemplate | None) -> None:
    global _worker_tokenizer, _worker_template
    _worker_template = template
    # Ctrl-C signals every process of a command; only the parent handles it and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The workers already use all requested cores; tokenizer threads would only compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = Tokenizer.from_str(state.read_text(encoding="utf-8"))


def _end_with_parent() -> None:
    """Exit when the parent process is killed; the pool's queue alone would keep a worker waiting forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # Not sys.exit, which in a thread would end that thread alone.
    os._exit(1)


def _encode_in_worker(texts: list[Text]) -> EncodedTexts:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, texts, _worker_template)


def _in_workers(
    batches: Iterator[tuple[list[Text], Carried]], state: str, template: ChatTemplate | None, workers: int
) -> Generator[tuple[Carried, EncodedTexts], None, None]:
    # Spawned, not forked: the parent may hold threads and locks (torch, tokenizers) that a fork would copy.
    context = multiprocessing.get_context("spawn")
    folder = TemporaryDirectory(prefix="ropewalk-")
    # Pass the tokenizer as a file: a pipe would block this process until every worker has read megabytes from it.
    path = Path(folder.name) / "tokenizer.json"
    with writing(path):
        path.write_text(state, encoding="utf-8")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(path, template))
    window: deque[tuple[Carried, Future[EncodedTexts]]] = deque()
    try:
        for texts, carried in batches:
            window.append((carried, pool.submit(_encode_in_worker, texts)))
            # Two batches per worker: one in progress and one waiting, so that no worker is idle.
            if len(window) > 2 * workers:
                carried, future = window.popleft()
                yield carried, future.result()
        while window:
            carried, future = window.popleft()
            yield carried, future.result()
    except BrokenProcessPool as error:
        raise RopewalkError(
            "a tokenisation worker died; if memory ran out, use fewer workers (--workers); if a script started the "
            'worker, put the code of the script under `if __name__ == "__main__":`'
        ) from error
    finally:
        # Reached as well when the caller stops early and closes the generator.
        pool.shutdown(wait=True, cancel_futures=True)
        folder.cleanup()
