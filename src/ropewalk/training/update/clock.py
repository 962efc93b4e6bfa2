"""Seconds of the parts of a training step, without a synchronisation with the device of their own."""

from __future__ import annotations

import time
from typing import Literal

import torch

Moment = Literal["begun", "computed", "updating", "updated"]


class StepClock:
    """Times a step's gradients and its update, on a GPU by events in the stream.

    A step reads its loss back, so its events before that have happened by then. Those of its update have happened when
    the next step reads its own, and are told then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[Moment, float | torch.cuda.Event] = {}
        self._update: tuple[float | torch.cuda.Event, float | torch.cuda.Event] | None = None

    def mark(self, moment: Moment) -> None:
        """Note that everything before this moment of the step has been done, or on a GPU, has been given to it."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks[moment] = event
        else:
            self._marks[moment] = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds of the step that has just ended, for a line of metrics.

        ``forward_backward`` are those of the gradients, with clipping. ``optimizer_update`` are those of the update of
        the weights: this step's, or on a GPU that of the step before. It is left out if there was no such update.
        """
        marks, self._marks = self._marks, {}
        update = (marks["updating"], marks["updated"]) if "updated" in marks else None
        if self._device.type == "cuda":
            update, self._update = self._update, update
        found = {"forward_backward": _between(marks["begun"], marks["computed"])}
        return found if update is None else found | {"optimizer_update": _between(*update)}


def _between(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    if isinstance(first, float):
        assert isinstance(last, float)
        return last - first
    assert not isinstance(last, float)
    # Milliseconds.
    return float(first.elapsed_time(last)) / 1000
