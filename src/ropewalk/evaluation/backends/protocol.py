"""What answers prompts: a model in memory, or a server. Both are asked alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        input_ids: the whole prompt, special tokens included.
        max_new_tokens: most tokens of the answer.
        length: tokens that prompt and answer may take together; a RoPE that depends on the length is fixed
            by it, so that an answer does not depend on what else is in its batch.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    length: int


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        index: which request it answers, counted from 0 in the sequence that was given.
        text: the new tokens alone, without special tokens.
        new_tokens: how many; None where a server does not say.
        finished: whether the model ended by itself and not for want of room; None where unknown.
    """

    index: int
    text: str
    new_tokens: int | None = None
    finished: bool | None = None


class Backend(Protocol):
    """Answers prompts greedily."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What answers, in words for the record: kind, dtype or address."""

    def answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """One answer a request, each as soon as it is there, in any order.

        Raises:
            RunFailure: if the rest cannot be answered; what was yielded stays valid.
        """
