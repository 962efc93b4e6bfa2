"""Weave synthetic tasks into documents of a mixture: which ones, where, and how their tokens are read.

A document's tokens stay on disk as they are. What is kept of a task in memory are its own tokens and their places, so
that every machine and every process of a packing run reads the same woven documents.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.data.mixture.synthetic import ASKED, Exam, TaskCounts, WovenCounts, draw_exam
from ropewalk.data.rows.special_tokens import DocumentEnds
from ropewalk.data.settings import PackingSettings
from ropewalk.data.tokens.chat import encode_spans, token_ids
from ropewalk.data.tokens.corpus import Corpus, TokenReader
from ropewalk.data.tokens.tokenise import Encoder, SpecialTokens
from ropewalk.errors import RopewalkError

_SENTENCE_ENDS = (".", "!", "?")
_SPACES = ("Ġ", "▁", " ")
"""How pieces of vocabularies write a space at their beginning."""
_FITTINGS = 5


@dataclass(frozen=True, eq=False)
class WovenDocument:
    """A document with a task.

    Attributes:
        number: the document in the corpus.
        parts: in order, (start, stop) of own tokens of the document, or int32 tokens of the task.
        alone: whether the answer alone counts in the loss, so that own tokens are read as ``~id``.
    """

    number: int
    parts: tuple[tuple[int, int] | NDArray[np.int32], ...]
    alone: bool

    def __len__(self) -> int:
        return sum(_size(part) for part in self.parts)


def _size(part: tuple[int, int] | NDArray[np.int32]) -> int:
    return part[1] - part[0] if isinstance(part, tuple) else len(part)


@dataclass(frozen=True, eq=False)
class WovenReader:
    """Reads the tokens of a corpus, and of woven documents, whose numbers follow those of the corpus.

    Attributes:
        corpus: reads the documents of the corpus.
        documents: number of these.
        woven: the woven documents.
    """

    corpus: TokenReader
    documents: int
    woven: tuple[WovenDocument, ...] = ()

    def read_tokens(self, number: int, first: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with tokens of document ``number``, starting at its token ``first``."""
        if number < self.documents:
            self.corpus.read_tokens(number, first, out)
            return
        document, at = self.woven[number - self.documents], 0
        for part in document.parts:
            size = _size(part)
            start, stop = max(first, at), min(first + len(out), at + size)
            if start < stop:
                piece = out[start - first : stop - first]
                if isinstance(part, tuple):
                    self.corpus.read_tokens(document.number, part[0] + start - at, piece)
                    if document.alone:
                        np.invert(piece, out=piece)
                else:
                    piece[:] = part[start - at : stop - at]
            at += size

    def close(self) -> None:
        """Close the shards' files; later reads open them again."""
        self.corpus.close()


@dataclass(frozen=True, eq=False)
class Weaving:
    """Result of :func:`weave`.

    Attributes:
        reader: reads all documents.
        documents: int64 ``[documents]``, the numbers to pack, in which woven documents have numbers of their own.
        ends: lengths, first and last ids and sources of these.
        counts: what became of the long documents of each source.
        added: tokens of hidden sentences, questions and answers.
        cut: own tokens that truncation left out of woven documents.
    """

    reader: WovenReader
    documents: NDArray[np.int64]
    ends: DocumentEnds
    counts: tuple[WovenCounts, ...]
    added: int
    cut: int


def weave(
    corpus: Corpus,
    documents: NDArray[np.int64],
    encoder: Encoder,
    mixture: MixtureSettings,
    rows: PackingSettings,
    special: SpecialTokens,
    tags: Sequence[NDArray[np.int32]] | None,
) -> Weaving:
    """Weave tasks into some of the long documents of a mixture.

    The seed, a document's text and the number of its reading decide whether it gets a task, and which one, so neither
    the other documents nor the number of processes matter. A woven document fits in one row with its special tokens.
    The text of one that is longer is truncated before the question if ``long_documents`` is ``truncate``, and else
    the document stays as it is.

    Args:
        corpus: all documents.
        documents: int64, numbers of the documents to pack, repeated ones each time.
        encoder: the tokenizer.
        mixture: the mixture.
        rows: length and policies of rows.
        special: the tokenizer's special tokens.
        tags: token ids of each source's tag; None for no tags.

    Raises:
        RopewalkError: if a source is unknown, or the tokenizer does not give back the texts that it encodes.
    """
    shares, least = mixture.synthetic_share or {}, mixture.long_length
    unknown = sorted(set(shares) - set(corpus.sources))
    if unknown:
        raise RopewalkError(
            f"unknown source {unknown[0]!r} in synthetic_share; the sources are {', '.join(corpus.sources)}"
        )
    assert least is not None
    counts = tuple(WovenCounts(source) for source in corpus.sources)
    # A short document must stay one, as those that were chosen by their lengths with BOS, EOS and tag.
    around = int(special.bos is not None) + int(special.eos is not None)
    most = rows.room(special) if rows.documents_up_to is None else rows.documents_up_to - around
    room_for = min(rows.room(special) - int(rows.bos_policy(special) == "document") - rows.eos, most)
    readings: Counter[int] = Counter()
    numbers, lengths = documents.copy(), corpus.lengths[documents]
    last_ids, cut, added = corpus.last_ids[documents], 0, 0
    woven: list[WovenDocument] = []
    for at in np.flatnonzero(lengths >= least).tolist():
        number, source = int(documents[at]), int(corpus.source_ids[documents[at]])
        counts[source].long_documents += 1
        share = shares.get(corpus.sources[source], 0.0)
        draw = random.Random(f"{mixture.seed}/synthetic/{corpus.hashes[number]}/{readings[number]}")
        readings[number] += 1
        if draw.random() >= share:
            continue
        ids = corpus.tokens(number)
        if (ids < 0).any():
            counts[source].masked += 1
            continue
        room = room_for - (0 if tags is None else len(tags[source]))
        # A question stands before the document's end; packing adds EOS again.
        own_eos = int(len(ids) > 0 and ids[-1] == special.eos)
        found = _fitted(
            ids[: len(ids) - own_eos], room, encoder, mixture, draw, rows.long_documents == "truncate"
        )
        if isinstance(found, str):
            setattr(counts[source], found, getattr(counts[source], found) + 1)
            continue
        exam, parts, answer_tokens = found
        if own_eos and not rows.eos:
            parts = (*parts, ids[-1:])
        document = WovenDocument(number, parts, mixture.synthetic_loss == "answers")
        task = counts[source].tasks.setdefault(exam.kind, TaskCounts())
        task.documents += 1
        task.answer_tokens += answer_tokens
        new = sum(len(part) for part in parts if not isinstance(part, tuple))
        added += new
        cut += len(ids) - (len(document) - new)
        numbers[at], lengths[at] = len(corpus) + len(woven), len(document)
        assert not isinstance(parts[-1], tuple)
        last_ids[at] = token_ids(parts[-1])[-1]
        woven.append(document)
    return Weaving(
        WovenReader(corpus.reader, len(corpus), tuple(woven)),
        numbers,
        DocumentEnds(lengths, corpus.first_ids[documents], last_ids, corpus.source_ids[documents]),
        counts,
        added,
        cut,
    )


_Parts = tuple[tuple[int, int] | NDArray[np.int32], ...]


def _fitted(
    ids: NDArray[np.int32],
    room: int,
    encoder: Encoder,
    mixture: MixtureSettings,
    draw: random.Random,
    truncate: bool,
) -> tuple[Exam, _Parts, int] | str:
    """A task in a document, or in its beginning, that fits in ``room`` tokens; otherwise the name of the count why not.

    Returns:
        The task, the parts of the woven document, and the number of tokens of the answer.
    """
    state, kept = draw.getstate(), len(ids)
    for _ in range(_FITTINGS):
        # Each trial draws the same, but for what another end of the text changes.
        draw.setstate(state)
        own = ids[:kept]
        exam = draw_exam(encoder.decode(own), mixture.synthetic_tasks, draw)
        places = _places(own, encoder) if exam is not None and exam.sentences else []
        if exam is None or len(places) < len(exam.sentences):
            return "without_place"
        alone = mixture.synthetic_loss == "answers"
        tail, answer_tokens = _tail(exam, encoder.backend, alone)
        hidden = sorted(draw.sample(places, len(exam.sentences)))
        parts: list[tuple[int, int] | NDArray[np.int32]] = []
        done = 0
        for (place, line), sentence in zip(hidden, exam.sentences, strict=True):
            text = f"{sentence}\n" if line else f" {sentence}"
            tokens = np.array(encoder.backend.encode(text, add_special_tokens=False).ids, np.int32)
            parts += [(done, place), ~tokens if alone else tokens]
            done = place
        parts += [(done, kept), tail]
        over = sum(map(_size, parts)) - room
        if over <= 0:
            return exam, tuple(parts), answer_tokens
        if not truncate:
            return "too_long"
        kept -= over
        if kept <= 0:
            return "too_long"
    return "too_long"


def _tail(exam: Exam, backend: Tokenizer, alone: bool) -> tuple[NDArray[np.int32], int]:
    """Tokens of a question with its answer, and how many of them are the answer's."""
    asked = f"\n\n{ASKED.format(question=exam.question)}"
    text = asked + exam.answer
    tokens = encode_spans(text, [(len(asked), len(text))], backend)
    return (tokens if alone else token_ids(tokens)), int((tokens >= 0).sum())


def _places(ids: NDArray[np.int32], encoder: Encoder) -> list[tuple[int, bool]]:
    """Where sentences may stand: numbers of tokens before them, and whether a line ends there.

    Between lines, or where too few lines end, also between sentences.
    """
    lines, sentences, spaces = _vocabulary(encoder.state)
    known = np.minimum(ids, len(lines) - 1)
    found = [(at + 1, True) for at in np.flatnonzero(lines[known[:-1]]).tolist()]
    if len(found) < len(ids) // 512 + 8:
        ends = np.flatnonzero(sentences[known[:-1]] & spaces[known[1:]])
        found += [(at + 1, False) for at in ends.tolist()]
    return sorted(found)


@lru_cache(maxsize=1)
def _vocabulary(state: str) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """bool ``[vocabulary]``: which tokens end a line, end a sentence, and begin with a space."""
    backend = Tokenizer.from_str(state)
    pieces = [backend.id_to_token(number) or "" for number in range(backend.get_vocab_size())]
    texts = [backend.decode([number], skip_special_tokens=False) for number in range(len(pieces))]
    return (
        np.array([text.endswith("\n") for text in texts]),
        np.array([text.endswith(_SENTENCE_ENDS) for text in texts]),
        np.array([piece.startswith(_SPACES) for piece in pieces]),
    )
