"""Needle rows: numbers hidden in real text and asked for at its end; only the tokens of the answers have labels.

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
from ropewalk.evaluation.tasks.haystack_sources import sentence_ends
from ropewalk.evaluation.tasks.ruler.niah import draw_word
from ropewalk.evaluation.tasks.ruler.templates import NIAH_SINGLE, needle_line, niah_prompt

NEEDLES = 4
"""Default needles per row: one forward then scores the tokens of several answers."""
MOST_WORDS = 16
"""Maximum number of words read per token of a row: some tokenizers join words, but never so many."""


@dataclass(frozen=True)
class Needles:
    """Needles of a row.

    Attributes:
        beyond: minimum distance in tokens from the last token of a number in the text to the position that predicts
            the first token of its answer. With the trained length, no answer lies within the distances that the model
            was trained for. None means half of the row.
        count: number of needles per row.
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
    """Rows of text with hidden numbers, in which only the tokens of the answers at the end are scored.

    The depths of all needles of all rows are spread evenly, from the beginning of the text to the last place that is
    ``needles.beyond`` tokens before its answer. A needle follows the end of a sentence, or of a word if no sentence
    ends nearby. Words are separated by one space. Keys, numbers and text are the same at every length.

    Args:
        tokenizer: tokenizer of the model, with a ``tokenizers`` backend.
        documents: text, which is joined and repeated as needed; each row starts at another place.
        length: exact number of tokens per row, including BOS if the tokenizer has one.
        count: number of rows.
        seed: random seed of keys and numbers.
        needles: number of needles per row and their minimum distance.

    Returns:
        Rows with the pattern ``full``.

    Raises:
        RopewalkError: if there is no text, a number is out of range, ``length`` is too short (the message gives one
            that suffices), or the tokenizer cannot encode the text.
    """
    hidden, beyond = needles.count, length // 2 if needles.beyond is None else needles.beyond
    for name, value, least in (
        ("rows with needles", count, 1),
        ("needles in a row", hidden, 1),
        ("tokens between a needle and its answer", beyond, 0),
    ):
        if value < least:
            raise RopewalkError(f"the number of {name} must be {least} or more, got {value}")
    words = [word for document in documents for word in document.split()]
    if not words:
        raise RopewalkError(
            f"needles are hidden between words, but the {len(documents)} documents contain no word; give more text"
        )
    encoder = PromptEncoder(tokenizer)
    encoder.check_alphabet()
    places = count * hidden
    texts = [
        _Text.of(encoder, words, len(words) * index // count, length, _draw_hidden(seed, index, hidden))
        for index in range(count)
    ]
    # The most room is left with all needles at the start; if even that does not fit, no placement does.
    slack = min(text.row([0.0] * hidden, 0, length).slack(beyond) for text in texts)
    if slack < 0:
        raise RopewalkError(
            f"a row of {length} tokens is too short for {hidden} needles, each at least {beyond} tokens before its "
            f"answer; use {length - slack} tokens or more with this tokenizer, or hide fewer needles"
        )
    rows = []
    for index, text in enumerate(texts):
        # Over all rows, needles lie evenly from the beginning to the end; each row gets every count-th place.
        shares = [(index + number * count) / max(places - 1, 1) for number in range(hidden)]
        rows.append(text.placed(shares, length, beyond))
    return rows


@dataclass(frozen=True)
class _Hidden:
    """Keys and numbers of a row in the order of the text, and the order of the questions."""

    keys: tuple[str, ...]
    values: tuple[str, ...]
    asked: tuple[int, ...]


def _draw_hidden(seed: int, index: int, needles: int) -> _Hidden:
    # One generator per row, so that a row's needles depend neither on the number of rows nor on their length.
    draw = random.Random(f"{seed}/needle rows/{index}")
    found: dict[str, str] = {}
    # A dict, because two needles with the same key would have two right answers.
    while len(found) < needles:
        found[draw_word("words", draw)] = draw_word("numbers", draw)
    return _Hidden(tuple(found), tuple(found.values()), tuple(draw.sample(range(needles), needles)))


@dataclass(frozen=True)
class _Draft:
    """A row before it is cut to its length; all places are token indices.

    Attributes:
        ids: all tokens, starting with BOS if there is one.
        hidden: last token of each number in the text.
        answers: first and last token of each answer, in the same order.
        end: first token after the text.
        surplus: number of tokens to remove before ``end``.
    """

    ids: list[int]
    hidden: list[int]
    answers: list[tuple[int, int]]
    end: int
    surplus: int

    def slack(self, beyond: int) -> int:
        """Tokens by which all needles could move later; negative if a needle is too close to its answer."""
        gaps = [
            # The position before an answer predicts its first token.
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
            # Labels are shifted: each position has the next token as its target.
            labels[at.start - 1 : at.stop - 1] = ids[at]
        return Row(ids, labels, PackedLayout.from_lengths([len(ids)], "full", anchor_length=0))


@dataclass(frozen=True)
class _Text:
    """Text of a row before needles are inserted.

    Attributes:
        words: enough words for a row.
        tokens: number of tokens up to the end of each word.
        sentences: number of words up to the end of each sentence.
        needles: keys and numbers to insert.
    """

    encoder: PromptEncoder
    words: list[str]
    tokens: list[int]
    sentences: list[int]
    needles: _Hidden

    @classmethod
    def of(
        cls, encoder: PromptEncoder, pool: Sequence[str], start: int, length: int, needles: _Hidden
    ) -> _Text:
        size = length
        while size <= MOST_WORDS * length:
            # The text is repeated from its beginning if it is too short.
            words = [pool[(start + at) % len(pool)] for at in range(size)]
            ends = _ends(encoder, " ".join(words))
            if len(ends) >= length:
                chars = accumulate(len(word) + 1 for word in words)
                tokens = [bisect_right(ends, char - 1) for char in chars]
                return cls(encoder, words, tokens, sentence_ends(words), needles)
            # Tokens per word depend on the tokenizer, so the number of words is found by doubling.
            size *= 2
        raise RopewalkError(
            f"{size // 2} words of the text give fewer than {length} tokens with this tokenizer; give other text"
        )

    def placed(self, shares: Sequence[float], length: int, beyond: int) -> Row:
        """The row with its needles at these fractions of the text before the last allowed place."""
        reach = self.row([0.0] * len(shares), 0, length).slack(beyond)
        # Needles change the tokenisation of the text around them; move them back until the distance suffices.
        while (draft := self.row(shares, reach, length)).slack(beyond) < 0:
            reach += draft.slack(beyond)
        return draft.cut()

    def row(self, shares: Sequence[float], reach: int, length: int) -> _Draft:
        """Insert needles at ascending fractions of the first ``reach`` tokens."""
        needles = self.needles
        lines = [needle_line("numbers", *each) for each in zip(needles.keys, needles.values, strict=True)]
        # At most half the distance between two needles, so that none moves past another.
        step = reach * (shares[1] - shares[0]) / 2 if len(shares) > 1 else reach / 2
        at = [self._place(round(share * reach), step) for share in shares]
        parts: list[str] = []
        # The last stretch of text has no needle behind it.
        for start, stop, line in zip([0, *at], [*at, len(self.words)], [*lines, None], strict=True):
            parts += [*self.words[start:stop], *([line] if line else [])]
        context = " ".join(parts)
        text, _ = niah_prompt("numbers", needles.keys, 1, context)
        behind = text.index(context) + len(context)
        spans = {}
        for number in needles.asked:
            text += NIAH_SINGLE.prefix(type="number", query=needles.keys[number]) + " "
            spans[number] = (len(text), len(text) + len(needles.values[number]))
            text += needles.values[number] + "."
        # Nothing stands behind the last answer, so that the row ends with the last scored token.
        text = text.removesuffix(".")
        encoded = self.encoder.backend().encode(text, add_special_tokens=False)
        bos = self.encoder.tokenizer.bos_token_id
        head = [] if bos is None else [bos]
        # BOS takes no characters of the text.
        ends = [0] * len(head) + [end for _, end in encoded.offsets]
        ids = [*head, *encoded.ids]
        # Without the full stop of the line, so that this is the token at the end of the number.
        hidden = [bisect_left(ends, text.index(line) + len(line) - 1) for line in lines]
        # The first token that ends behind a span's beginning, and the first that reaches its end.
        answers = [
            (bisect_right(ends, spans[number][0]), bisect_left(ends, spans[number][1]))
            for number in range(len(lines))
        ]
        return _Draft(ids, hidden, answers, bisect_right(ends, behind), len(ids) - length)

    def _place(self, tokens: int, step: float) -> int:
        """Word index of the last sentence end within ``step`` tokens before ``tokens``, else of the last word end."""
        word = bisect_right(self.tokens, tokens)
        known = bisect_right(self.sentences, word)
        sentence = self.sentences[known - 1] if known else 0
        passed = self.tokens[sentence - 1] if sentence else 0
        return sentence if tokens - passed <= step else word


def _ends(encoder: PromptEncoder, text: str) -> list[int]:
    """End of each token in characters of the text."""
    return [end for _, end in encoder.backend().encode(text, add_special_tokens=False).offsets]
