"""What a job is made of: steps, and what the body of a step may do in the folder of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from ropewalk.io.digests import FileDigest
from ropewalk.runs.log import Lines, Log

if TYPE_CHECKING:
    from ropewalk.parallel.world import World

Json = Any
"""A value as JSON has it."""
T = TypeVar("T")
OnRank0 = Callable[[], T]
"""A hook: called on rank 0 alone, so it must not communicate; it gets nothing to communicate with."""
Collective = Callable[["Work"], Json]
"""The body of a step: called on every rank, all of which must take part in what it communicates."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a job.

    Attributes:
        name: unique within the job; also the name of its record.
        identity: what decides the result, in the user's own names, as JSON values. It may contain what loading decided:
            it is asked for when the step's turn comes, and by a survey if the step has a record.
        inputs: names of earlier steps whose results the step uses. Their results count, not how they came about.
        run: makes the result, or goes on with it, and returns a small JSON value without any clock reading. Every rank
            continues with the value of rank 0.
        goal: how far the step goes: a number such as training steps, or a list that may grow at its end, or several
            lists by name. A smaller number changes nothing about a step that is done; another list is another identity.
        reached: how far the files on disk say that the step got; None if only its record says it. Asked if the step is
            done but a step that uses its result is not: whoever has deleted restart points of a complete run has not
            undone the run.
        precious: the step has restart points or answers that a change would throw away, so a change is refused.
        why: what the user can do instead, for a refusal; empty for the general advice.
        decides: the part of the value that later steps use, if they use neither the rest nor the files, which then
            may differ between two runs (a duration, say, or versions of software); None if all of it counts.
    """

    name: str
    identity: OnRank0[Mapping[str, Any]]
    inputs: tuple[str, ...]
    run: Collective
    goal: int | list[Any] | dict[str, list[Any]] | None = None
    reached: OnRank0[int] | None = None
    precious: bool = False
    why: str = ""
    decides: Callable[[Json], Json] | None = None


class State(StrEnum):
    """What is known of a step before its turn."""

    MISSING = "missing"
    """It has no record."""
    BEGUN = "begun"
    """It was begun, or is short of its goal, and goes on from what it kept."""
    OPEN = "open"
    """Something in it could not run, and is tried again."""
    DONE = "done"
    """Identity, inputs and goal hold."""
    OUTDATED = "outdated"
    """The result of an input changed."""
    OTHER = "other"
    """Its identity changed, or the caller wants it again."""
    DAMAGED = "damaged"
    """A file that it wrote has changed since."""
    WAITS = "waits"
    """It was done, and an input that is not done decides whether that still counts."""


class Done(BaseModel, extra="forbid", strict=True):
    """The result of a step.

    Attributes:
        value: what its body returned.
        result: digest of the value and the files, or of the part of the value that decides; followers key on it.
        digests: of its files by name.
        seconds: how long the last run of its body took; no part of the result.
    """

    value: Json
    result: str
    digests: dict[str, FileDigest]
    seconds: float


class Record(BaseModel, extra="forbid", strict=True):
    """What ``steps/NAME.json`` says of a step: written when the step begins, and again when it is done.

    Attributes:
        identity, goal: of the step that began.
        inputs: results of its inputs, as digests.
        files: files and folders that it wrote, which are digested.
        kept: its logs and restart points, which check themselves and may be deleted by people.
        done: its result; None while it is only begun.
        open: what could not run; None if everything did.
        aside: folder that its files are being moved to; None otherwise.
        promised: earlier result of a step that is made again because it was damaged: what followers were made of.
        before: value of the last time that the step was done, until it is done again; None if it never was.
    """

    identity: dict[str, Any]
    inputs: dict[str, str]
    goal: int | list[Any] | dict[str, list[Any]] | None = None
    files: list[str] = []
    kept: list[str] = []
    done: Done | None = None
    open: str | None = None
    aside: str | None = None
    promised: Done | None = None
    before: Json = None


class Work:
    """What the body of a step may do in the folder of its run. Names are paths below that folder, with ``/``.

    Attributes:
        folder: folder of the run; None without one, and then nothing is written.
        inputs: values of the step's inputs by their names.
        resumed: whether an earlier process began the step.
        before: value that the step had when it was last done, if it goes on from there or is made again in place; None
            otherwise.
    """

    def __init__(
        self,
        folder: Path | None,
        world: World,
        inputs: Mapping[str, Json],
        resumed: bool,
        register: Callable[[str, bool], None],
        before: Json = None,
    ) -> None:
        self.folder, self.inputs, self.resumed, self.before = folder, inputs, resumed, before
        self.unable: str | None = None
        self._world, self._register = world, register

    def file(self, name: str) -> Path:
        """Path of a file or folder that the step writes atomically; its digest is recorded when the step is done."""
        return self._path(name, kept=False)

    def kept(self, name: str) -> Path:
        """Path of a log or restart point, which checks itself, and may grow or be deleted later."""
        return self._path(name, kept=True)

    def log(self, name: str, lines: Lines[Any, Any], **options: Any) -> Log[Any, Any]:
        """Open a log in the folder on rank 0. Other ranks, and runs without a folder, keep its entries in memory.

        Args:
            name: of the file.
            lines: how entries are written and read.
            options: further arguments of :class:`~ropewalk.runs.log.Log`.

        Raises:
            RopewalkError: if a line is damaged. On rank 0 alone: call this through ``world.on_rank_0``.
        """
        return Log(
            None if self.folder is None or not self._world.is_rank_0 else self.kept(name), lines, **options
        )

    def cannot(self, reason: str) -> None:
        """Leave the step open: something could not run, and is tried again next time, while the run goes on."""
        self.unable = reason

    def _path(self, name: str, kept: bool) -> Path:
        assert self.folder is not None, f"no folder for {name}"
        if self._world.is_rank_0:
            self._register(name, kept)
        return self.folder / name
