"""RULER's question answering (qa_1, qa_2): answer a question from one or two documents among many distractors.

Documents are large compared with a short prompt, so the last ones are chosen by size. This fills the length without
truncating any document.
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
from ropewalk.evaluation.tasks.fetched_data import COMMAND, SOURCES, fetched
from ropewalk.evaluation.tasks.ruler.questions import QuestionSet, read_hotpotqa, read_squad
from ropewalk.evaluation.tasks.ruler.templates import QA

Dataset = Literal["squad", "hotpotqa"]

BETWEEN = "\n\n"
SPARE = 0.01
"""Share of the length kept free at first, because the tokens of documents do not add up exactly."""
MOST_GROWN = 3
"""Maximum number of times that a prompt with room left is rebuilt with more documents."""


@dataclass(frozen=True)
class QuestionTask:
    """Questions with documents to answer from; a unit is a document.

    A prompt contains the question's own documents, then others of the same article, then any others, shuffled for each
    sample. If the dataset has too few documents, distractors are repeated, and the details give the number of
    repetitions.

    Args:
        name: name of the task.
        dataset: ``squad`` or ``hotpotqa``.
        source: a file of the dataset, or ``hub``; if None, the one that was fetched, without which the task cannot run.

    Raises:
        RopewalkError: for an unknown dataset.

    Source: NVIDIA/RULER at c3f5e3b, ``qa.py``.
    """

    name: str
    dataset: Dataset
    source: str | None = None

    suite = "ruler"
    max_new_tokens = 32

    def __post_init__(self) -> None:
        if self.dataset not in get_args(Dataset):
            raise RopewalkError(
                f"unknown dataset {self.dataset!r}; choose from {', '.join(get_args(Dataset))}"
            )

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"dataset": self.dataset, "questions": self.questions().sha256}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here, or None.

        Raises:
            RopewalkError: if the given file does not exist or has another format.
        """
        if self._file is None:
            return f"{SOURCES[self.dataset].content} is missing; run {COMMAND}, or give its file with --{self.dataset}"
        self.questions()
        return None

    def questions(self) -> QuestionSet:
        """Return the dataset, which is read once.

        Raises:
            RopewalkError: if no file is given, or it cannot be read.
        """
        if self._file is None:
            raise RopewalkError(f"{self.name} cannot run: {self.unavailable()}")
        return {"squad": read_squad, "hotpotqa": read_hotpotqa}[self.dataset](self._file)

    @property
    def _file(self) -> str | None:
        if self.source is not None:
            return self.source
        there = fetched(self.dataset)
        return None if there is None else str(there)

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`; sample i has the same question at every length."""
        data = self.questions()
        if not 1 <= count <= len(data.questions):
            raise RopewalkError(
                f"{self.name} has {len(data.questions)} questions, one per sample, and {count} samples are requested; "
                f"give --samples from 1 to {len(data.questions)}"
            )
        selected = question_order(self.name, len(data.questions), seed)[:count]
        if any(len(set(data.questions[each].gold)) == len(data.documents) for each in selected):
            raise RopewalkError(
                f"{self._file} has no documents besides those of one question, so nothing can fill the prompts; "
                "give the whole dataset"
            )
        bare = [_draft(data, each, list(data.questions[each].gold), 0) for each in selected]
        tokens = encoder.counts([(each.text, each.answer_prefix) for each in bare])
        shortest = max(tokens) + self.max_new_tokens
        if length < shortest:
            raise LengthTooShort(self.name, length, shortest)
        return self._filled(data, encoder, length, seed, selected, tokens)

    def _filled(
        self,
        data: QuestionSet,
        encoder: PromptEncoder,
        length: int,
        seed: int,
        selected: Sequence[int],
        bare: Sequence[int],
    ) -> Iterator[Sample]:
        form = Form(self.suite, self.name, "part", self.max_new_tokens)
        sizes = document_sizes(encoder, data.documents)
        # Half of what may stay free at all; the other half is for sizes that do not add up exactly.
        budget, slack = length - self.max_new_tokens, int((1 - LEAST_FILL) / 2 * length)
        # Without a spare margin, prompts that come out a few tokens too long would be built and counted twice.
        spare = int(SPARE * length)
        size = max(1, min(MOST_IN_BATCH, BATCH_TOKENS // length))

        def draft(trial: _Trial) -> Draft:
            # The same draws at every attempt, so that only the number of documents changes.
            draw = sample_random(seed, self.name, length, trial.index)
            return filled_draft(data, selected[trial.index], sizes, trial.room, slack, draw)

        for start in range(0, len(selected), size):
            trials = [
                _Trial(i, budget - bare[i] - spare) for i in range(start, min(start + size, len(selected)))
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
    """Search state of one sample: the room for its distractors in tokens, and the fullest prompt that fitted."""

    index: int
    room: int
    best: Sample | None = None
    grown: int = 0

    def goes_on(self, sample: Sample, budget: int) -> bool:
        """Record a prompt, and return whether to build another."""
        # The tokens of documents do not add up exactly; correct the room by the difference.
        free = budget - sample.prompt_tokens
        self.room += free
        if free < 0:
            return True
        # Only a fuller prompt replaces the best: a larger room may choose documents that fill it less.
        if self.best is None or sample.prompt_tokens > self.best.prompt_tokens:
            self.best = sample
        self.grown += 1
        return self.best.fill < LEAST_FILL and self.grown <= MOST_GROWN


def qa_tasks(squad: str | None = None, hotpotqa: str | None = None) -> dict[str, QuestionTask]:
    """Return the two tasks by name.

    Args:
        squad: SQuAD v2's dev file, or ``hub``.
        hotpotqa: HotpotQA's dev distractor file, or ``hub``.
    """
    return {
        "qa_1": QuestionTask("qa_1", "squad", squad),
        "qa_2": QuestionTask("qa_2", "hotpotqa", hotpotqa),
    }


def qa_prompt(query: str, documents: Sequence[str]) -> tuple[str, str]:
    """Return the task text and the beginning of the answer."""
    context = BETWEEN.join(numbered_documents(documents))
    return QA.text(context=context, query=query), QA.prefix()


def numbered_documents(documents: Sequence[str]) -> list[str]:
    """Put a heading ``Document 1:`` and so on above each text."""
    return [f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1)]


@lru_cache(maxsize=4)
def question_order(task: str, questions: int, seed: int) -> tuple[int, ...]:
    """Return the question of each sample, in random order because the first questions of a file share one article."""
    # The seed does not contain the length, so that all lengths have the same questions and are comparable.
    return tuple(random.Random(f"{seed}/{task}/questions").sample(range(questions), questions))


def filled_draft(
    data: QuestionSet,
    question_index: int,
    sizes: Sizes,
    room: int,
    slack: int,
    draw: random.Random,
) -> Draft:
    """Build a prompt whose distractors take about ``room`` tokens, and not more.

    Args:
        data: the dataset.
        question_index: index of the question.
        sizes: returns the tokens of documents, given their indices.
        room: tokens for distractors, besides the question and its own documents.
        slack: tokens of the room that may stay free.
        draw: random generator of this sample.
    """
    question = data.questions[question_index]
    # A generator of its own, so that the order does not depend on how many documents were drawn.
    shuffle = random.Random(draw.getrandbits(64))
    others = others_in_order(question.gold, question.more, len(data.documents), draw)
    chosen = filling(others, sizes, room, slack)
    order = [*question.gold, *chosen]
    shuffle.shuffle(order)
    return _draft(data, question_index, order, len(chosen) - len(set(chosen)))


def _draft(data: QuestionSet, question_index: int, order: Sequence[int], repeated: int) -> Draft:
    question = data.questions[question_index]
    documents = [data.documents[index] for index in order]
    text, prefix = qa_prompt(question.query, documents)
    # Two more characters for BETWEEN, which follows each document.
    starts = list(accumulate(map(len, numbered_documents(documents)), lambda at, n: at + n + 2, initial=0))
    gold = set(question.gold)
    details = {
        "unit": "document",
        "units": len(order),
        "question": question_index,
        "depths": [
            # Without the BETWEEN behind the last document, which the prompt does not have.
            round(start / (starts[-1] - 2), 4)
            for index, start in zip(order, starts, strict=False)
            if index in gold
        ],
        "repeated": repeated,
    }
    return Draft(text, prefix, question.answers, details)


CHOICE = 64
"""Number of documents that are examined together, and among which the last ones are chosen."""
MOST_DROPPED = 2
"""Maximum number of chosen documents to remove again if no choice of further ones fills the room."""
# A number of usual size: a document's own number is not known when its tokens are counted.
HEADING = "Document 99:\n"
AFTER = "\n\n"

Sizes = Callable[[Sequence[int]], list[int]]
"""Maps indices of documents to the tokens that each adds to a prompt, at least 1."""

Measured = tuple[int, int]
"""Index of a document, and its number of tokens."""


def others_in_order(
    own: Sequence[int], nearest: Sequence[int], documents: int, draw: random.Random
) -> Iterator[int]:
    """Yield distractors of a question: documents of its article, then all others, then the same again.

    Args:
        own: indices of the question's documents.
        nearest: indices of documents of its article, which may include its own.
        documents: number of documents in the dataset.
        draw: random generator that decides the order.

    Yields:
        Indices without end; nothing if there are no distractors.
    """
    seen = set(own)
    passed: list[int] = []
    first = [index for index in dict.fromkeys(nearest) if index not in seen]
    draw.shuffle(first)
    # Draw one by one: shuffling all documents would cost more than the few that a short prompt needs.
    while len(seen) < documents:
        index = first.pop() if first else draw.randrange(documents)
        if index not in seen:
            seen.add(index)
            passed.append(index)
            yield index
    while passed:
        yield from passed


def filling(others: Iterator[int], sizes: Sizes, room: int, slack: int) -> list[int]:
    """Choose as many documents in order as fit, and the last ones by size such that they fill the room.

    Args:
        others: indices of documents, in order.
        sizes: returns the tokens of documents, given their indices.
        room: maximum number of tokens.
        slack: tokens that may stay free; the last documents are chosen by size only if more would stay free.

    Returns:
        Indices of documents that take at most ``room`` tokens.
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
    """Add documents from ``ahead`` to the chosen ones, replacing a few of the last if that leaves less room free."""
    best, least = list(chosen), room
    # The largest first, so that small ones fill what is left.
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


# Keyed by tokenizer, because each length has its own encoder; weak, so that the cache ends with the tokenizer.
_KNOWN: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def document_sizes(encoder: PromptEncoder, documents: Sequence[str]) -> Sizes:
    """Return a function that counts the tokens of documents, each with its heading and the empty line after it.

    Each document is tokenised alone and once per tokenizer; within a prompt it may have a few tokens more or less.

    Args:
        encoder: encoder whose tokenizer counts.
        documents: all documents of the dataset.
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
