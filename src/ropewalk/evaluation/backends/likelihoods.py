"""The likelihoods of a model in memory: losses of rows and of windows over documents, and the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from ropewalk.models.generation import unpinned_methods
from ropewalk.models.losses import OutputHead, chunked_token_losses, decoder_of, token_losses
from ropewalk.rope import RotaryEmbedding

RowLosses = Callable[[Sequence[Row]], Iterable[NDArray[np.float64]]]
"""What gives the losses of rows, in order: ``[total_length]`` each in nats, 0 where there is no target."""


@dataclass(frozen=True, eq=False)
class InMemoryLikelihoods:
    """What a model in this process gives, one forward pass a row or prompt.

    Attributes:
        model: a model from ``load_model``; its training mode is left as it was.
        prefill_chunk: tokens of a prompt that go through the model at once.
    """

    model: Any
    prefill_chunk: int = PREFILL_CHUNK

    @cached_property
    def head(self) -> OutputHead:
        """The model's output head, found where losses are first asked for."""
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
            yield losses

    def matches(self, prompts: Sequence[tuple[Sequence[int], int]], length: int) -> Iterator[list[bool]]:
        """See :class:`~ropewalk.evaluation.backends.Likelihoods`."""
        for ids, start in prompts:
            yield argmax_matches(self.model, ids, start, length, self.prefill_chunk)


def has_target(row: Row) -> NDArray[np.bool_]:
    """Where a row has something to score, ``[total_length]``."""
    return (row.labels != IGNORED).numpy()


def check_rows(rows: Sequence[Row]) -> None:
    """Raise where there are no rows, or one in which the index of a token is not how many came before it."""
    if not rows:
        raise RopewalkError("perplexity needs at least one row, got none")
    for row in rows:
        if row.layout.pattern != "full":
            raise RopewalkError(
                f"perplexity by position needs rows of pattern full, got {row.layout.pattern}"
            )


def row_losses(
    model: Any, head: OutputHead, row: Row, prefill_chunk: int | None = None
) -> NDArray[np.float64]:
    """Losses in nats, ``[total_length]``, 0 where there is no target.

    ``prefill_chunk`` as in :func:`causal_losses`; None for one pass with the row's layout.
    """
    ids, labels = row.input_ids[None].to(model.device), row.labels[None].to(model.device)
    if prefill_chunk is None:
        losses = token_losses(model, ids, labels, [row.layout], head)[0]
    else:
        losses = causal_losses(model, head, ids, labels, prefill_chunk)[0]
    found: NDArray[np.float64] = losses.double().cpu().numpy()
    return found


def causal_losses(
    model: Any, head: OutputHead, input_ids: Tensor, labels: Tensor, prefill_chunk: int | None = None
) -> Tensor:
    """Losses of plain causal sequences of one length, as a forward pass over each alone gives them.

    Logits exist only for scored positions and a few at a time. In chunks, so do all hidden states: of the whole
    length there are keys and values alone. Attention is the model's own, sliding windows included.

    Args:
        model: a causal decoder, in evaluation mode and without gradients.
        head: its output head.
        input_ids: int64 ``[batch, length]``, on the model's device.
        labels: int64 ``[batch, length]``, already shifted; ``IGNORED`` where nothing is scored.
        prefill_chunk: tokens of a pass, of which each attends to those before it through a cache; None for one
            pass. Losses are equal within rounding. A RoPE that depends on the length is fixed by the whole one.

    Returns:
        float64 ``[batch, length]`` in nats, 0 where nothing is scored.
    """
    length = input_ids.shape[1]
    losses = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    decoder = decoder_of(model)
    if prefill_chunk is None or prefill_chunk >= length:
        _score(losses, decoder(input_ids, use_cache=False).last_hidden_state, labels, head)
        return losses
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    pieces = zip(*(each.split(prefill_chunk, dim=1) for each in (losses, input_ids, labels)), strict=True)
    with _rope_fixed(model, length):
        for losses_of_piece, ids, targets in pieces:
            hidden = decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state
            _score(losses_of_piece, hidden, targets, head)
    return losses


def _score(losses: Tensor, hidden: Tensor, labels: Tensor, head: OutputHead) -> None:
    """Write the losses of the labels that there are."""
    scored = labels != IGNORED
    losses[scored] = chunked_token_losses(hidden[scored], labels[scored], head).double()


@contextmanager
def _rope_fixed(model: Any, length: int) -> Iterator[None]:
    """Every chunk with the frequencies of the whole sequence, or keys of the first carry others than the last's."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                stack.enter_context(module.pinned(module.total_length or length))
        yield


def check_prefill_chunk(model: Any, prefill_chunk: int | None) -> None:
    """Raise where a sequence cannot be read in such chunks.

    Raises:
        RopewalkError: if a chunk has no token.
        EngineError: if the model's RoPE depends on the length and is transformers' own, which takes that of the
            chunk for it.
    """
    if prefill_chunk is None:
        return
    if prefill_chunk < 1:
        raise RopewalkError(f"prefill_chunk must be 1 token or more, got {prefill_chunk}")
    dependent = unpinned_methods(model)
    if dependent:
        raise EngineError(
            f"transformers' own RoPE of {type(model).__name__} is {dependent[0]}, which would change from chunk to "
            f"chunk of {prefill_chunk} tokens; load the model with exact_rope=True or leave prefill_chunk out"
        )


@dataclass(frozen=True, eq=False)
class WindowReader:
    """A model that reads windows of documents, each as a forward pass over it alone does.

    Attributes:
        model: a causal decoder from ``load_model``.
        head: its output head.
        bos_id: put in front of every window; None for tokenizers that have none.
        batch_size: windows of equal length in one pass.
        prefill_chunk: tokens of a pass, as in :func:`causal_losses`.
    """

    model: Any
    head: OutputHead
    bos_id: int | None = None
    batch_size: int = 1
    prefill_chunk: int | None = None

    @property
    def special(self) -> int:
        """Special tokens of a window."""
        return 0 if self.bos_id is None else 1

    def check(self) -> None:
        """Raise where windows cannot be read so.

        Raises:
            RopewalkError: if a pass has no window or no token.
            EngineError: if the model cannot be read in chunks.
        """
        if self.batch_size < 1:
            raise RopewalkError(f"batch_size must be 1 or more, got {self.batch_size}")
        check_prefill_chunk(self.model, self.prefill_chunk)

    def losses(self, windows: Sequence[tuple[Ids, Window]]) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Losses of windows' scored tokens; the model is in evaluation mode and without gradients.

        Args:
            windows: each with its document.

        Yields:
            A window's number among those given, and ``[end - first]`` in nats. The longest windows come first: what
            does not fit into memory fails at once.
        """
        # In batches of equal length nothing is padded, so that no window depends on what is beside it.
        of_length: dict[int, list[int]] = {}
        for number, (_, window) in enumerate(windows):
            of_length.setdefault(window.end - window.start, []).append(number)
        for same in (of_length[tokens] for tokens in sorted(of_length, reverse=True)):
            for at in range(0, len(same), self.batch_size):
                batch = same[at : at + self.batch_size]
                rows = [window_row(*windows[number], self.bos_id) for number in batch]
                ids, labels = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
                ids, labels = ids.to(self.model.device), labels.to(self.model.device)
                losses = causal_losses(self.model, self.head, ids, labels, self.prefill_chunk).cpu().numpy()
                for number, row in zip(batch, losses, strict=True):
                    window = windows[number][1]
                    yield number, row[window.first - window.end - 1 : -1]


def window_row(document: Ids, window: Window, bos_id: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """A window as a row: token ids with BOS in front, and labels, shifted; both int64 ``[length]``."""
    head = [] if bos_id is None else [bos_id]
    ids = np.concatenate([head, document[window.start : window.end]]).astype(np.int64)
    labels = np.full_like(ids, IGNORED)
    scored = window.end - window.first
    labels[-scored - 1 : -1] = ids[-scored:]
    return ids, labels
