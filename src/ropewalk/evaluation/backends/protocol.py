"""What a model gives, whatever holds it: answers to prompts, and likelihoods of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ropewalk.attention.layout import Row


Send = Literal["auto", "ids", "text"]
"""How a server gets prompts: as token ids, as text, or as ids where it takes them."""

Progress = Callable[[int, int], None]
"""Called with the rows or samples that are done, and with how many there are."""


@dataclass(frozen=True)
class GenerationRequest:
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

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        """One answer a request, each as soon as it is there, in any order.

        Raises:
            RunFailure: if the rest cannot be answered; what was yielded stays valid.
        """


class Likelihoods(Protocol):
    """What a model thinks of tokens that are given: losses and likeliest tokens, in one forward pass a row."""

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise RopewalkError unless the model knows all tokens of a prompt, which has at least one."""

    def row_losses(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float64]]:
        """The losses of rows, in order.

        Args:
            rows: pattern ``full``.

        Yields:
            ``[total_length]`` in nats, 0 where there is no target.
        """

    def matches(self, prompts: Sequence[tuple[Sequence[int], int]], length: int) -> Iterator[list[bool]]:
        """Whether the model would say each token of a target, all tokens before it given.

        Args:
            prompts: ids of prompt and target, and the index of the target's first token, 1 or more.
            length: tokens for which a RoPE that depends on the length is fixed.

        Yields:
            One truth value a token of the target, prompt by prompt.
        """


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients while the context is open; then the mode that was."""
    import torch

    training = model.training
    model.eval()
    try:
        # Not inference_mode: index plans that attention keeps would be unfit for a later backward pass.
        with torch.no_grad():
            yield
    finally:
        model.train(training)
