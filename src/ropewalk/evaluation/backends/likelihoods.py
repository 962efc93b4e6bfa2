"""Likelihoods of a model in memory: losses of rows and of document windows, and the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.attention.layout import IGNORED, Row
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.backends.in_memory import PREFILL_CHUNK, argmax_matches, check_ids
from ropewalk.evaluation.backends.protocol import evaluating
from ropewalk.evaluation.rows import Ids, Window
from ropewalk.models.attention.kv_cache import cache_argument
from ropewalk.models.compute.losses import OutputHead, chunked_token_losses, decoder_of, token_losses
from ropewalk.models.rope.generation import fixed_length, generating, unpinned_methods

RowLosses = Callable[[Sequence[Row]], Iterable[NDArray[np.float64]]]
"""Computes the losses of rows, in order: ``[total_length]`` each in nats, 0 at positions without a target."""


@dataclass(frozen=True, eq=False)
class InMemoryLikelihoods:
    """Likelihoods of a model in this process, with one forward pass per row or prompt.

    Attributes:
        model: a model from ``load_model``; its training mode is left unchanged.
        prefill_chunk: tokens of a prompt per forward pass.
    """

    model: Any
    prefill_chunk: int = PREFILL_CHUNK

    @cached_property
    def head(self) -> OutputHead:
        """The model's output head, located on first use."""
        return OutputHead.of(self.model)

    def check_ids(self, ids: Sequence[int]) -> None:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        check_ids(self.model, ids)

    def row_losses(self, rows: Sequence[Row]) -> Iterator[NDArray[np.float64]]:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        check_rows(rows)
        for row in rows:
            with evaluating(self.model):
                losses = row_losses(self.model, self.head, row)
            # Outside the context: while the caller works with the losses, the model has its own mode.
            yield losses

    def matches(self, prompts: Sequence[tuple[Sequence[int], int]], length: int) -> Iterator[list[bool]]:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        for ids, start in prompts:
            yield argmax_matches(self.model, ids, start, length, self.prefill_chunk)


def has_target(row: Row) -> NDArray[np.bool_]:
    """Return a mask ``[total_length]`` of the positions with a target."""
    return (row.labels != IGNORED).numpy()


def check_rows(rows: Sequence[Row]) -> None:
    """Raise if there are no rows, or if a row restarts positions, so that an index is not the context length."""
    if not rows:
        raise RopewalkError("perplexity needs at least one row, got none")
    for row in rows:
        if row.layout.pattern != "full":
            raise RopewalkError(
                f"perplexity by position needs rows with the pattern 'full', got {row.layout.pattern!r}"
            )


def row_losses(model: Any, head: OutputHead, row: Row) -> NDArray[np.float64]:
    """Compute the losses of a row in nats, ``[total_length]``, 0 at positions without a target."""
    ids, labels = row.input_ids[None].to(model.device), row.labels[None].to(model.device)
    losses = token_losses(model, ids, labels, [row.layout], head)[0]
    found: NDArray[np.float64] = losses.double().cpu().numpy()
    return found


def causal_losses(
    model: Any, head: OutputHead, input_ids: Tensor, labels: Tensor, prefill_chunk: int | None = None
) -> Tensor:
    """Compute the losses of plain causal sequences of equal length, as a forward pass over each of them alone would.

    Logits are computed only for scored positions, a few at a time. With chunks, hidden states exist for one chunk at
    a time too, so only keys and values span the whole length. Attention is the model's own, including sliding windows.

    Args:
        model: a causal decoder, in evaluation mode and without gradients.
        head: the model's output head.
        input_ids: int64 ``[batch, length]``, on the model's device.
        labels: int64 ``[batch, length]``, already shifted; ``IGNORED`` at positions that are not scored.
        prefill_chunk: tokens per forward pass; later passes attend to earlier ones through a cache. None for a single
            pass. Losses are equal up to rounding. A length-dependent RoPE is fixed at the whole length.

    Returns:
        float64 ``[batch, length]`` in nats, 0 at positions that are not scored.
    """
    length = input_ids.shape[1]
    losses = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    decoder = decoder_of(model)
    if prefill_chunk is None or prefill_chunk >= length:
        _score(losses, decoder(input_ids, use_cache=False).last_hidden_state, labels, head)
        return losses
    from transformers import DynamicCache

    # The decoder's own config, because its layer types decide which layers keep a sliding window only.
    cache = DynamicCache(config=model.config.get_text_config())
    # Views: what is written into a piece of the losses is written into the whole tensor.
    pieces = zip(*(each.split(prefill_chunk, dim=1) for each in (losses, input_ids, labels)), strict=True)
    with generating(model, fixed_length(model) or length):
        for losses_of_piece, ids, targets in pieces:
            # The cache holds earlier pieces, so each piece sees what it would see in one pass, at a fraction
            # of its memory.
            hidden = decoder(ids, **cache_argument(cache), use_cache=True).last_hidden_state
            _score(losses_of_piece, hidden, targets, head)
    return losses


def _score(losses: Tensor, hidden: Tensor, labels: Tensor, head: OutputHead) -> None:
    """Write the losses of the scored positions into ``losses``."""
    scored = labels != IGNORED
    # Sums of a million losses lose digits in float32, so losses are kept in float64.
    losses[scored] = chunked_token_losses(hidden[scored], labels[scored], head).double()


def check_prefill_chunk(model: Any, prefill_chunk: int | None) -> None:
    """Raise if the model cannot read a sequence in chunks.

    Raises:
        RopewalkError: if ``prefill_chunk`` is less than 1.
        EngineError: if a length-dependent RoPE runs in transformers' rotary module, which would use the length of
            the chunk.
    """
    if prefill_chunk is None:
        return
    if prefill_chunk < 1:
        raise RopewalkError(f"prefill_chunk must be 1 token or more, got {prefill_chunk}")
    dependent = unpinned_methods(model)
    if dependent:
        raise EngineError(
            f"{type(model).__name__} uses transformers' own RoPE of type {dependent[0]}, whose angles would change "
            f"between chunks of {prefill_chunk} tokens; load the model with exact_rope=True (without "
            "--no-exact-rope), or set prefill_chunk to None"
        )


@dataclass(frozen=True, eq=False)
class WindowReader:
    """Scores windows of documents with a model; the result is that of a forward pass over each window alone.

    Attributes:
        model: a causal decoder from ``load_model``.
        head: the model's output head.
        bos_id: token id before every window; None if the tokenizer has no BOS.
        prefill_chunk: tokens per forward pass, see :func:`causal_losses`.
    """

    model: Any
    head: OutputHead
    bos_id: int | None = None
    prefill_chunk: int | None = None

    @property
    def special(self) -> int:
        """Number of special tokens per window."""
        return 0 if self.bos_id is None else 1

    def check(self) -> None:
        """Raise if the settings do not work with the model.

        Raises:
            RopewalkError: if ``prefill_chunk`` is less than 1.
            EngineError: if the model cannot read a sequence in chunks.
        """
        check_prefill_chunk(self.model, self.prefill_chunk)

    def losses(self, windows: Sequence[tuple[Ids, Window]]) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Compute the losses of the scored tokens; the model must be in evaluation mode and without gradients.

        Args:
            windows: pairs of a document and a window over it.

        Yields:
            The index of a window in ``windows``, and its losses ``[end - first]`` in nats. The longest windows come
            first, so that running out of memory shows immediately.
        """
        longest_first = sorted(range(len(windows)), key=lambda number: -_tokens(windows[number][1]))
        for number in longest_first:
            document, window = windows[number]
            row = (torch.from_numpy(each)[None] for each in window_row(document, window, self.bos_id))
            ids, labels = (each.to(self.model.device) for each in row)
            losses = causal_losses(self.model, self.head, ids, labels, self.prefill_chunk)[0].cpu().numpy()
            # Counted from the end, so that a BOS in front makes no difference.
            yield number, losses[window.first - window.end - 1 : -1]


def _tokens(window: Window) -> int:
    return window.end - window.start


def window_row(document: Ids, window: Window, bos_id: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a window's token ids, with BOS in front, and its shifted labels; both int64 ``[length]``."""
    head = [] if bos_id is None else [bos_id]
    # To numpy, an empty head is an array of float64, which makes the joined ids float64 too.
    ids = np.concatenate([head, document[window.start : window.end]]).astype(np.int64)
    labels = np.full_like(ids, IGNORED)
    # The position before a token predicts it, hence one to the left of the scored tokens.
    scored = window.end - window.first
    labels[-scored - 1 : -1] = ids[-scored:]
    return ids, labels
