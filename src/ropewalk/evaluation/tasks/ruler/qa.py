"""RULER's question answering (qa_1, qa_2): answer from one document, or from two, among many.

Documents are large beside what a short prompt holds, so the last ones are chosen by their size: prompts come to
fill their length although no document is cut.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    BATCH_TOKENS,
    LEAST_FILL,
    MOST_IN_BATCH,
    Draft,
    Form,
    LengthTooShort,
    Sample,
    counted_samples,
    sample_random,
)
from ropewalk.evaluation.tasks.ruler.questions import QuestionSet, read_hotpotqa, read_squad
from ropewalk.evaluation.tasks.ruler.templates import QA

Dataset = Literal["squad", "hotpotqa"]

BETWEEN = "\n\n"
SPARE = 0.01
"""Share of the length that is left to what the documents' tokens do not add up to."""
MOST_GROWN = 3
"""Times that a prompt with room left is made again with more in it."""


@dataclass(frozen=True)
class QuestionTask:
    """Questions with documents to answer from; a unit is a document.

    A prompt holds the question's own documents, then others of the same article, then any others; in an order
    drawn for each sample. Where the data set has too few, they are repeated, the question's own ones excepted,
    and the details say how many are.

    Args:
        name: of the task.
        dataset: ``squad`` or ``hotpotqa``.
        source: a file of the data set, or ``hub``; the task cannot run where it is None.

    Raises:
        RopewalkError: for another data set.

    Source: NVIDIA/RULER at c3f5e3b, ``qa.py``.
    """

    name: str
    dataset: Dataset
    source: str | None = None

    suite = "ruler"
    max_new_tokens = 32

    def __post_init__(self) -> None:
        if self.dataset not in get_args(Dataset):
            raise RopewalkError(f"unknown data set {self.dataset!r}; choose {', '.join(get_args(Dataset))}")

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"dataset": self.dataset, "questions": self.questions().sha256}

    def unavailable(self) -> str | None:
        """Why the task cannot run here, or None.

        Raises:
            RopewalkError: if a file is named and is not what it should be.
        """
        if self.source is None:
            name = {"squad": "SQuAD v2's dev set", "hotpotqa": "HotpotQA's dev distractor set"}[self.dataset]
            return f"{name} is not here: give its file with --{self.dataset} FILE, or --{self.dataset} hub to load it"
        self.questions()
        return None

    def questions(self) -> QuestionSet:
        """The data set, read once.

        Raises:
            RopewalkError: if none is named, or it cannot be read.
        """
        if self.source is None:
            raise RopewalkError(f"{self.name} cannot run: {self.unavailable()}")
        return {"squad": read_squad, "hotpotqa": read_hotpotqa}[self.dataset](self.source)

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`. Sample i asks the same question at every length."""
        data = self.questions()
        if not 1 <= count <= len(data.questions):
            raise RopewalkError(
                f"{self.name} has {len(data.questions)} questions, one a sample; there cannot be {count} samples"
            )
        asked = question_order(self.name, len(data.questions), seed)[:count]
        if any(len(set(data.questions[each].gold)) == len(data.documents) for each in asked):
            raise RopewalkError(
                f"{self.source} has no documents beside a question's own, to fill prompts with"
            )
        bare = [_draft(data, each, list(data.questions[each].gold), 0) for each in asked]
        tokens = encoder.counts([(each.text, each.answer_prefix) for each in bare])
        shortest = max(tokens) + self.max_new_tokens
        if length < shortest:
            raise LengthTooShort(self.name, length, shortest)
        return self._filled(data, encoder, length, seed, asked, tokens)

    def _filled(
        self,
        data: QuestionSet,
        encoder: PromptEncoder,
        length: int,
        seed: int,
        asked: Sequence[int],
        bare: Sequence[int],
    ) -> Iterator[Sample]:
        form = Form(self.suite, self.name, "part", self.max_new_tokens)
        sizes = document_sizes(encoder, data.documents)
        budget, slack = length - self.max_new_tokens, int((1 - LEAST_FILL) / 2 * length)
        # A prompt that comes out a few tokens too long is made and counted twice.
        spare = int(SPARE * length)
        size = max(1, min(MOST_IN_BATCH, BATCH_TOKENS // length))

        def draft(trial: _Trial) -> Draft:
            draw = sample_random(seed, self.name, length, trial.index)
            return filled_draft(data, asked[trial.index], sizes, trial.room, slack, draw)

        for start in range(0, len(asked), size):
            trials = [
                _Trial(i, budget - bare[i] - spare) for i in range(start, min(start + size, len(asked)))
            ]
            open_trials = trials
            while open_trials:
                indices = [trial.index for trial in open_trials]
                made = counted_samples(form, encoder, length, indices, list(map(draft, open_trials)))
                open_trials = [
                    t for t, sample in zip(open_trials, made, strict=True) if t.goes_on(sample, budget)
                ]
            for trial in trials:
                assert trial.best is not None
                yield trial.best


@dataclass
class _Trial:
    """How much room one sample's other documents are given, and the fullest prompt that fitted."""

    index: int
    room: int
    best: Sample | None = None
    grown: int = 0

    def goes_on(self, sample: Sample, budget: int) -> bool:
        """Take note of a prompt; whether another is to be made."""
        # Tokens of documents nearly add up; by what they did not, the room is mended.
        free = budget - sample.prompt_tokens
        self.room += free
        if free < 0:
            return True
        if self.best is None or sample.prompt_tokens > self.best.prompt_tokens:
            self.best = sample
        self.grown += 1
        return self.best.fill < LEAST_FILL and self.grown <= MOST_GROWN


def qa_tasks(squad: str | None = None, hotpotqa: str | None = None) -> dict[str, QuestionTask]:
    """The two tasks by name.

    Args:
        squad: SQuAD v2's dev file, or ``hub``.
        hotpotqa: HotpotQA's dev distractor file, or ``hub``.
    """
    return {
        "qa_1": QuestionTask("qa_1", "squad", squad),
        "qa_2": QuestionTask("qa_2", "hotpotqa", hotpotqa),
    }


def qa_prompt(query: str, documents: Sequence[str]) -> tuple[str, str]:
    """Task text and beginning of the answer."""
    context = BETWEEN.join(numbered_documents(documents))
    return QA.text(context=context, query=query), QA.prefix()


def numbered_documents(documents: Sequence[str]) -> list[str]:
    """``Document 1:`` and the text below it, and so on."""
    return [f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1)]


@lru_cache(maxsize=4)
def question_order(task: str, questions: int, seed: int) -> tuple[int, ...]:
    """Which question each sample asks: drawn, for the first ones of the file are all of one article."""
    # No length: the same questions at all lengths make these comparable.
    return tuple(random.Random(f"{seed}/{task}/questions").sample(range(questions), questions))


def filled_draft(
    data: QuestionSet,
    asked: int,
    sizes: Sizes,
    room: int,
    slack: int,
    draw: random.Random,
) -> Draft:
    """A prompt whose other documents take about ``room`` tokens and not more.

    Args:
        data: the data set.
        asked: index of the question.
        sizes: tokens of documents by their indices.
        room: tokens beside the question and its own documents.
        slack: tokens of the room that may stay free.
        draw: random numbers of this sample.
    """
    question = data.questions[asked]
    shuffle = random.Random(draw.getrandbits(64))
    others = others_in_order(question.gold, question.more, len(data.documents), draw)
    chosen = filling(others, sizes, room, slack)
    order = [*question.gold, *chosen]
    shuffle.shuffle(order)
    return _draft(data, asked, order, len(chosen) - len(set(chosen)))


def _draft(data: QuestionSet, asked: int, order: Sequence[int], repeated: int) -> Draft:
    question = data.questions[asked]
    documents = [data.documents[index] for index in order]
    text, prefix = qa_prompt(question.query, documents)
    starts = list(accumulate(map(len, numbered_documents(documents)), lambda at, n: at + n + 2, initial=0))
    gold = set(question.gold)
    details = {
        "unit": "document",
        "units": len(order),
        "question": asked,
        "depths": [
            round(start / (starts[-1] - 2), 4)
            for index, start in zip(order, starts, strict=False)
            if index in gold
        ],
        "repeated": repeated,
    }
    return Draft(text, prefix, question.answers, details)


CHOICE = 64
"""Documents that are looked at together; of so many the last ones are chosen."""
MOST_DROPPED = 2
"""Documents that are taken out again where no choice of more fills the room."""
HEADING = "Document 99:\n"
AFTER = "\n\n"

Sizes = Callable[[Sequence[int]], list[int]]
"""From indices of documents to the tokens that each adds to a prompt, 1 or more."""

Measured = tuple[int, int]
"""Index of a document, and its tokens."""


def others_in_order(
    own: Sequence[int], nearest: Sequence[int], documents: int, draw: random.Random
) -> Iterator[int]:
    """Documents that are not a question's own: those of its article, then all others; then the same again.

    Args:
        own: the question's documents.
        nearest: documents of its article, its own perhaps among them.
        documents: how many there are.
        draw: decides the order.

    Yields:
        Indices, without end; nothing where there are no others.
    """
    seen = set(own)
    passed: list[int] = []
    first = [index for index in dict.fromkeys(nearest) if index not in seen]
    draw.shuffle(first)
    # A shuffle of all documents would cost more than the few that a short prompt needs.
    while len(seen) < documents:
        index = first.pop() if first else draw.randrange(documents)
        if index not in seen:
            seen.add(index)
            passed.append(index)
            yield index
    while passed:
        yield from passed


def filling(others: Iterator[int], sizes: Sizes, room: int, slack: int) -> list[int]:
    """As many of the first documents as fit, and such last ones as fill the room.

    Args:
        others: documents, in order.
        sizes: their tokens.
        room: tokens.
        slack: tokens that may stay free; only where more would, the last documents are chosen by their size.

    Returns:
        Documents that take ``room`` tokens at most.
    """
    chosen: list[Measured] = []
    ahead: list[Measured] = []
    while not ahead and (group := _measured(others, sizes, CHOICE)):
        for at, (document, tokens) in enumerate(group):
            if tokens > room:
                ahead = group[at:]
                break
            chosen.append((document, tokens))
            room -= tokens
    if room > slack and ahead:
        ahead += _measured(others, sizes, CHOICE - len(ahead))
        chosen = _with_last(chosen, ahead, room, slack)
    return [document for document, _ in chosen]


def _measured(others: Iterator[int], sizes: Sizes, count: int) -> list[Measured]:
    group = list(islice(others, count))
    return list(zip(group, sizes(group), strict=True))


def _with_last(
    chosen: Sequence[Measured], ahead: Sequence[Measured], room: int, slack: int
) -> list[Measured]:
    """The chosen ones and more of those ahead, a few of the last ones taken out again where that leaves less free."""
    best, least = list(chosen), room
    by_size = sorted(ahead, key=lambda each: each[1], reverse=True)
    for dropped in range(min(MOST_DROPPED, len(chosen)) + 1):
        kept = list(chosen[: len(chosen) - dropped])
        free = room + sum(tokens for _, tokens in chosen[len(kept) :])
        for document, tokens in by_size:
            if tokens <= free:
                kept.append((document, tokens))
                free -= tokens
        if free < least:
            best, least = kept, free
        if least <= slack:
            break
    return best


# By tokenizer, since each length has an encoder of its own; forgotten with the tokenizer.
_KNOWN: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def document_sizes(encoder: PromptEncoder, documents: Sequence[str]) -> Sizes:
    """Tokens that documents add to a prompt, each with its heading and the empty line after it.

    Each is read alone, once a tokenizer: in a prompt it may have a few more or less.

    Args:
        encoder: whose tokenizer counts.
        documents: all there are.
    """
    known = _KNOWN.setdefault(encoder.tokenizer, {})

    def sizes(indices: Sequence[int]) -> list[int]:
        texts = [documents[index] for index in indices]
        unknown = [text for text in dict.fromkeys(texts) if text not in known]
        read = encoder.backend().encode_batch_fast(
            [HEADING + text + AFTER for text in unknown], add_special_tokens=False
        )
        known.update((text, len(found)) for text, found in zip(unknown, read, strict=True))
        return [known[text] for text in texts]

    return sizes
