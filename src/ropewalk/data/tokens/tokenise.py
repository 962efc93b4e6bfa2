"""Tokenise documents, in order and in bounded memory, without special tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
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
)

Progress = Callable[[int, int], None]
"""Called again and again with the numbers of documents and tokens so far."""

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
"""What is encoded: a text, or a conversation that is rendered first."""


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The tokens of a batch of texts.

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

    def encode(self, texts: list[Text]) -> EncodedTexts:
        """Tokenise a batch of texts. It takes 200 to 400 bytes of memory per token."""
        return _encode(_backend(self.state), texts, self.template)

    def tokenise(
        self, documents: Iterable[Document | TokenisedDocument], batch_documents: int = BATCH_DOCUMENTS
    ) -> Iterator[TokenisedDocument]:
        """As :func:`tokenise`."""
        items = ((document, (document,)) for document in documents)
        for texts, entries in in_batches(items, batch_documents):
            encoded = iter(self.encode(texts).documents())
            for entry in entries:
                if isinstance(entry, TokenisedDocument):
                    check_ids(entry, self.vocabulary)
                    yield entry
                    continue
                stored = next(encoded)
                trained = int((stored >= 0).sum())
                # A chat that is trained on whole counts as plain text.
                yield TokenisedDocument(
                    token_ids(stored), entry.source, None if trained == len(stored) else trained
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


def in_batches(
    items: Iterable[tuple[Carried, Iterable[Document | TokenisedDocument]]],
    most: int = BATCH_DOCUMENTS,
) -> Iterator[tuple[list[Text], list[Carried]]]:
    """Group items into batches for :meth:`Encoder.encode`; one ends with the item that reaches ``BATCH_CHARACTERS``.

    Args:
        items: pairs of a value and its documents. Tokenised documents are not among the texts of a batch, but their
            tokens count as characters.
        most: maximum number of items per batch.

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
        if len(carried) >= most or size >= BATCH_CHARACTERS:
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
