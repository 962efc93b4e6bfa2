"""Data of a search: rows of text, held-out rows, and needle rows in which only the answers are scored.

The mean loss of long text hardly depends on distant context: nearby tokens suffice to predict most tokens. Needle rows
hide numbers in real text and ask for them at its end; only the tokens of the answers have labels.

Source of needle rows: Shang et al., LongRoPE2, arXiv:2502.20082, section 3.3; the words of needles and questions are
RULER's.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.data import SourceSpec, read_documents
from ropewalk.data.tokens.tokenise import tokenise
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import EvaluationRows, PromptEncoder, evaluation_rows
from ropewalk.evaluation.rows import Ids, take_documents
from ropewalk.evaluation.tasks.haystack_sources import sentence_ends
from ropewalk.evaluation.tasks.ruler.niah import draw_word
from ropewalk.evaluation.tasks.ruler.templates import NIAH_SINGLE, needle_line, niah_prompt
from ropewalk.io.digests import digest
from ropewalk.search.goal import Goal
from ropewalk.search.settings import SearchSettings


def search_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, count: int, held_out: int
) -> tuple[EvaluationRows, EvaluationRows | None]:
    """Rows to search on, and rows of other documents to judge the result by.

    Args:
        documents: int ``[tokens]`` each, without special tokens.
        length: tokens of a row.
        bos_id, eos_id: as for :func:`~ropewalk.evaluation.evaluation_rows`.
        count: rows to search on, exactly; the same whatever ``held_out`` is.
        held_out: rows to judge by, at most; 0 for none.

    Returns:
        The two; the second is None where none are wanted, or the text is used up. No document is in both.

    Raises:
        RopewalkError: if the text does not fill ``count`` rows.
    """
    fill = length - (bos_id is not None)
    long = [number for number, document in enumerate(documents) if len(document) >= fill]
    if len(long) >= count:
        chosen = set(long[:count])
        first = [documents[number] for number in long[:count]]
        rest = [document for number, document in enumerate(documents) if number not in chosen]
    else:
        # Joined documents: the first that fill the rows, every piece of which begins with a BOS of its own.
        sums = list(accumulate(len(document) + 2 for document in documents))
        end = next((number for number, total in enumerate(sums, start=1) if total >= count * length), None)
        end = _that_fill(documents, end or len(documents), length, bos_id, eos_id, count)
        first, rest = list(documents[:end]), list(documents[end:])
    rows = evaluation_rows(first, length, bos_id, eos_id, count)
    if len(rows.rows) < count:
        raise RopewalkError(
            f"the text fills {len(rows.rows)} rows of {length} tokens, but the search needs {count}; give more text, a "
            "shorter length or fewer documents"
        )
    if not held_out:
        return rows, None
    try:
        return rows, evaluation_rows(rest, length, bos_id, eos_id, held_out)
    except RopewalkError:
        # The remaining text does not fill a row; held-out rows are optional.
        return rows, None


def rows_digest(rows: Sequence[Row]) -> str:
    """sha256 of the tokens and labels of rows: what a search was measured on."""
    return digest([[row.input_ids.tolist(), row.labels.tolist()] for row in rows])


def _that_fill(
    documents: Sequence[Ids], start: int, length: int, bos_id: int | None, eos_id: int | None, count: int
) -> int:
    """The fewest first documents, at least ``start``, that fill so many rows; all of them if they do not."""
    for end in range(start, len(documents)):
        try:
            if len(evaluation_rows(documents[:end], length, bos_id, eos_id, count).rows) == count:
                return end
        except RopewalkError:
            continue
    return len(documents)


NEEDLES = 4
"""In a row: the answers' tokens are as many times more, at the cost of one forward."""
MOST_WORDS = 16
"""Words that are read for a token of a row, at most: some tokenizers join words, none so many."""


@dataclass(frozen=True)
class Needles:
    """What a row hides.

    Attributes:
        beyond: tokens between the position that says the first token of an answer and the last token of its number
            in the text, at least: the trained length, so that no answer is within reach of what the model was
            trained for; half of the row if None.
        count: numbers that are hidden in it.
    """

    beyond: int | None = None
    count: int = NEEDLES


FOUR_NEEDLES = Needles()


def needle_rows(
    tokenizer: Any,
    documents: Sequence[str],
    length: int,
    count: int,
    seed: int,
    needles: Needles = FOUR_NEEDLES,
) -> list[Row]:
    """Rows of text with numbers hidden in it, of which only the answers at the end are scored.

    The places of all needles of all rows are spread evenly, from the beginning of the text to where the answer is just
    ``needles.beyond`` tokens away: after the sentence, or else the word, that ends there. Words are one space apart.
    Keys, numbers and text are the same at every length.

    Args:
        tokenizer: the model's own, with a ``tokenizers`` backend.
        documents: text, joined; each row begins at another place of it, and it begins again where it ends.
        length: tokens of a row, exactly, BOS included where the tokenizer has one.
        count: rows.
        seed: of keys and numbers.
        needles: how many each row hides, and how far back.

    Returns:
        Rows of pattern ``full``.

    Raises:
        RopewalkError: if there is no text, a number is out of range, ``length`` is too short (the message gives one
            that suffices), or the word lists or the tokenizer cannot give such text.
    """
    hidden, beyond = needles.count, length // 2 if needles.beyond is None else needles.beyond
    for name, value, least in (("rows", count, 1), ("needles", hidden, 1), ("tokens beyond", beyond, 0)):
        if value < least:
            raise RopewalkError(f"needle rows require {least} or more {name}, got {value}")
    words = [word for document in documents for word in document.split()]
    if not words:
        raise RopewalkError(
            f"needles must be hidden in text, but the {len(documents)} documents contain no word; give more text"
        )
    encoder = PromptEncoder(tokenizer)
    encoder.check_alphabet()
    places = count * hidden
    texts = [
        _Text.of(encoder, words, len(words) * index // count, length, _riddle(seed, index, hidden))
        for index in range(count)
    ]
    slack = min(text.row([0.0] * hidden, 0, length).slack(beyond) for text in texts)
    if slack < 0:
        raise RopewalkError(
            f"{hidden} needles at least {beyond} tokens before their answers do not fit in {length} tokens; use "
            f"{length - slack} tokens or more with this tokenizer, or hide fewer needles"
        )
    rows = []
    for index, text in enumerate(texts):
        shares = [(index + number * count) / max(places - 1, 1) for number in range(hidden)]
        rows.append(text.placed(shares, length, beyond))
    return rows


@dataclass(frozen=True)
class _Riddle:
    """Keys and numbers in the order they are hidden in, and the order that they are asked for in."""

    keys: tuple[str, ...]
    values: tuple[str, ...]
    asked: tuple[int, ...]


def _riddle(seed: int, index: int, needles: int) -> _Riddle:
    draw = random.Random(f"{seed}/needle rows/{index}")
    found: dict[str, str] = {}
    while len(found) < needles:
        found[draw_word("words", draw)] = draw_word("numbers", draw)
    return _Riddle(tuple(found), tuple(found.values()), tuple(draw.sample(range(needles), needles)))


@dataclass(frozen=True)
class _Draft:
    """A row of a length that is about to be cut to it; places are indices of its tokens.

    Attributes:
        ids: all tokens, BOS first.
        hidden: the last token of each number in the text.
        answers: first and last token of each answer, in the same order.
        end: the first token behind the text.
        surplus: tokens before ``end`` that are too many.
    """

    ids: list[int]
    hidden: list[int]
    answers: list[tuple[int, int]]
    end: int
    surplus: int

    def slack(self, beyond: int) -> int:
        """Tokens by which the needles could stand later; negative if something is too near."""
        gaps = [
            first - self.surplus - 1 - last
            for (first, _), last in zip(self.answers, self.hidden, strict=True)
        ]
        # Surplus tokens are cut from the text after the last needle and its full stop.
        return min(min(gaps) - beyond, self.end - self.surplus - max(self.hidden) - 2)

    def cut(self) -> Row:
        ids = torch.tensor(self.ids[: self.end - self.surplus] + self.ids[self.end :])
        labels = torch.full_like(ids, IGNORED)
        for first, last in self.answers:
            at = slice(first - self.surplus, last - self.surplus + 1)
            labels[at.start - 1 : at.stop - 1] = ids[at]
        return Row(ids, labels, PackedLayout.from_lengths([len(ids)], "full", anchor_length=0))


@dataclass(frozen=True)
class _Text:
    """The text of a row before needles are hidden in it.

    Attributes:
        words: as many as have a row's tokens.
        tokens: of the text up to each word's end.
        sentences: words up to each sentence's end.
    """

    encoder: PromptEncoder
    words: list[str]
    tokens: list[int]
    sentences: list[int]
    riddle: _Riddle

    @classmethod
    def of(
        cls, encoder: PromptEncoder, pool: Sequence[str], start: int, length: int, riddle: _Riddle
    ) -> _Text:
        size = length
        while size <= MOST_WORDS * length:
            words = [pool[(start + at) % len(pool)] for at in range(size)]
            ends = _ends(encoder, " ".join(words))
            if len(ends) >= length:
                chars = accumulate(len(word) + 1 for word in words)
                tokens = [bisect_right(ends, char - 1) for char in chars]
                return cls(encoder, words, tokens, sentence_ends(words), riddle)
            size *= 2
        raise RopewalkError(
            f"{size // 2} words of the text give fewer than {length} tokens with this tokenizer; give other text"
        )

    def placed(self, shares: Sequence[float], length: int, beyond: int) -> Row:
        """The row with its needles at such shares of the places that are far enough back."""
        reach = self.row([0.0] * len(shares), 0, length).slack(beyond)
        # Needles change the tokenisation of the text around them; move them back until the distance suffices.
        while (draft := self.row(shares, reach, length)).slack(beyond) < 0:
            reach += draft.slack(beyond)
        return draft.cut()

    def row(self, shares: Sequence[float], reach: int, length: int) -> _Draft:
        """Needles at shares, ascending, of the first ``reach`` tokens."""
        riddle = self.riddle
        lines = [needle_line("numbers", *each) for each in zip(riddle.keys, riddle.values, strict=True)]
        step = reach * (shares[1] - shares[0]) / 2 if len(shares) > 1 else reach / 2
        at = [self._place(round(share * reach), step) for share in shares]
        parts: list[str] = []
        for start, stop, line in zip([0, *at], [*at, len(self.words)], [*lines, None], strict=True):
            parts += [*self.words[start:stop], *([line] if line else [])]
        context = " ".join(parts)
        text, _ = niah_prompt("numbers", riddle.keys, 1, context)
        behind = text.index(context) + len(context)
        spans = {}
        for number in riddle.asked:
            text += NIAH_SINGLE.prefix(type="number", query=riddle.keys[number]) + " "
            spans[number] = (len(text), len(text) + len(riddle.values[number]))
            text += riddle.values[number] + "."
        text = text.removesuffix(".")
        encoded = self.encoder.backend().encode(text, add_special_tokens=False)
        bos = self.encoder.tokenizer.bos_token_id
        head = [] if bos is None else [bos]
        ends = [0] * len(head) + [end for _, end in encoded.offsets]
        ids = [*head, *encoded.ids]
        hidden = [bisect_left(ends, text.index(line) + len(line) - 1) for line in lines]
        # The first token that ends behind a span's beginning, and the first that reaches its end.
        answers = [
            (bisect_right(ends, spans[number][0]), bisect_left(ends, spans[number][1]))
            for number in range(len(lines))
        ]
        return _Draft(ids, hidden, answers, bisect_right(ends, behind), len(ids) - length)

    def _place(self, tokens: int, step: float) -> int:
        """The last word's end within so many tokens, or the sentence's if one lies within a step before."""
        word = bisect_right(self.tokens, tokens)
        known = bisect_right(self.sentences, word)
        sentence = self.sentences[known - 1] if known else 0
        passed = self.tokens[sentence - 1] if sentence else 0
        return sentence if tokens - passed <= step else word


def _ends(encoder: PromptEncoder, text: str) -> list[int]:
    """Where each token of a text ends, in characters."""
    return [end for _, end in encoder.backend().encode(text, add_special_tokens=False).offsets]


CHARACTERS = 32
"""Read for a token that needle rows of both kinds hold: more than enough of any language."""
SEARCH_SEED, HELD_OUT_SEED = 0, 1
"""Of the needles; not that of the search: searches of several seeds have the same documents."""


@dataclass(frozen=True, eq=False)
class SearchData:
    """What a search measures on.

    Attributes:
        rows: that candidates are measured on, of the target length.
        held_out: rows of other documents that the result is judged by; empty where none are wanted or the text is used
            up.
        short_rows: of the length that the model is trained for; empty without a short penalty.
        source: what they are made of, for people.
        joined: whether a row is several documents, since too few fill one alone.
    """

    rows: Sequence[Row]
    held_out: Sequence[Row] = ()
    short_rows: Sequence[Row] = ()
    source: str = ""
    joined: bool = False

    @property
    def measured(self) -> list[Row]:
        """All rows that a candidate is measured on."""
        return [*self.rows, *self.short_rows]

    @cached_property
    def sha256(self) -> str:
        """Of the rows that candidates are measured on."""
        return rows_digest(self.measured)

    @cached_property
    def held_out_sha256(self) -> str:
        """Of the rows that the result is judged by."""
        return rows_digest(self.held_out)


def search_data(source: str, tokenizer: Any, goal: Goal, settings: SearchSettings) -> SearchData:
    """Read text and make the rows of a search of it.

    Args:
        source: of the text, as for ``ropewalk data pack``.
        tokenizer: the model's.
        goal: what is searched for: rows are as long as its target; needles of longer rows stand back at least as far
            as the model is trained for.
        settings: objective, how many rows, and whether short ones are wanted: beginnings of the others.

    Raises:
        RopewalkError: if the text does not fill the rows.
    """
    length, trained = goal.target_length, goal.trained_length
    make = _needles if settings.objective == "needle" else _documents
    rows, held_out, joined = make(source, tokenizer, goal, settings.documents, settings.held_out)
    short = [beginning(row, min(trained, length)) for row in rows] if settings.short_penalty else []
    return SearchData(rows, held_out, short, source, joined)


def beginning(row: Row, length: int) -> Row:
    """The first ``length`` tokens of a row, with the targets of all of them."""
    ids = row.input_ids[:length].clone()
    counts: list[int] = torch.unique_consecutive(row.layout.document_ids[:length], return_counts=True)[
        1
    ].tolist()
    layout = PackedLayout.from_lengths(counts, pattern="full", anchor_length=0)
    return Row(ids, next_token_labels(ids, layout), layout)


def _documents(
    text: str, tokenizer: Any, goal: Goal, count: int, held_out: int
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    length = goal.target_length
    stream = tokenise(read_documents([SourceSpec(path=text)]), tokenizer)
    documents = take_documents((document.input_ids for document in stream), length, count + held_out)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows, judged = search_rows(documents, length, bos, eos if bos is None else None, count, held_out)
    return rows.rows, judged.rows if judged else [], rows.kind == "packed"


def _needles(
    text: str, tokenizer: Any, goal: Goal, count: int, held_out: int
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    length = goal.target_length
    needles = Needles(goal.trained_length if goal.trained_length < length else None)
    wanted = CHARACTERS * length * (count + held_out)
    texts: list[str] = []
    characters = 0
    for document in read_documents([SourceSpec(path=text)]):
        texts.append(document.text)
        characters += len(document.text)
        if characters >= wanted and len(texts) > 1:
            break
    if not texts:
        raise RopewalkError(f"{text} contains no document to hide needles in; give another text")
    # Alternate documents between search and held-out rows, if there are at least two.
    own, other = (texts[::2], texts[1::2]) if held_out else (texts, [])
    rows = needle_rows(tokenizer, own, length, count, SEARCH_SEED, needles)
    judged = needle_rows(tokenizer, other, length, held_out, HELD_OUT_SEED, needles) if other else []
    return rows, judged, False
