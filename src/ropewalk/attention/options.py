"""AttentionOptions: what one layer asks of its attention beyond queries, keys, values and the layout."""

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
    """How far back a query of a layer sees inside its run.

    A run is the sequence on which the model would compute the same by itself: the whole row under ``full``, a document
    under ``intra_document``, the anchor followed by a document under ``anchor``. So an anchor leaves the window as any
    other token does.

    Attributes:
        window: tokens that a query sees, itself included (Mistral, Gemma); None for all before it.
        chunk: a run is cut into chunks of so many tokens, and a query sees those of its own (Llama 4); None for none.

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
        """The most tokens that a query sees, itself included; None for all."""
        return min((each for each in (self.window, self.chunk) if each is not None), default=None)

    def within(self, length: int) -> Locality:
        """What is left of it in runs of so many tokens: a window that holds them all is none."""
        window = None if self.window is None or self.window >= length else self.window
        chunk = None if self.chunk is None or self.chunk >= length else self.chunk
        return Locality(window, chunk)


EVERYTHING = Locality()
"""Of a layer whose queries see all of their run before them."""


def stacked_reach(layers: Sequence[Locality], length: int) -> int:
    """Tokens that reach the last query of a run through a stack of layers, itself included: an upper limit.

    A layer passes on what its keys have from the layers below, so a stack of windows reaches further than one of them:
    ``L`` windows of ``w`` tokens reach ``1 + L·(w - 1)``. Chunks of one size never reach beyond a chunk.

    Args:
        layers: how far back each layer sees, first to last.
        length: tokens of the run, at least 1.

    Example:
        >>> stacked_reach([Locality(window=4096)] * 32, 131072)
        131041
    """
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
    """What one layer asks of its attention.

    Attributes:
        scale: multiplier of q·k; 1/sqrt(head_dim) if None.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2); None for none.
        window, chunk: how far back a query sees in its run, as of :class:`Locality`; None for all of it.
        sinks: ``[num_heads]``, a learned score for each head that takes part in the softmax and has no value
            (gpt-oss); None for none.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: Tensor | None = None

    @cached_property
    def locality(self) -> Locality:
        """How far back a query sees, as a value that plans are kept by."""
        return Locality(self.window, self.chunk)

    def scale_of(self, head_dim: int) -> float:
        """The multiplier of q·k for heads of this width."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def of_heads(self, heads: slice) -> AttentionOptions:
        """For some of the heads: each has a sink of its own."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    def of_runs(self) -> AttentionOptions:
        """For runs that are cut into chunks already."""
        return replace(self, chunk=None)

    def check_sinks(self, query: Tensor) -> None:
        """Raise if there are sinks, and not one for each head of ``[batch, num_heads, length, head_dim]``."""
        if self.sinks is not None and self.sinks.shape != query.shape[1:2]:
            raise RopewalkError(
                f"attention sinks must be [num_heads] = [{query.shape[1]}], got {tuple(self.sinks.shape)}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether scores go into the softmax as they are: what torch's fused kernels compute."""
        return self.softcap is None and self.sinks is None


PLAIN = AttentionOptions()
"""Of a layer of Llama: everything before a query, scaled by the root of the head's width."""
