"""Samples of tokenised sources: whether the tokenizer makes the same ids of the text that it decodes them to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.read.input_splits import first_tokenised, spread, token_files
from ropewalk.data.read.token_files import TokenFile, open_token_file
from ropewalk.data.settings import SourceSpec
from ropewalk.data.tokens.special_ids import special_ids
from ropewalk.data.tokens.tokenise import backend_tokenizer, check_ids
from ropewalk.errors import RopewalkError

FILES, DOCUMENTS, LOOKED_AT = 3, 3, 64
"""Files of a source and documents of a file that are sampled: the longest of those looked at, because a short document
proves little."""

RECORDS = 16
"""First records that are looked at in a file without an index of its documents (Parquet, Arrow, JSON Lines)."""

MOST_TOKENS = 8192
"""Tokens at the beginning of a sampled document that are compared."""

Comparison = Literal["same", "different", "lossy"]
"""Whether the tokenizer reproduces the ids; ``lossy`` if it does not even reproduce the text, which proves nothing."""


@dataclass(frozen=True)
class TokenSample:
    """A sampled document.

    Attributes:
        origin: file and number of the document or the record.
        tokens: number of its tokens, without a named separator.
        text: its beginning, decoded.
        comparison: of its ids with those of the decoded text.
        stated_tokenizer: name of the tokenizer in the file's metadata; None without one.
    """

    origin: str
    tokens: int
    text: str
    comparison: Comparison
    stated_tokenizer: str | None


def sample_tokens(specs: Sequence[SourceSpec], tokenizer: Any) -> list[TokenSample]:
    """Decode a few documents of each tokenised source and tokenise the texts again.

    The middle halves are compared, because a document that was cut at any token begins or ends differently. A corpus
    may contain documents that were tokenised piece by piece, so a source is refused only if more samples differ
    than not.

    Args:
        specs: sources of documents; texts give no sample, nor do datasets on the Hub, which would have to be opened.
        tokenizer: a transformers tokenizer with a fast backend.

    Raises:
        RopewalkError: if an id is outside the vocabulary, if the tokenizer makes other ids of most texts, or for a file
            that cannot be opened.
    """
    return [sample for spec in specs for sample in _samples(spec, tokenizer)]


def _samples(spec: SourceSpec, tokenizer: Any) -> list[TokenSample]:
    found = [
        _sample(document, stated, tokenizer)
        for documents in (_of_token_files(spec), _of_records(spec))
        for document, stated in documents
    ]
    compared = Counter(sample.comparison for sample, _ in found)
    if compared["different"] > compared["same"]:
        difference = next(text for sample, text in found if sample.comparison == "different")
        stated = next(
            (
                f" ({s.stated_tokenizer!r} according to the file's metadata)"
                for s, _ in found
                if s.stated_tokenizer
            ),
            "",
        )
        raise RopewalkError(
            f"{difference} ({compared['different']} of {len(found)} sampled documents of {spec.path} differ); give "
            f"the tokenizer that produced the ids{stated}"
        )
    return [sample for sample, _ in found]


def _of_token_files(spec: SourceSpec) -> Iterator[tuple[TokenisedDocument, str | None]]:
    """Documents with the tokenizer's name in the metadata of their file."""
    paths = token_files(spec)
    for index in spread(len(paths), FILES):
        file = open_token_file(paths[index], spec)
        for number in _longest(file):
            document = TokenisedDocument(
                file.document(number), spec.name or file.path.stem, origin=file.origin(number)
            )
            yield document, file.tokenizer


def _of_records(spec: SourceSpec) -> Iterator[tuple[TokenisedDocument, None]]:
    for documents in first_tokenised(spec, FILES, RECORDS):
        longest = sorted(range(len(documents)), key=lambda number: -len(documents[number].input_ids))[
            :DOCUMENTS
        ]
        yield from ((documents[number], None) for number in sorted(longest))


def _longest(file: TokenFile) -> list[int]:
    lengths = np.diff(file.ends, prepend=0)
    looked_at = [number for number in spread(len(file), LOOKED_AT) if lengths[number]]
    return sorted(sorted(looked_at, key=lambda number: -lengths[number])[:DOCUMENTS])


def _sample(document: TokenisedDocument, stated: str | None, tokenizer: Any) -> tuple[TokenSample, str]:
    """A sample, and the difference in words."""
    ids, origin = document.input_ids, document.origin
    check_ids(document, len(tokenizer))
    special = special_ids(tokenizer)
    own = ids[:MOST_TOKENS]
    # Decoders treat special tokens differently, and packing decides about these two anyway.
    own = own[int(len(own) > 0 and own[0] == special.bos) :]
    own = own[: len(own) - int(len(own) > 0 and own[-1] == special.eos)]
    backend = backend_tokenizer(tokenizer)
    text = _decoded(tokenizer, own)
    again = np.array(backend.encode(text, add_special_tokens=False).ids, np.int32)
    middle = own[len(own) // 4 : len(own) - len(own) // 4]
    comparison: Comparison = "same" if len(own) else "lossy"
    if not _contains(again, middle):
        comparison = "different" if _decoded(tokenizer, again) == text else "lossy"
    differs = np.flatnonzero(own[: len(again)] != again[: len(own)])
    at = int(differs[0]) if len(differs) else min(len(own), len(again))
    given = f"tokenizer {tokenizer.name_or_path}" if tokenizer.name_or_path else "given tokenizer"
    words = (
        f"{origin}: at token {at}, the document has {_at(own, at)}, but the {given} "
        f"gives {_at(again, at)} for the same text"
    )
    return TokenSample(origin, len(ids), text[:200], comparison, stated), words


def _decoded(tokenizer: Any, ids: NDArray[np.int32]) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _contains(ids: NDArray[np.int32], part: NDArray[np.int32]) -> bool:
    """Whether consecutive ids equal those of ``part``."""
    whole, searched, size = ids.tobytes(), part.tobytes(), ids.itemsize
    at = whole.find(searched)
    # A match of bytes may begin inside an id.
    while at > 0 and at % size:
        at = whole.find(searched, at + 1)
    return at >= 0


def _at(ids: NDArray[np.int32], index: int) -> str:
    return f"id {ids[index]}" if index < len(ids) else "no id"


def name_differs(stated: str | None, tokenizer: str) -> bool:
    """Whether a file states another tokenizer's name; folders and owners do not count, because copies have others."""
    return stated is not None and Path(stated).name.lower() != Path(tokenizer).name.lower()
