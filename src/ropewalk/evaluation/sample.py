"""Samples: what is asked, what answers it, and how the answer is judged. Plain values that go to JSON and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ropewalk.evaluation.prompt import PromptEncoder


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        suite: the benchmark, as on the command line.
        task: the task within the suite.
        length: tokens that prompt and answer may take together.
        index: number of the sample among those of its task and length.
        text: what the model is told, without special tokens; the user's turn of a chat.
        answer_prefix: the beginning of the answer, which the model goes on from; often empty.
        references: what a right answer holds.
        metric: how an answer is judged, a name in ``scoring.METRICS``.
        max_new_tokens: room for the answer.
        prompt_tokens: tokens of the whole prompt, special tokens and answer prefix included.
        bos_count: BOS tokens among them.
        details: facts about this sample, JSON values, such as the depth of a needle.
    """

    suite: str
    task: str
    length: int
    index: int
    text: str
    answer_prefix: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    prompt_tokens: int
    bos_count: int
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What tells a sample from all others of a run."""
        return self.suite, self.task, self.length, self.index

    @property
    def fill(self) -> float:
        """Share of the length that prompt and answer take."""
        return (self.prompt_tokens + self.max_new_tokens) / self.length

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        # Not asdict, which copies a prompt of a million tokens character by character.
        return {**self.__dict__, "references": list(self.references), "details": dict(self.details)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sample:
        """What :meth:`to_json` wrote."""
        return cls(**{**value, "references": tuple(value["references"])})


class Task(Protocol):
    """A benchmark's task: it makes samples. One frozen dataclass each; its fields are its settings."""

    @property
    def suite(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def max_new_tokens(self) -> int: ...

    def settings(self) -> Mapping[str, Any]:
        """JSON values that the samples depend on besides tokenizer, length, count and seed.

        Material that is read from files comes in by its digest.
        """

    def unavailable(self) -> str | None:
        """Why the task cannot run here (missing essays, say), or None."""

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """``count`` samples of a length, in order of their index, made while they are asked for.

        A sample depends on the encoder, the length, the seed and its own index, and on nothing else.

        Raises:
            RopewalkError: at once, before the first sample is asked for, if the length is too short; the
                message names the task, the length and the shortest length possible.
        """
