"""Interfaces of all backends: answers to prompts, and likelihoods of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ropewalk.attention.layout import Row


Send = Literal["auto", "ids", "text"]
"""Form in which a server gets prompts: ``ids``, ``text``, or ``auto`` for ids if the server accepts them."""

Endpoint = Literal["completions", "chat"]
"""Endpoint of a server: ``chat`` gets turns, and applies the chat template itself."""

THOUGHTS, END_OF_THOUGHTS = "<think>", "</think>"
"""Marks around the thoughts of Qwen3, DeepSeek-R1 and most other thinking models."""

TRIAL = "The grass is green."
"""Text of the requests that find out how a server reads prompts."""

PAIR = (("user", TRIAL), ("assistant", TRIAL))
"""Two turns of a chat with this text."""

Progress = Callable[[int, int], None]
"""Called with the number of completed rows or samples, and the total."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to answer.

    Attributes:
        input_ids: the whole prompt, including special tokens.
        max_new_tokens: maximum number of tokens of the answer.
        length: maximum number of tokens of prompt and answer together. A length-dependent RoPE is fixed at this
            length, so that an answer does not depend on the rest of its batch.
        turns: the same prompt as roles and texts, for a server that applies the chat template itself; else empty.
        content_tokens: tokens of ``input_ids`` without those of the template around the texts.
        around_earlier: tokens of the template around all turns but the last.
        pair_tokens: tokens that :data:`PAIR` has in the template, by which a server's own is compared with it; 0 for a
            single turn.
        text: the whole prompt as text; needed if ``input_ids`` are estimates.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    length: int
    turns: tuple[tuple[str, str], ...] = ()
    content_tokens: int = 0
    around_earlier: int = 0
    pair_tokens: int = 0
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes:
        index: index of the request in the given sequence, from 0.
        text: the generated text, without the prompt and special tokens.
        new_tokens: number of generated tokens; None if a server does not report it.
        finished: True if the model ended the answer itself, False if it reached the limit; None if unknown.
    """

    index: int
    text: str
    new_tokens: int | None = None
    finished: bool | None = None


@dataclass(frozen=True)
class Rejection:
    """A prompt that a server rejects, while it answers others.

    Attributes:
        index: index of the request in the given sequence, from 0.
        reason: the server's reason, on one line.
    """

    index: int
    reason: str


class Backend(Protocol):
    """Answers prompts greedily."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Description of the backend for the record: kind, and dtype or address."""

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer | Rejection]:
        """Yield one answer or rejection per request as soon as it is available, in any order.

        Raises:
            RunFailure: if the remaining requests cannot be answered; answers yielded before stay valid.
        """


@runtime_checkable
class HasContext(Protocol):
    """A backend that may know of a limit that the model's config does not state, as a server does."""

    def require_length(self, length: int) -> None:
        """Raise RopewalkError if prompt and answer of so many tokens together do not fit."""


@runtime_checkable
class ReportsTokens(Protocol):
    """A backend that counts the tokens of a prompt without generating more than one, as a server does."""

    def tokens_read(self, text: str, turns: Sequence[tuple[str, str]]) -> int | None:
        """Tokens of a prompt, given as text and as turns; None if they are not reported."""


class Likelihoods(Protocol):
    """Likelihoods of given tokens: losses and most likely tokens, with one forward pass per row."""

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise RopewalkError if a prompt is empty or has token ids outside the model's vocabulary."""

    def row_losses(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float64]]:
        """Compute the losses of rows, in order.

        Args:
            rows: rows of pattern ``full``.

        Yields:
            For each row its losses ``[total_length]`` in nats, 0 at positions without a target.
        """

    def matches(self, prompts: Sequence[tuple[Sequence[int], int]], length: int) -> Iterator[list[bool]]:
        """Check for each target token whether it is the most likely one after all tokens before it.

        Args:
            prompts: token ids of prompt and target, and the index of the first target token, at least 1.
            length: tokens; a length-dependent RoPE is fixed at this length.

        Yields:
            For each prompt one boolean per target token.
        """


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode without gradients inside the context, and restore its mode afterwards."""
    # Imported here, because a server needs no torch.
    import torch

    training = model.training
    model.eval()
    try:
        # Not inference_mode: attention caches index tensors here that a later backward pass could not use.
        with torch.no_grad():
            yield
    finally:
        model.train(training)
