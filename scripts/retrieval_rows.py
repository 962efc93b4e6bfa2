"""Rows that train_retrieval_model.py trains on: the benchmarks' prompts with new keys and numbers, and drills."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerFast

from ropewalk.evaluation.tasks.longeval import HEADER, LARGEST_VALUE, LINE, TAIL
from ropewalk.evaluation.tasks.passkey import LARGEST_KEY, NOISE_SENTENCES, passkey_text
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.words import key_names

BARE_SHARE, SEVERAL_SHARE = 0.2, 0.7
"""Shares of exams without instructions, and of the others those that have several questions."""

WITH_INSTRUCTIONS = 256
"""Tokens below which a row has no room for instructions."""

FIRST_DIGIT_WEIGHT = 4.0
"""What the first digit of an answer counts, after the space: it is what must be looked up by its key."""

BOS_ID, EOS_ID = 0, 1
Haystack = Literal["noise", "needle"]


@dataclass(frozen=True)
class Exam:
    """A prompt, and questions with their answers; the model goes on from a question with its answer."""

    context: str
    questions: tuple[tuple[str, str], ...]

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Texts that are tokenised apart, and whether each is an answer."""
        before = self.context
        for question, answer in self.questions:
            yield before + question, False
            yield answer, True
            before = ""


@dataclass(frozen=True)
class Stage:
    """Until a share of the training: the longest row in tokens, and the shares of rows that are drills."""

    until: float
    length: int
    copying: float
    recall: float


@dataclass(frozen=True)
class ExamWriter:
    """Exams on random keys and numbers; ``units`` are sentences or lines besides what is asked for."""

    rng: random.Random

    def passkey(self, units: int) -> Exam:
        """The passkey prompt."""
        key, before = self.rng.randint(1, LARGEST_KEY), self.rng.randint(0, units)
        noise = [
            " ".join(itertools.islice(itertools.cycle(NOISE_SENTENCES), n)) for n in (before, units - before)
        ]
        return Exam("", ((passkey_text(key, *noise), f" {key}"),))

    def lines(self, units: int, questions: int, bare: bool) -> Exam:
        """LongEval's record of lines, asked for one or several of them."""
        content = {key: str(self.rng.randint(1, LARGEST_VALUE)) for key in self._keys(units + questions)}
        record = "".join(LINE.format(index=key, value=value) for key, value in content.items())
        tail = TAIL[TAIL.index(" line {index}") :] if bare else TAIL
        asked = self.rng.sample(list(content), questions)
        return Exam(
            record if bare else HEADER + record,
            tuple((tail.format(index=key), f" {content[key]}") for key in asked),
        )

    def needles(
        self, units: int, questions: int, bare: bool, haystack: Haystack, values: int = 1, queries: int = 1
    ) -> Exam:
        """RULER's numbers for keys, among noise or among others of their kind."""
        count = max(questions, queries) + (units if haystack == "needle" else 0)
        numbers = {key: [self._number() for _ in range(values)] for key in self._keys(count)}
        needles = [(key, value) for key, some in numbers.items() for value in some]
        self.rng.shuffle(needles)
        lines = [needle_line("numbers", key, value) for key, value in needles]
        if haystack == "noise":
            lines = self._among_noise(lines, units)
        asked = []
        for _ in range(questions):
            keys = self.rng.sample(list(numbers), queries)
            text, prefix = niah_prompt("numbers", keys, values, "\0")
            header, question = text.split("\0")
            found = [value for key in keys for of, value in needles if of == key]
            asked.append(((prefix if bare else question + prefix), f" {listed_numbers(found)}"))
        context = "\n".join(lines)
        return Exam(context if bare else header + context, tuple(asked))

    def any(self, length: int) -> Callable[[int], Exam]:
        """A kind of exam, drawn for rows of a length: from units to an exam."""
        bare = length < WITH_INSTRUCTIONS or self.rng.random() < BARE_SHARE
        questions = 1
        if bare:
            questions = self.rng.randint(max(1, length // 90), max(1, length // 60))
        elif self.rng.random() < SEVERAL_SHARE:
            questions = self.rng.randint(1, max(1, length // 75))
        kind = self.rng.random()
        if kind < 0.40:
            return lambda units: self.lines(units, questions, bare)
        if kind < 0.70:
            return lambda units: self.needles(units, questions, bare, "needle")
        if kind < 0.80 or length < WITH_INSTRUCTIONS:
            return lambda units: self.needles(units, questions, bare, "noise")
        if kind < 0.90:
            return self.passkey
        if kind < 0.95:
            return lambda units: self.needles(units, 1, False, "noise", values=4)
        return lambda units: self.needles(units, 1, False, "noise", queries=4)

    def _among_noise(self, needles: Sequence[str], units: int) -> list[str]:
        places = set(self.rng.sample(range(units + len(needles)), len(needles)))
        in_order = iter(needles)
        return [next(in_order) if n in places else NOISE_LINE for n in range(units + len(needles))]

    def _keys(self, count: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.rng.choice(key_names())] = None
        return list(found)

    def _number(self) -> str:
        return str(self.rng.randint(1_000_000, 9_999_999))


def listed_numbers(numbers: Sequence[str]) -> str:
    """``1``, or ``1, 2, and 3``."""
    return numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])}, and {numbers[-1]}"


Row = tuple[list[int], list[float]]
"""Token ids, and what the loss of each counts: 0 for all that is no answer."""


class RowMaker:
    """Training rows, in an order that the seed alone decides."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng = random.Random(seed)
        self.writer = ExamWriter(self.rng)
        self.backend = tokenizer.backend_tokenizer
        self.plain_ids = range(EOS_ID + 1, len(tokenizer))
        self.digit_ids = [self.backend.token_to_id(digit) for digit in "0123456789"]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, stage: Stage) -> Row:
        """One row of a stage."""
        kind = self.rng.random()
        if kind < stage.copying:
            return self.copying(stage.length)
        if kind < stage.copying + stage.recall:
            return self.recall(stage.length)
        return self.exam(self.rng.randint(stage.length // 2, stage.length))

    def exam(self, length: int) -> Row:
        """An exam with as many units as fit; of a kind that fits, which some do from 64 tokens on."""
        while True:
            make = self.writer.any(length)
            few, more = (len(self.exam_ids(make(units))[0]) for units in (0, 4))
            most = (length - few) * 4 // max(1, more - few)
            # Units differ in their tokens, so the most that fit are sometimes too many.
            for units in range(most, max(-1, most - 4), -1):
                ids, weights = self.exam_ids(make(units))
                if len(ids) <= length:
                    return ids, weights

    def exam_ids(self, exam: Exam) -> Row:
        """BOS and the exam, each answer followed by EOS."""
        ids, weights = [BOS_ID], [0.0]
        for text, is_answer in exam.pieces():
            piece = self.encode(text) + [EOS_ID] * is_answer
            ids += piece
            weights += (
                [FIRST_DIGIT_WEIGHT if n == 1 else 1.0 for n in range(len(piece))]
                if is_answer
                else [0.0] * len(piece)
            )
        return ids, weights

    def copying(self, length: int) -> Row:
        """Strings of random tokens or of digits, each said two or three times."""
        ids, weights = [BOS_ID], [0.0]
        while len(ids) < length:
            alphabet = self.rng.choice([self.plain_ids, self.digit_ids])
            string = self.rng.choices(alphabet, k=self.rng.randint(4, max(5, length // 3)))
            times = self.rng.randint(2, 3)
            ids += string * times + [EOS_ID]
            weights += [0.0] * len(string) + [1.0] * len(string) * (times - 1) + [0.0]
        return ids[:length], weights[:length]

    def recall(self, length: int) -> Row:
        """Keys of random tokens with digits, then some of them again, often with other words between the two."""
        key_size, value_size = self.rng.randint(1, 4), self.rng.randint(1, 5)
        gap = self._some_ids(0, 3)
        asked_gap = gap if self.rng.random() < 0.67 else self._some_ids(0, 6) + gap[-1:]
        end = self._some_ids(1, 4)
        pair_size = key_size + len(gap) + value_size + len(end)
        asked_size = key_size + len(asked_gap) + value_size + len(end)
        most = max(1, (length - 1) // (pair_size + asked_size))
        pairs = [
            (self._some_ids(key_size, key_size), self.rng.choices(self.digit_ids, k=value_size))
            for _ in range(min(most, 16) if self.rng.random() < 0.5 else most)
        ]
        ids = [BOS_ID, *itertools.chain.from_iterable(key + gap + value + end for key, value in pairs)]
        weights = [0.0] * len(ids)
        while len(ids) + asked_size <= length or not any(weights):
            key, value = self.rng.choice(pairs)
            ids += key + asked_gap + value + end
            weights += [0.0] * len(key + asked_gap) + [1.0] * len(value) + [0.0] * len(end)
        return ids, weights

    def _some_ids(self, fewest: int, most: int) -> list[int]:
        return self.rng.choices(self.plain_ids, k=self.rng.randint(fewest, most))


def batch_of(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights ``[rows, longest row]``; rows are padded at the end, where nothing counts."""
    shape = len(rows), max(len(ids) for ids, _ in rows)
    ids, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for number, (row, weighted) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        weights[number, : len(row)] = torch.tensor(weighted)
    return ids, weights
