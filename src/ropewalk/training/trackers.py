"""Experiment trackers, through accelerate: it knows them all and how each wants to be talked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError

Listener = Callable[[dict[str, Any], int], None]
"""Takes the values of a step and the step's number over all stages."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise if the package of a tracker is missing; ask before a run starts."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in available:
            raise RopewalkError(f"tracker {name} is not installed; pip install {name}")


@contextmanager
def tracking(names: Sequence[str], folder: Path, config: dict[str, Any]) -> Iterator[Listener | None]:
    """A function that logs to every tracker named; None where none is.

    Args:
        names: trackers by accelerate's names (wandb, tensorboard, trackio, …).
        folder: where trackers that write files put them.
        config: flat values that describe the run.

    Raises:
        RopewalkError: if a tracker's package is not installed; the message names it.
    """
    if not names:
        yield None
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    require_trackers(names)
    trackers = []
    for name in names:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        arguments = {"logging_dir": str(folder)} if tracker_class.requires_logging_directory else {}
        tracker = tracker_class("ropewalk", **arguments)
        if hasattr(tracker, "start"):
            tracker.start()
        tracker.store_init_configuration(config)
        trackers.append(tracker)

    def log(values: dict[str, Any], step: int) -> None:
        for tracker in trackers:
            tracker.log(values, step=step)

    try:
        yield log
    finally:
        for tracker in trackers:
            tracker.finish()
