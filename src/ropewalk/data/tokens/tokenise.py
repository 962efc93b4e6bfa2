"""Tokenise documents, in order and in bounded memory, without special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.tokens.chat import (
    ChatTemplate,
    Conversation,
    SpannedText,
    chat_template,
    encode_conversation,
    encode_spans,
    token_ids,
)
from ropewalk.data.tokens.light_tokenizer import light_tokenizer
from ropewalk.errors import RopewalkError
from ropewalk.io.files import (
    check_model_place,
    json_fault,
    not_found,
    parse_json,
    refuse_adapter,
    refuse_lfs_pointer,
)
from ropewalk.versions import is_installed

Progress = Callable[[int, int], None]
"""Called again and again with the numbers of documents and tokens so far."""

TOKENIZER_ERRORS = (
    *(OSError, ValueError, LookupError, ImportError),
    *(TypeError, AttributeError, StrictDataclassError),
)
"""Exceptions that transformers raises for files that it cannot make a tokenizer of."""
TOKENIZER_FILES = ("*token*", "vocab*", "*.model")
"""Names of the files that tokenizers are read from: tokenizer.json, vocab.json of GPT-2, spiece.model of T5."""
BATCH_DOCUMENTS = 4096
BATCH_CHARACTERS = 1 << 18
"""A batch ends at whichever limit is reached first, so that a batch of books is no larger than one of short texts."""

PROBE = "It's a  probe:\n\n\tÉclair, naïve “quotes” — 漢字 🎉 ( x ) , don 't .\nEnd  "
"""Text that only a lossless tokenizer gives back: with letters, spaces and signs that others change or do not know."""

Text = str | SpannedText | Conversation
"""What is encoded: a text, one of which only spans count in the loss, or a conversation that is rendered first."""


def text_of(document: Document) -> Text:
    """What is encoded of a document."""
    if document.chat:
        return Conversation(document.text, document.origin)
    return document.text if document.spans is None else SpannedText(document.text, document.spans)


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

    Without transformers, it is a :class:`~ropewalk.data.tokens.light_tokenizer.LightTokenizer`.

    Args:
        path_or_name: folder or Hub id.
        embedding_rows: rows of the embedding of the model that reads the tokens (``vocab_size``); None if no model
            reads them, or it is not known here.

    Raises:
        RopewalkError: if there is no tokenizer, or it has no fast (``tokenizers``) backend, no ordinary tokens, or more
            tokens than the model's embedding has rows.
    """
    path = resolve_model(path_or_name)
    check_model_place(path)
    refuse_adapter(path, beside_weights=False)
    for file in Path(path).glob("tokenizer.*"):
        refuse_lfs_pointer(file)
    tokenizer = (
        _of_transformers(path, path_or_name) if is_installed("transformers") else light_tokenizer(path)
    )
    # transformers makes such a one of a folder without files of a tokenizer: all text would become unknown tokens.
    if len(tokenizer.get_added_vocab()) >= len(tokenizer):
        if lacks_tokenizer(path):
            raise _no_tokenizer(path_or_name)
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


def lacks_tokenizer(path: str | Path) -> bool:
    """Whether a folder has no file of a tokenizer; False for what is no folder, such as a Hub id."""
    folder = Path(path)
    return folder.is_dir() and not any(path for name in TOKENIZER_FILES for path in folder.glob(name))


def _no_tokenizer(folder: str) -> RopewalkError:
    return RopewalkError(f"there is no tokenizer in {folder!r}; add the model's tokenizer.json")


def _of_transformers(path: str, path_or_name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except TOKENIZER_ERRORS as error:
        if not Path(path).exists():
            raise not_found(path_or_name, "tokenizer", error) from error
        if lacks_tokenizer(path):
            raise _no_tokenizer(path_or_name) from error
        lines = json_fault(error).strip().splitlines()
        reason = _no_object(Path(path)) or (lines[0] if lines else type(error).__name__)
        raise RopewalkError(f"cannot load a tokenizer from {path_or_name!r}: {reason}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise RopewalkError(
            f"the tokenizer of {path_or_name!r} is a {type(tokenizer).__name__} without a tokenizer.json; "
            "convert it to a fast tokenizer"
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


@dataclass(frozen=True)
class Encoder:
    """What makes tokens of texts, as plain values that another process can use without transformers.

    Attributes:
        state: a tokenizer's backend as JSON, from :func:`backend_tokenizer`.
        template: its chat template, if it has one.
        vocabulary: number of its tokens.
    """

    state: str
    template: ChatTemplate | None
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: Any) -> Encoder:
        """The encoder of a transformers tokenizer with a fast backend."""
        return cls(backend_tokenizer(tokenizer).to_str(), chat_template(tokenizer), len(tokenizer))

    def encode(self, texts: list[Text]) -> list[NDArray[np.int32]]:
        """Tokenise a batch of texts. It takes 200 to 400 bytes of memory per token.

        Returns:
            int32 ``[tokens]`` for each text, without special tokens, whose policy may differ between runs over the same
            shards; ``~id`` for tokens of a chat, or outside spans of loss, that are never
            targets.
        """
        backend = _backend(self.state)
        plain = [text for text in texts if isinstance(text, str)]
        encodings = iter(backend.encode_batch_fast(plain, add_special_tokens=False))

        def encoded(text: Text) -> NDArray[np.int32]:
            if isinstance(text, str):
                return np.array(next(encodings).ids, np.int32)
            if isinstance(text, SpannedText):
                return encode_spans(text.content, text.spans, backend)
            return encode_conversation(text, self.template, backend)

        return [encoded(text) for text in texts]

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer's backend, read once in a process."""
        return _backend(self.state)

    def decode(self, ids: NDArray[np.int32]) -> str:
        """The text of token ids, without special tokens.

        Raises:
            RopewalkError: if the tokenizer does not give back the text that it encodes.
        """
        _refuse_lossy(self.state)
        return _backend(self.state).decode(ids.tolist(), skip_special_tokens=True)

    def encode_documents(
        self, documents: Iterable[Document | TokenisedDocument], batch_documents: int = BATCH_DOCUMENTS
    ) -> Iterator[tuple[Document | TokenisedDocument, NDArray[np.int32]]]:
        """Yield documents in order, each with its ids as :meth:`encode` gives them.

        Args:
            documents: read only as far ahead as one batch. A batch ends with the document that reaches
                ``BATCH_CHARACTERS``; the tokens of tokenised documents count as characters.
            batch_documents: maximum number of documents per batch.

        Raises:
            RopewalkError: as in :func:`check_ids`.
        """
        batch: list[Document | TokenisedDocument] = []
        size = 0
        for document in documents:
            batch.append(document)
            size += len(document.text if isinstance(document, Document) else document.input_ids)
            if len(batch) >= batch_documents or size >= BATCH_CHARACTERS:
                yield from self._encoded(batch)
                batch, size = [], 0
        yield from self._encoded(batch)

    def _encoded(
        self, batch: list[Document | TokenisedDocument]
    ) -> Iterator[tuple[Document | TokenisedDocument, NDArray[np.int32]]]:
        texts = [document for document in batch if isinstance(document, Document)]
        encoded = iter(self.encode([text_of(each) for each in texts]))
        for document in batch:
            if isinstance(document, TokenisedDocument):
                check_ids(document, self.vocabulary)
                yield document, document.input_ids
            else:
                yield document, next(encoded)

    def tokenise(
        self, documents: Iterable[Document | TokenisedDocument], batch_documents: int = BATCH_DOCUMENTS
    ) -> Iterator[TokenisedDocument]:
        """As :func:`tokenise`."""
        for document, ids in self.encode_documents(documents, batch_documents):
            if isinstance(document, TokenisedDocument):
                yield document
                continue
            trained = int((ids >= 0).sum())
            # A document that is trained on whole counts as plain text.
            yield TokenisedDocument(token_ids(ids), document.source, None if trained == len(ids) else trained)


@lru_cache(maxsize=1)
def _refuse_lossy(state: str) -> None:
    backend = _backend(state)
    found = backend.decode(backend.encode(PROBE, add_special_tokens=False).ids, skip_special_tokens=True)
    # Tokenizers in the manner of Llama 2 put a space before the text.
    if found.removeprefix(" ") != PROBE:
        raise RopewalkError(
            f"the tokenizer gives {found!r} back for {PROBE!r}, so token ids do not tell their texts; give "
            "the texts themselves"
        )


# Tasks follow one another in a process, and to read a large vocabulary takes a second.
@lru_cache(maxsize=1)
def _backend(state: str) -> Tokenizer:
    return Tokenizer.from_str(state)


def tokenise(
    documents: Iterable[Document | TokenisedDocument],
    tokenizer: Any,
    batch_documents: int = BATCH_DOCUMENTS,
) -> Iterator[TokenisedDocument]:
    """Tokenise a stream of documents, in order.

    No special tokens are added; packing adds them by the policy in its settings. Text that spells a special token
    (``<s>``) becomes that token, as in transformers.

    Args:
        documents: read only as far ahead as one batch, so memory does not grow with the corpus. Tokenised documents
            pass through unchanged.
        tokenizer: a transformers tokenizer with a fast backend, or the folder or hub name of one.
        batch_documents: maximum number of documents per batch.

    Raises:
        RopewalkError: as in :func:`check_ids`.
    """
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return Encoder.of(tokenizer).tokenise(documents, batch_documents)


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


def backend_tokenizer(tokenizer: Any) -> Tokenizer:
    """A copy of the tokenizer's backend without truncation and padding, which some ``tokenizer.json`` files enable."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend
