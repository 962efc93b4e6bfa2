"""The progress of a search, as a bar."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

from ropewalk.io.progress import Advance, Reporter

MOST_SHOWN = 20.0
"""Nats a token: beyond, a perplexity says nothing."""


def search_progress(
    reporter: Reporter, label: str, budget: int, stack: ExitStack
) -> Callable[[int, float], None]:
    """The progress of a search, drawn as a bar that begins with the first new forward.

    The baselines before it, and what a log holds, would spoil its time left.

    Args:
        reporter: where it is drawn.
        label: of the bar.
        budget: forwards.
        stack: closes the bar.

    Returns:
        What a search calls with the forwards so far and the best objective in nats.
    """
    bars: list[Advance] = []
    before: list[int] = []

    def forward(done: int, best: float) -> None:
        if not bars:
            before.append(done - 1)
            said = f"{label}, after {before[0]:,}" if before[0] else label
            bars.append(stack.enter_context(reporter.bar(said, budget - before[0])))
        reached = (
            f"best perplexity {math.exp(best):.4g}" if best < MOST_SHOWN else "no candidate on all rows yet"
        )
        bars[0](done - before[0], f"forwards, {reached}")

    return forward
