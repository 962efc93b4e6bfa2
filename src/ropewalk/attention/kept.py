"""Results of attention that a checkpointed layer keeps, so that its recomputation need not run the kernel again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from ropewalk.attention.engines.runs import Runs

Store = Callable[[Tensor], Callable[[], Tensor]]
"""Puts a tensor away, and returns what brings it back."""


@dataclass(frozen=True)
class Keeping:
    """What the checkpointed layers of a stage keep of their attention.

    Attributes:
        least: results of fewer keys a query, on average, are computed again.
        on_device: whether they stay on the device; otherwise they are where the layers' inputs are.
    """

    least: float
    on_device: bool = False

    def __str__(self) -> str:
        where = "on the GPU" if self.on_device else "beside the layer inputs"
        some = f" where a query sees {self.least:,g} keys or more on average" if self.least else ""
        return f"results of attention are kept {where}{some}"


class Kept:
    """What the attention of one checkpointed layer keeps from its forward to its recomputation.

    Attributes:
        least: results of fewer keys a query are not kept.
        store: where results are kept.
    """

    def __init__(self, least: float, store: Store) -> None:
        self.least = least
        self.store = store
        self._results: list[tuple[Callable[[], Tensor], Callable[[], Tensor]] | None] = []
        self._recomputing = False

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of the layer's forward and of its recomputation, as ``torch.utils.checkpoint`` takes them."""
        return self._active(False), self._active(True)

    @contextmanager
    def _active(self, recomputing: bool) -> Iterator[None]:
        self._recomputing = recomputing
        token = KEPT.set(self)
        try:
            yield
        finally:
            KEPT.reset(token)

    def results(
        self, compute: Callable[[], tuple[Tensor, Tensor]], runs: Runs, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp: computed, or in the recomputation those of the forward, in the order of the calls."""
        if self._recomputing:
            kept = self._results.pop(0)
            return compute() if kept is None else (kept[0](), kept[1]())
        out, m = compute()
        keep = keys_of_a_query(runs, window) >= self.least
        # Without the graph that autograd builds on the tensor itself, which would then keep itself alive.
        self._results.append((self.store(out.detach()), self.store(m.detach())) if keep else None)
        return out, m


def on_device(tensor: Tensor) -> Callable[[], Tensor]:
    """Keep a tensor where it is."""
    return lambda: tensor


KEPT: ContextVar[Kept | None] = ContextVar("kept", default=None)
"""What the layer in progress keeps; None outside checkpointed layers."""


def keys_of_a_query(runs: Runs, window: int | None = None) -> float:
    """Mean number of keys that a query of causal runs sees."""
    pairs = sum(map(_pairs, runs.queries, runs.keys))
    if window is not None:
        # Beyond the window, a query sees that many fewer keys.
        hidden = ((q, k - window) for q, k in zip(runs.queries, runs.keys, strict=True) if k > window)
        pairs -= sum(_pairs(min(q, k), k) for q, k in hidden)
    return pairs / max(1, sum(runs.queries))


def _pairs(queries: int, keys: int) -> int:
    """Pairs of the last queries of a causal sequence of so many keys with what they see."""
    return queries * keys - queries * (queries - 1) // 2
