"""The run's metrics: one JSON object a line, and the same values to the trackers that were asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.integrations.trackers import Listener


class MetricsLog:
    """``metrics.jsonl`` of a run. A resumed run first drops the steps that its checkpoint does not know."""

    def __init__(self, path: Path, listener: Listener | None = None) -> None:
        self.path = path
        self.listener = listener

    def read(self) -> list[dict[str, Any]]:
        """All lines up to the first that a crash left incomplete: what follows is trained and written again.

        Raises:
            RopewalkError: if the file cannot be read.
        """
        if not self.path.exists():
            return []
        found = []
        try:
            for line in self.path.read_bytes().split(b"\n")[:-1]:
                found.append(json.loads(line))
        except ValueError:
            pass
        except OSError as error:
            raise RopewalkError(f"cannot read {self.path}: {error.strerror}") from error
        return found

    def rewind(self, stage: int, step: int) -> None:
        """Drop what came after step ``step`` (1 for the first) of a stage."""
        kept = [line for line in self.read() if (line["stage"], line["step"]) <= (stage, step)]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(_line(values) for values in kept), encoding="utf-8")
        partial.rename(self.path)

    def append(self, values: dict[str, Any], global_step: int) -> None:
        """Write one step and hand it to the trackers."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(values))
        except OSError as error:
            raise RopewalkError(f"cannot write {self.path}: {error.strerror}") from error
        if self.listener is not None:
            self.listener({k: v for k, v in values.items() if v is not None}, global_step)


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"
