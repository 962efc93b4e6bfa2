"""Needle rows: text in which only what lies far back tells the tokens that count.

The mean loss of long text hardly depends on long context: most tokens are told by their neighbours. Here numbers are
hidden in real text and asked for at its end, and the tokens of the answers alone have labels.

Source: Shang et al., LongRoPE2, arXiv:2502.20082, section 3.3; the words of needles and questions are RULER's.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ropewalk.attention.layout import IGNORED, PackedLayout, Row
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import PromptEncoder
from ropewalk.evaluation.tasks.ruler.niah import draw_word
from ropewalk.evaluation.tasks.ruler.templates import NIAH_SINGLE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.sentences import sentence_ends

NEEDLES = 4
"""In a row: the answers' tokens are as many times more, at the cost of one forward."""
MOST_WORDS = 16
"""Words that are read for a token of a row, at most: some tokenizers join words, none so many."""


def needle_rows(
    tokenizer: Any,
    documents: Sequence[str],
    length: int,
    count: int,
    seed: int,
    beyond: int | None = None,
    needles: int = NEEDLES,
) -> list[Row]:
    """Rows of text with numbers hidden in it, of which only the answers at the end are scored.

    The places of all needles of all rows are spread evenly, from the beginning of the text to where the answer is just
    ``beyond`` tokens away: after the sentence, or else the word, that ends there. Words are one space apart. Keys,
    numbers and text are the same at every length.

    Args:
        tokenizer: the model's own, with a ``tokenizers`` backend.
        documents: text, joined; each row begins at another place of it, and it begins again where it ends.
        length: tokens of a row, exactly, BOS included where the tokenizer has one.
        count: rows.
        seed: of keys and numbers.
        beyond: tokens between the position that says the first token of an answer and the last token of its number
            in the text, at least: the trained length, so that no answer is within reach of what the model was
            trained for; half of ``length`` if None.
        needles: in each row.

    Returns:
        Rows of pattern ``full``.

    Raises:
        RopewalkError: if there is no text, a number is out of range, ``length`` is too short (the message gives one
            that suffices), or the word lists or the tokenizer cannot give such text.
    """
    if beyond is None:
        beyond = length // 2
    for name, value, least in (("rows", count, 1), ("needles", needles, 1), ("tokens beyond", beyond, 0)):
        if value < least:
            raise RopewalkError(f"needle rows need {least} or more {name}, got {value}")
    words = [word for document in documents for word in document.split()]
    if not words:
        raise RopewalkError(f"needles need text to be hidden in, and {len(documents)} documents have no word")
    encoder = PromptEncoder(tokenizer)
    encoder.check_alphabet()
    places = count * needles
    texts = [
        _Text.of(encoder, words, len(words) * index // count, length, _riddle(seed, index, needles))
        for index in range(count)
    ]
    slack = min(text.row([0.0] * needles, 0, length).slack(beyond) for text in texts)
    if slack < 0:
        raise RopewalkError(
            f"{needles} needles {beyond} tokens before their answers do not fit in {length} tokens; the shortest "
            f"length with this tokenizer is {length - slack}, or hide fewer needles"
        )
    rows = []
    for index, text in enumerate(texts):
        shares = [(index + number * count) / max(places - 1, 1) for number in range(needles)]
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
        # What is cut must be text behind all needles, and their full stops.
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
        raise RopewalkError(f"{size // 2} words of the text have no {length} tokens with this tokenizer")

    def placed(self, shares: Sequence[float], length: int, beyond: int) -> Row:
        """The row with its needles at such shares of the places that are far enough back."""
        reach = self.row([0.0] * len(shares), 0, length).slack(beyond)
        # Tokens of text with needles in it are not quite the sum of both: step back by what is missing.
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
