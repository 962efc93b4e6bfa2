"""Rows that train_retrieval_model.py trains on: documents of retrieval, drills, and the embedded corpus."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from ropewalk.data.read.retrieval import Exam, ExamWriter

PROMPT_WEIGHT = 0.02
"""What a token of an exam counts that is no answer: enough to know the wording, which training on counts in full."""

FIRST_DIGIT_WEIGHT = 4.0
"""What the first token of an answer counts, which is what must be looked up."""

BOS_ID, EOS_ID = 0, 1

Row = tuple[list[int], list[float]]
"""Token ids, and the weight of each in the loss."""


@dataclass(frozen=True)
class Stage:
    """Until a share of the training: the rows' tokens, and the shares of rows that are drills, corpus or chains.

    The chains are prompts of variable tracking with their solved example, which few of the other rows have room for.
    """

    until: float
    length: int
    recall: float
    corpus: float
    chains: float = 0.0


class RowMaker:
    """Training rows, in an order that the seed alone decides."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        words: tuple[Sequence[str], Sequence[str]],
        corpus: Sequence[str],
        seed: int,
    ) -> None:
        self.rng = random.Random(seed)
        self.writer = ExamWriter(self.rng, words)
        self.backend = tokenizer.backend_tokenizer
        self.plain_ids = range(EOS_ID + 1, len(tokenizer))
        self.digit_ids = [self.backend.token_to_id(digit) for digit in "0123456789"]
        self.corpus = corpus
        self.stream = self._corpus_ids()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, stage: Stage) -> Row:
        """One row of a stage."""
        kind = self.rng.random()
        if kind < stage.recall:
            return self.recall(stage.length)
        if kind < stage.recall + stage.corpus:
            return [BOS_ID, *itertools.islice(self.stream, stage.length - 1)], [1.0] * stage.length
        if kind < stage.recall + stage.corpus + stage.chains:
            return self.chains(stage.length)
        return self.exams(stage.length)

    def exams(self, length: int) -> Row:
        """As many exams as fit, each a document of its own between BOS and EOS; the last gets the room that is left."""
        ids, weights = self.exam(length)
        while len(ids) < length * 0.8:
            more, weighted = self.exam(length - len(ids))
            if not more:
                break
            ids, weights = ids + more, weights + weighted
        return ids, weights

    def chains(self, length: int) -> Row:
        """A prompt of variable tracking: a solved example, and a chain whose every name must be looked up."""
        while True:
            lines = self.rng.randint(0, 5), self.rng.randint(0, 5)
            solved, asked = self.writer.chain(3, lines[0]), self.writer.chain(5, lines[1])
            ids, weights = [BOS_ID], [0.0]
            for text, is_answer in [*solved.pieces(), ("\n\n", False), *asked.pieces()]:
                parts = [f" {name}" for name in text.split()] if is_answer else [text]
                for piece in map(self.encode, parts):
                    ids += piece
                    first = FIRST_DIGIT_WEIGHT if is_answer else PROMPT_WEIGHT
                    weights += [first, *[1.0 if is_answer else PROMPT_WEIGHT] * (len(piece) - 1)]
            if len(ids) < length:
                return [*ids, EOS_ID], [*weights, 1.0]

    def exam(self, length: int) -> Row:
        """One exam within a length; empty if three tries did not fit."""
        for _ in range(3):
            ids, weights = self.exam_ids(self._any(length))
            if len(ids) <= length:
                return ids, weights
        return [], []

    def exam_ids(self, exam: Exam) -> Row:
        """BOS, the exam and EOS."""
        ids, weights = [BOS_ID], [0.0]
        for text, is_answer in exam.pieces():
            piece = self.encode(text)
            ids += piece
            weights += (
                [FIRST_DIGIT_WEIGHT, *[1.0] * (len(piece) - 1)] if is_answer else [PROMPT_WEIGHT] * len(piece)
            )
        return [*ids, EOS_ID], [*weights, 1.0]

    def _any(self, length: int) -> Exam:
        kind, draw = self.rng.random(), self.rng.randint
        if kind < 0.50:
            questions = draw(1, max(1, length // 50))
            return self.writer.needles(draw(1, max(1, (length - 25 * questions) // 16)), 0, questions)
        if kind < 0.65:
            questions = draw(1, max(1, length // 80))
            keys = draw(1, 3)
            return self.writer.needles(
                keys, draw(0, max(1, (length - 25 * questions - 16 * keys) // 5)), questions
            )
        if kind < 0.75:
            return self.writer.passkey(draw(0, max(1, length - 40)))
        return self.writer.chain(draw(2, 5), draw(0, max(0, (length - 110) // 5)))

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

    def _corpus_ids(self) -> Iterator[int]:
        """The corpus without end, each epoch in a new order."""
        while True:
            for text in self.rng.sample(self.corpus, len(self.corpus)):
                yield from self.encode(text)
                yield EOS_ID


def batch_of(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights ``[rows, longest row]``; rows are padded at the end, where nothing counts."""
    shape = len(rows), max(len(ids) for ids, _ in rows)
    ids, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for number, (row, weighted) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        weights[number, : len(row)] = torch.tensor(weighted)
    return ids, weights
