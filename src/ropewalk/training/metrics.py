"""The run's metrics: one JSON object a line, and the same values to the trackers that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.files import write_text
from ropewalk.integrations.trackers import Listener
from ropewalk.io.json_lines import append_line, read_lines

LOST = "metrics.lost.jsonl"
"""A file that the user puts beside the log to go on without steps that are missing from it."""


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
            for key, least in (("stage", 0), ("step", 1)):
                if type(values[key]) is not int or values[key] < least:
                    raise ValueError(f"{key} is {values[key]!r}, and not a whole number from {least} on")
            if (place := (values["stage"], values["step"])) <= before:
                raise ValueError(f"{_step(*place)} stands after {_step(*before)}")
            # What the report draws.
            _ = values["tokens"], values["loss"]
            before = place
            return values

        lost = self.path.with_name(LOST)
        return list(
            read_lines(
                self.path, parse, f"restore the file, or rename it to {lost} to go on without its steps"
            )
        )

    def rewind(self, done: Sequence[int]) -> str | None:
        """Drop the steps that come after a checkpoint; a resumed run makes them again.

        Args:
            done: steps of each stage, from the first on, that the checkpoint knows.

        Returns:
            A sentence for the user where steps are missing and ``metrics.lost.jsonl`` says that they may be.

        Raises:
            RopewalkError: if the log is damaged, cannot be read or written, or lacks steps that are done.
        """
        lines = self.read()
        kept = [line for line in lines if line["stage"] < len(done) and line["step"] <= done[line["stage"]]]
        there = {(line["stage"], line["step"]) for line in kept}
        missing = [
            (stage, step)
            for stage, steps in enumerate(done)
            for step in range(1, steps + 1)
            if (stage, step) not in there
        ]
        lost = self.path.with_name(LOST)
        told = ""
        if missing:
            first = _step(*missing[0])
            told = f"{self.path} lacks {len(missing)} of the {sum(done)} steps that are done, from {first} on"
        if missing and not lost.exists():
            raise RopewalkError(f"{told}; restore the file, or go on without them by: touch {lost}")
        if len(kept) < len(lines):
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        return f"{told}, as {lost.name} allows" if missing else None

    def append(self, values: dict[str, Any], global_step: int) -> None:
        """Write one step and hand it to the trackers.

        Raises:
            RunFailure: if it cannot be written; the lines before it stay.
        """
        append_line(self.path, values)
        if self.listener is not None:
            self.listener({k: v for k, v in values.items() if v is not None}, global_step)


def _step(stage: int, step: int) -> str:
    return f"step {step} of stage {stage + 1}"
