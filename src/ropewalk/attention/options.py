"""AttentionOptions: the parameters of one layer's attention besides queries, keys, values and the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Locality:
    """Limit on how far back a query of a layer sees within its run.

    A run is a sequence that the model could process alone with the same result: the whole row under ``full``, a
    document under ``intra_document``, the anchor followed by a document under ``anchor``. The anchor therefore slides
    out of a window like any other token.

    Attributes:
        window: number of tokens that a query sees, including itself (Mistral, Gemma); None for no window.
        chunk: tokens per chunk; runs are cut into chunks, and a query sees only its own (Llama 4); None for no chunks.

    Raises:
        RopewalkError: if either is less than 1.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, tokens in (("window", self.window), ("chunk", self.chunk)):
            if tokens is not None and tokens < 1:
                raise RopewalkError(f"the {name} of an attention layer must be 1 token or more, got {tokens}")

    @property
    def reach(self) -> int | None:
        """The most tokens that a query sees, including itself; None if unlimited."""
        return min((each for each in (self.window, self.chunk) if each is not None), default=None)

    def within(self, length: int) -> Locality:
        """The locality that remains in runs of this length: a limit that covers the whole run becomes None."""
        window = None if self.window is None or self.window >= length else self.window
        chunk = None if self.chunk is None or self.chunk >= length else self.chunk
        return Locality(window, chunk)


EVERYTHING = Locality()
"""No window and no chunks: a query sees all earlier tokens of its run."""


def stacked_reach(layers: Sequence[Locality], length: int) -> int:
    """Number of tokens whose information can reach the last query through a stack of layers: an upper bound.

    The count includes the query's own token. A layer passes on what its keys received from the layers below, so a stack
    of windows reaches further than one: ``L`` windows of ``w`` tokens reach ``1 + L·(w - 1)``. Chunks of one size
    never reach beyond a chunk.

    Args:
        layers: how far back each layer sees, first to last.
        length: tokens of the run, at least 1.

    Example:
        >>> stacked_reach([Locality(window=4096)] * 32, 131072)
        131041
    """
    # Walk from the last layer down: `earliest` is the first token whose state still matters to the query.
    earliest = length - 1
    for layer in reversed(layers):
        if layer.window is None and layer.chunk is None:
            return length
        back = earliest + 1 - layer.window if layer.window is not None else 0
        start = earliest - earliest % layer.chunk if layer.chunk is not None else 0
        earliest = max(0, back, start)
    return length - earliest


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Parameters of one layer's attention.

    Attributes:
        scale: multiplier of q·k; None for 1/sqrt(head_dim).
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2); None for no soft cap.
        window: largest number of tokens that a query sees, including its own (sliding window); None for no limit.
            :attr:`PackedLayout.run_index` numbers the tokens.
        chunk: number of tokens of a chunk (Llama 4); a query sees only keys of its own chunk. None for no chunks. The
            first chunk begins at ``run_index`` 0.
        sinks: ``[num_heads]``, a learned score for each head, which enters the softmax but has no value vector
            (gpt-oss); None for no sinks.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: Tensor | None = None

    @cached_property
    def locality(self) -> Locality:
        """Window and chunk as one hashable value, which keys the cache of plans."""
        return Locality(self.window, self.chunk)

    def scale_of(self, head_dim: int) -> float:
        """The multiplier of q·k for this head_dim."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def of_heads(self, heads: slice) -> AttentionOptions:
        """The same options for a subset of the heads: each head has its own sink."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    def check_sinks(self, query: Tensor) -> None:
        """Raise unless there are no sinks, or one for each head of ``[batch, num_heads, length, head_dim]``."""
        if self.sinks is not None and self.sinks.shape != query.shape[1:2]:
            raise RopewalkError(
                f"attention sinks must have the shape (num_heads,) = ({query.shape[1]},), got {tuple(self.sinks.shape)}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether scores enter the softmax unchanged, as torch's fused kernels compute it."""
        return self.softcap is None and self.sinks is None


PLAIN = AttentionOptions()
"""The options of a Llama layer: causal attention over the whole run, scaled by 1/sqrt(head_dim)."""
