"""Results of a run that is not over, one a line, so that a killed run need not measure them again."""

from __future__ import annotations

from pathlib import Path

from ropewalk.evaluation.results import TaskResult
from ropewalk.io.json_lines import append_line, read_lines

Key = tuple[str, str, int | None]


class FinishedResults:
    """A JSONL file of results that grows by whole lines; without a path it is kept in memory alone.

    Raises:
        RopewalkError: if the file cannot be read, or naming a line that is no result.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[Key, TaskResult] = {}
        if path is not None:
            advice = "restore the file, or delete the line: its task is then measured again"
            for result in read_lines(path, lambda _, values: TaskResult.from_json(values), advice):
                self._keep(result)

    def get(self, suite: str, task: str, length: int | None) -> TaskResult | None:
        """A result that is known."""
        return self.known.get((suite, task, length))

    def add(self, result: TaskResult) -> None:
        """Write one line.

        Raises:
            RunFailure: if it cannot be written; the lines before it stay.
        """
        if self.path is not None:
            append_line(self.path, result.to_json())
        self._keep(result)

    def _keep(self, result: TaskResult) -> None:
        self.known[result.suite, result.task, result.length] = result
