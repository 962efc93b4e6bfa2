"""The run's metrics: one JSON object a line, and the same values to the trackers that were asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import replacing, write_text
from ropewalk.io.json_lines import append_line, check_types, read_lines

LOST = "metrics.lost.jsonl"
"""A file that the user puts beside the log to go on without steps that are missing from it."""

LARGEST = 2**63 - 1
"""Of a step and of a count of tokens: what the figures draw."""


class MetricsLog:
    """``metrics.jsonl`` of a run: each step of each stage once, in order."""

    def __init__(self, path: Path, listener: Listener | None = None) -> None:
        self.path = path
        self.listener = listener

    def read(self) -> list[dict[str, Any]]:
        """All lines; an unfinished last one is passed over.

        Raises:
            RopewalkError: if the file cannot be read, or naming a line that is damaged or out of order.
        """
        before = (0, 0)

        def parse(number: int, values: dict[str, Any]) -> dict[str, Any]:
            nonlocal before
            for key, least in (("stage", 0), ("step", 1), ("tokens", 0)):
                if type(values[key]) is not int or not least <= values[key] <= LARGEST:
                    raise ValueError(f"{key} is {values[key]!r}, and not a whole number from {least} on")
            check_types(values, {"loss": (float, type(None))})
            if (place := (values["stage"], values["step"])) <= before:
                raise ValueError(f"{_step(*place)} stands after {_step(*before)}")
            before = place
            return values

        lost = self.path.with_name(LOST)
        return list(
            read_lines(
                self.path, parse, f"restore the file, or rename it to {lost} to go on without its steps"
            )
        )

    def check(self, done: Sequence[int]) -> str | None:
        """Whether every step is there that a checkpoint knows; the file is left as it is.

        Args:
            done: steps of each stage, from the first on, that the checkpoint knows.

        Returns:
            A sentence for the user where steps are missing and ``metrics.lost.jsonl`` says that they may be.

        Raises:
            RopewalkError: if the log is damaged, cannot be read, or lacks steps that are done.
        """
        there = {(line["stage"], line["step"]) for line in self.read()}
        missing = [
            (stage, step)
            for stage, steps in enumerate(done)
            for step in range(1, steps + 1)
            if (stage, step) not in there
        ]
        if not missing:
            return None
        lost = self.path.with_name(LOST)
        told = f"{self.path} lacks {len(missing)} of the {sum(done)} steps that are done, from {_step(*missing[0])} on"
        if lost.exists():
            return f"{told}, as {lost.name} allows"
        if self._is_unfinished():
            told += "; its last line is passed over because it does not end with a newline"
        raise RopewalkError(f"{told}; restore the file, or go on without them by: touch {lost}")

    def rewind(self, done: Sequence[int], dropped: Path) -> str | None:
        """Drop the steps that come after a checkpoint; a resumed run makes them again.

        Args:
            done: as for :meth:`check`, which comes first.
            dropped: a log that their lines are appended to.

        Returns:
            A sentence for the user where there are such steps.

        Raises:
            RopewalkError: if a log is damaged, or cannot be read or written; then no line is lost.
        """
        kept: list[dict[str, Any]] = []
        again: list[dict[str, Any]] = []
        for line in self.read():
            known = line["stage"] < len(done) and line["step"] <= done[line["stage"]]
            (kept if known else again).append(line)
        if not again:
            return None
        with replacing(dropped) as temporary:
            earlier = dropped.read_bytes() if dropped.exists() else b""
            temporary.write_bytes(earlier + _lines(again).encode())
        write_text(self.path, _lines(kept))
        places = [_step(line["stage"], line["step"]) for line in again]
        which = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        return f"{which} came after the checkpoint; what {self.path.name} said of them is kept in {dropped}"

    def _is_unfinished(self) -> bool:
        """Whether the last line has no end."""
        try:
            with self.path.open("rb") as file:
                if not file.seek(0, os.SEEK_END):
                    return False
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except OSError:
            return False

    def append(self, values: dict[str, Any], global_step: int) -> None:
        """Write one step and hand it to the trackers.

        Raises:
            RunFailure: if it cannot be written; the lines before it stay.
        """
        append_line(self.path, values)
        if self.listener is not None:
            # Trackers draw numbers; what is there for each router stays in the file.
            drawn = {k: v for k, v in values.items() if v is not None and not isinstance(v, dict)}
            self.listener(drawn, global_step)


def _lines(values: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in values)


def _step(stage: int, step: int) -> str:
    return f"step {step} of stage {stage + 1}"


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
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    require_trackers(names)
    # Most trackers write to accelerate's log when they start, which raises before this.
    PartialState()
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
