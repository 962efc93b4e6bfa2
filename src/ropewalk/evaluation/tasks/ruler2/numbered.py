"""RULERv2's tasks among numbered texts: what those with questions of MMLU and with documents of HotpotQA share.

The prompts are the published ones of instruction-tuned models. Upstream draws each number of seven digits by itself;
here they are distinct.

Source: NVIDIA-NeMo/Skills, ``dataset/ruler2/prepare_data.py`` (Apache-2.0).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Draft, Form, LengthTooShort, Sample, fitted_samples
from ropewalk.evaluation.tasks.ruler.qa import question_order

NUMBERS = range(10**6, 10**7)
BETWEEN = "\n\n"
LEAST_ROOM = 128
"""Fewest tokens of room for an answer; more is a power of two that has the right answer twice."""


@dataclass(frozen=True)
class Kind:
    """What distinguishes a task.

    Attributes:
        metric: name of the metric.
        introduction: beginning of the prompt.
        request: its end, with fields in braces.
    """

    metric: str
    introduction: str
    request: str


@dataclass(frozen=True)
class NumberedTask(ABC):
    """Texts with numbers, of which some are asked for; a unit is another text.

    A sample has the same question and begins with the same other texts at every length.

    Args:
        name: name of the task.
        source: where its data are; None if the user has given none.
    """

    name: str
    source: Any

    suite = "ruler2"
    max_new_tokens = LEAST_ROOM

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """What the task asks for."""

    @property
    def fewest(self) -> int:
        """Fewest other texts of a prompt."""
        return 0

    @abstractmethod
    def questions(self) -> Sequence[Any]:
        """All questions, of which each sample has one."""

    @abstractmethod
    def built(self, asked: int, units: int, key: tuple[int, int]) -> tuple[Draft, str]:
        """The prompt about a question with so many other texts, and what a right answer to it says.

        Args:
            asked: index of the question.
            units: number of other texts.
            key: seed and index of the sample.
        """

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`; each sample has room for twice its right answer."""
        known = len(self.questions())
        if not 1 <= count <= known:
            raise RopewalkError(
                f"{self.name} has {known} questions, one per sample, and {count} samples are requested; give --samples "
                f"from 1 to {known}"
            )
        order = question_order(self.name, known, seed)
        answers = [self.built(order[index], self.fewest, (seed, index))[1] for index in range(count)]
        empty, *sizes = encoder.counts([("", ""), *((answer, "") for answer in answers)])
        rooms = [_power_of_two(max(LEAST_ROOM, 2 * (size - empty))) for size in sizes]
        found: dict[int, Iterator[Sample]] = {}
        shortest = []
        for room in dict.fromkeys(rooms):
            indices = [index for index, each in enumerate(rooms) if each == room]
            try:
                found[room] = self._of_room(room, encoder, length, indices, order, seed)
            except LengthTooShort as error:
                shortest.append(error.shortest)
        if shortest:
            raise LengthTooShort(self.name, length, max(shortest))
        return (replace(next(found[room]), index=index) for index, room in enumerate(rooms))

    def _of_room(
        self,
        room: int,
        encoder: PromptEncoder,
        length: int,
        indices: Sequence[int],
        order: Sequence[int],
        seed: int,
    ) -> Iterator[Sample]:
        """The samples with these indices, which have this room for an answer."""
        form = Form(self.suite, self.name, self.kind.metric, room, least_fill=0.99)

        def draft(at: int, units: int) -> Draft:
            return self.built(order[indices[at]], units, (seed, indices[at]))[0]

        return fitted_samples(form, encoder, length, len(indices), lambda length: draft, self.fewest)

    def prompt(
        self, texts: Sequence[str], right: Sequence[int], example: str, request: str
    ) -> tuple[str, list[list[int]]]:
        """The prompt, and the first and last characters of the right texts in it."""
        text, places = f"{self.kind.introduction}{BETWEEN}", []
        for at, each in enumerate(texts):
            if at in right:
                places.append([len(text), len(text) + len(each)])
            text += each + BETWEEN
        return f"{text}{example}{request}", places


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
