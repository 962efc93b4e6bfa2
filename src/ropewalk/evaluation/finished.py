"""Results of a run that is not over, one a line, so that a killed run need not measure them again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.predictions import append_line
from ropewalk.evaluation.results import TaskResult

Key = tuple[str, str, int | None]


class FinishedResults:
    """A JSONL file of results that grows by whole lines; without a path it is kept in memory alone.

    Raises:
        RopewalkError: if the file cannot be read or holds what is no result.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[Key, TaskResult] = {}
        if path is None or not path.exists():
            return
        complete = 0
        try:
            with path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    complete += len(line)
                    self._keep(TaskResult.from_json(json.loads(line)))
            if path.stat().st_size > complete:
                os.truncate(path, complete)
        except OSError as error:
            raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise RopewalkError(f"{path} holds what is no result: {error}") from error

    def get(self, suite: str, task: str, length: int | None) -> TaskResult | None:
        """A result that is known."""
        return self.known.get((suite, task, length))

    def add(self, result: TaskResult) -> None:
        """Write one line.

        Raises:
            RunFailure: if it cannot be written; the lines before it stay.
        """
        if self.path is None:
            self._keep(result)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                append_line(file, json.dumps(result.to_json()) + "\n")
        except OSError as error:
            raise RunFailure(f"cannot write {self.path}: {error.strerror or error}") from error
        self._keep(result)

    def _keep(self, result: TaskResult) -> None:
        self.known[result.suite, result.task, result.length] = result
