"""Metrics of a run: one JSON object per line in ``metrics.jsonl``, and the same values in experiment trackers."""

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
"""Name of a file that the user creates next to the log to resume although the log lacks steps."""

LARGEST = 2**63 - 1
"""Largest step and token count that figures can draw."""


class MetricsLog:
    """``metrics.jsonl`` of a run: one line per step and stage, in order."""

    def __init__(self, path: Path, listener: Listener | None = None) -> None:
        self.path = path
        self.listener = listener

    def read(self) -> list[dict[str, Any]]:
        """Read all lines, ignoring an unfinished last one.

        Raises:
            RopewalkError: if the file cannot be read, or if a line is damaged or out of order; the message names it.
        """
        # Steps count from 1, so every valid place comes after this one.
        before = (0, 0)

        def parse(number: int, values: dict[str, Any]) -> dict[str, Any]:
            nonlocal before
            for key, least in (("stage", 0), ("step", 1), ("tokens", 0)):
                # Not isinstance: True is an int to Python.
                if type(values[key]) is not int or not least <= values[key] <= LARGEST:
                    raise ValueError(f"{key} must be a whole number of at least {least}, got {values[key]!r}")
            check_types(values, {"loss": (float, type(None))})
            if (place := (values["stage"], values["step"])) <= before:
                raise ValueError(f"{_step(*place)} comes after {_step(*before)}")
            before = place
            return values

        lost = self.path.with_name(LOST)
        return list(
            read_lines(
                self.path, parse, f"restore the file, or rename it to {lost} to resume without its steps"
            )
        )

    def check(self, done: Sequence[int]) -> str | None:
        """Check that the log has every step before a checkpoint, without changing the file.

        Args:
            done: completed steps of each stage at the checkpoint, starting with the first stage.

        Returns:
            A sentence for the user if steps are missing and ``metrics.lost.jsonl`` allows it; otherwise None.

        Raises:
            RopewalkError: if the log is damaged, cannot be read, or lacks completed steps.
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
        first = _step(*missing[0])
        message = (
            f"{self.path} lacks {len(missing)} of the {sum(done)} completed steps (the first is {first})"
        )
        if lost.exists():
            return f"{message}, which {lost.name} allows"
        if self._is_unfinished():
            message += ", and ropewalk ignores the last line, which does not end with a newline"
        raise RopewalkError(
            f"{message}; either restore the file, or, to resume without these steps, first run: touch {lost}"
        )

    def rewind(self, done: Sequence[int], dropped: Path) -> str | None:
        """Remove the steps after a checkpoint from the log, since a resumed run computes them again.

        Args:
            done: completed steps of each stage at the checkpoint; call :meth:`check` with them first.
            dropped: log that the removed lines are appended to.

        Returns:
            A sentence for the user if steps were removed; otherwise None.

        Raises:
            RopewalkError: if a log is damaged, or cannot be read or written; no line is lost in that case.
        """
        kept: list[dict[str, Any]] = []
        again: list[dict[str, Any]] = []
        for line in self.read():
            known = line["stage"] < len(done) and line["step"] <= done[line["stage"]]
            (kept if known else again).append(line)
        if not again:
            return None
        # Save the removed lines first: a crash in between duplicates lines, but loses none.
        with replacing(dropped) as temporary:
            earlier = dropped.read_bytes() if dropped.exists() else b""
            temporary.write_bytes(earlier + _lines(again).encode())
        write_text(self.path, _lines(kept))
        places = [_step(line["stage"], line["step"]) for line in again]
        which = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        return f"{which} came after the checkpoint; their lines of {self.path.name} were moved to {dropped}"

    def _is_unfinished(self) -> bool:
        """Whether the last line lacks its newline."""
        try:
            with self.path.open("rb") as file:
                if not file.seek(0, os.SEEK_END):
                    return False
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        except OSError:
            return False

    def append(self, values: dict[str, Any], global_step: int) -> None:
        """Write one step and send it to the trackers.

        Raises:
            RunFailure: if the line cannot be written; earlier lines are kept.
        """
        append_line(self.path, values)
        if self.listener is not None:
            # Trackers plot scalars only; the lists per router are in the file.
            drawn = {k: v for k, v in values.items() if v is not None and not isinstance(v, dict)}
            self.listener(drawn, global_step)

    def track(self, values: dict[str, float], global_step: int) -> None:
        """Send values to the trackers only."""
        if self.listener is not None and values:
            self.listener(values, global_step)


def _lines(values: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in values)


def _step(stage: int, step: int) -> str:
    return f"step {step} of stage {stage + 1}"


Listener = Callable[[dict[str, Any], int], None]
"""Function of a step's values and of the step's number counted over all stages."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise if the package of a tracker is not installed; call this before a run starts."""
    if not names:
        return
    # Imported here, because accelerate is slow to import and only trackers need it.
    from accelerate.tracking import get_available_trackers

    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in available:
            raise RopewalkError(f"tracker {name} is not installed; pip install {name}")


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """JSON values as a flat dict of scalars, which every tracker can store."""
    flat: dict[str, Any] = {}

    def visit(value: Any, key: str) -> None:
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in pairs:
                visit(item, f"{key}.{name}".lstrip("."))
        elif value is not None:
            flat[key] = value

    visit(config, "")
    return flat


@contextmanager
def tracking(names: Sequence[str], folder: Path, config: dict[str, Any]) -> Iterator[Listener | None]:
    """Start trackers, and yield a function that logs to all of them; None if no tracker is named.

    Args:
        names: trackers by accelerate's names (wandb, tensorboard, trackio, …).
        folder: folder for trackers that write files.
        config: JSON values that describe the run; trackers get each scalar by the path of its key.

    Raises:
        RopewalkError: if a tracker's package is not installed, or it does not start; the message names it.
    """
    if not names:
        yield None
        return
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    require_trackers(names)
    # Most trackers write to accelerate's logger on start, which raises unless a PartialState exists.
    PartialState()
    trackers: list[Any] = []
    for name in names:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        arguments = {"logging_dir": str(folder)} if tracker_class.requires_logging_directory else {}
        try:
            tracker = tracker_class("ropewalk", **arguments)
            if hasattr(tracker, "start"):
                tracker.start()
            tracker.store_init_configuration(_flat(config))
        except Exception as error:
            # Each package raises errors of its own: no login, no server, a store that it no longer supports.
            for started in trackers:
                started.finish()
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RopewalkError(
                f"tracker {name} could not start: {reason} (omit it from trackers to train without it)"
            ) from error
        trackers.append(tracker)

    def log(values: dict[str, Any], step: int) -> None:
        for tracker in trackers:
            tracker.log(values, step=step)

    try:
        yield log
    finally:
        for tracker in trackers:
            tracker.finish()
