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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.data import SourceSpec
from ropewalk.data.read.draw import draw_documents
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import EvaluationRows, PromptEncoder, evaluation_rows
from ropewalk.evaluation.rows import Ids, documents_of
from ropewalk.evaluation.tasks.haystack_sources import sentence_ends
from ropewalk.evaluation.tasks.ruler.niah import draw_word
from ropewalk.evaluation.tasks.ruler.templates import NIAH_SINGLE, needle_line, niah_prompt
from ropewalk.io.digests import digest
from ropewalk.search.goal import Goal
from ropewalk.search.settings import SearchSettings


def search_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, count: int, held_out: int
) -> tuple[EvaluationRows, EvaluationRows | None]:
    """Rows to search on, and rows of other documents to evaluate the result on.

    Args:
        documents: token ids of each document, int ``[tokens]``, without special tokens.
        length: tokens per row.
        bos_id, eos_id: special tokens, see :func:`~ropewalk.evaluation.evaluation_rows`.
        count: exact number of rows to search on; they do not depend on ``held_out``.
        held_out: maximum number of held-out rows; 0 for none.

    Returns:
        Search rows and held-out rows, which share no document; ``documents`` of the search rows are indices of those
        given. Held-out rows are None if none were requested or the text is used up.

    Raises:
        RopewalkError: if the text does not fill ``count`` rows.
    """
    fill = length - (bos_id is not None)
    long = [number for number, document in enumerate(documents) if len(document) >= fill]
    if len(long) >= count:
        # A row of one long document needs its distant tokens to predict; joined short documents reward no long range.
        chosen = long[:count]
    else:
        # Too few documents fill a row alone, so rows join documents. Each document, and each continuation of one in
        # another row, starts with its own BOS, so the number of documents needed is found by trying.
        # Plus BOS and EOS. A lower bound from which _that_fill starts trying.
        sums = list(accumulate(len(document) + 2 for document in documents))
        end = next((number for number, total in enumerate(sums, start=1) if total >= count * length), None)
        end = _that_fill(documents, end or len(documents), length, bos_id, eos_id, count)
        chosen = list(range(end))
    rows = evaluation_rows([documents[number] for number in chosen], length, bos_id, eos_id, count)
    if len(rows.rows) < count:
        raise RopewalkError(
            f"the text fills {len(rows.rows)} rows of {length} tokens, but the search needs {count} rows (the "
            "setting documents, --documents); give more text, set fewer documents, or choose a shorter target length"
        )
    rows = replace(rows, documents=tuple(chosen[number] for number in rows.documents))
    if not held_out:
        return rows, None
    used = set(chosen)
    rest = [document for number, document in enumerate(documents) if number not in used]
    try:
        return rows, evaluation_rows(rest, length, bos_id, eos_id, held_out)
    except RopewalkError:
        # The remaining text does not fill a row; held-out rows are optional.
        return rows, None


def rows_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the tokens and labels of rows."""
    return digest([[row.input_ids.tolist(), row.labels.tolist()] for row in rows])


def _that_fill(
    documents: Sequence[Ids], start: int, length: int, bos_id: int | None, eos_id: int | None, count: int
) -> int:
    """Smallest number of first documents, from ``start`` on, that fill ``count`` rows; all documents if none does."""
    for end in range(start, len(documents)):
        try:
            if len(evaluation_rows(documents[:end], length, bos_id, eos_id, count).rows) == count:
                return end
        except RopewalkError:
            continue
    return len(documents)


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


CHARACTERS = 32
"""Characters read per token of all needle rows: more than enough in any language."""
SEARCH_SEED, HELD_OUT_SEED = 0, 1
"""Random seeds of the needles; independent of the search's seed, so that searches with other seeds share rows."""


@dataclass(frozen=True, eq=False)
class SearchData:
    """Rows of a search.

    Attributes:
        rows: rows of the target length that candidates are measured on.
        held_out: rows of other documents to evaluate the result on; may be empty.
        short_rows: rows of at most the trained length for the short penalty; empty without a penalty.
        source: description of the text.
        joined: whether rows join several documents because too few documents fill a row alone.
        documents: hashes of the documents in the rows that candidates are measured on; empty if nobody has to avoid
            them.
    """

    rows: Sequence[Row]
    held_out: Sequence[Row] = ()
    short_rows: Sequence[Row] = ()
    source: str = ""
    joined: bool = False
    documents: frozenset[int] = frozenset()

    @property
    def measured(self) -> list[Row]:
        """All rows that a candidate is measured on, including those of the penalty."""
        return [*self.rows, *self.short_rows]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the rows that candidates are measured on."""
        return rows_digest(self.measured)

    @cached_property
    def held_out_sha256(self) -> str:
        """SHA-256 of the held-out rows."""
        return rows_digest(self.held_out)


def search_data(source: str, tokenizer: Any, goal: Goal, settings: SearchSettings) -> SearchData:
    """Read text and make the rows of a search from it.

    Args:
        source: source of the text, given like the sources of ``ropewalk data pack``.
        tokenizer: tokenizer of the model.
        goal: rows have its target length. If that exceeds the trained length, needles are at least the trained length
            away from their answers.
        settings: objective and number of rows. With a short penalty, the beginnings of the rows are its rows.

    Raises:
        RopewalkError: if the text does not fill the rows.
    """
    length, trained = goal.target_length, goal.trained_length
    make = _needles if settings.objective == "needle" else _documents
    spec = SourceSpec(path=source)
    rows, held_out, joined = make(spec, tokenizer, goal, settings)
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
    text: SourceSpec, tokenizer: Any, goal: Goal, settings: SearchSettings
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    length, count, held_out = goal.target_length, settings.documents, settings.held_out
    documents = documents_of([text], tokenizer, length, count + held_out, settings.seed)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows, judged = search_rows(documents, length, bos, eos if bos is None else None, count, held_out)
    return rows.rows, judged.rows if judged else [], rows.kind == "packed"


def _needles(
    text: SourceSpec, tokenizer: Any, goal: Goal, settings: SearchSettings
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    length, count, held_out = goal.target_length, settings.documents, settings.held_out
    # At or below the trained length no needle can be beyond it; half of the row is then the default.
    needles = Needles(goal.trained_length if goal.trained_length < length else None)
    # Reading stops early: a corpus may have millions of documents, and needles need only the first few.
    wanted = CHARACTERS * length * (count + held_out)
    texts: list[str] = []
    characters = 0
    for document in draw_documents([text], settings.seed):
        texts.append(document.text)
        characters += len(document.text)
        if characters >= wanted and len(texts) > 1:
            break
    if not texts:
        raise RopewalkError(f"{text.path} contains no document to hide needles in; give another text")
    # In halves, if there are at least two: sources take turns, so every other document may be of one source.
    half = (len(texts) + 1) // 2 if held_out else len(texts)
    own, other = texts[:half], texts[half:]
    rows = needle_rows(tokenizer, own, length, count, SEARCH_SEED, needles)
    judged = needle_rows(tokenizer, other, length, held_out, HELD_OUT_SEED, needles) if other else []
    return rows, judged, False
