"""The records of one output folder: what it holds, how far each step got, and whether that still counts."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, damage, digest
from ropewalk.io.files import (
    is_plain,
    parse_json,
    path_inside,
    remove_left_overs,
    write_json,
    writing,
)
from ropewalk.io.lock import locked
from ropewalk.io.settings import explain
from ropewalk.runs.identity import Difference, differences, listed, plain, shown
from ropewalk.runs.steps import Done, Json, Record, State, Step

if TYPE_CHECKING:
    from ropewalk.parallel.world import World

M = TypeVar("M", bound=BaseModel)
RUN, STEPS, EARLIER = "run.json", "steps", "earlier"
FORMAT = 1
SMALL = 4 << 20
"""Bytes up to which a file is hashed at every start; of larger ones only the size is compared."""


class Folder(BaseModel, extra="forbid", strict=True):
    """What ``run.json`` says of a folder.

    Attributes:
        format: version of the records.
        holds: what the folder holds, such as ``evaluation``.
        id: identity of the run, which its copies share and no other run has; drawn when the first step begins.
        launch: the launch that began or resumed it last, see :func:`launch`.
        history: changes of settings since the run began, as its job describes them.
    """

    format: int = FORMAT
    holds: str
    id: str = ""
    launch: str = ""
    history: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Found:
    """State of a step, why, and for another identity the keys that differ."""

    state: State
    why: str = ""
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True)
class Todo:
    """What a survey found, step by step; plain values that every rank gets.

    Attributes:
        found: state of each step by name, in the order of the steps.
        again: steps that the caller wants to be made again, with all that uses their results.
        short: steps that are done, but whose files do not reach their goal, while another step needs them.
    """

    found: Mapping[str, Found] = field(default_factory=dict)
    again: frozenset[str] = frozenset()
    short: frozenset[str] = frozenset()

    def is_done(self, name: str) -> bool:
        """Whether a step has nothing to do."""
        return self.found[name].state is State.DONE


def launch() -> str:
    """Identity of the torchrun that started this process: its run id and its process id."""
    # The run id alone is not unique: torchrun's default is "none" for every launch.
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()}"


class Store:
    """Records of an output folder. Every method is for rank 0 alone; :class:`~ropewalk.runs.runner.Runner` calls them.

    Args:
        folder: the output folder; None keeps the records in memory, so that every step runs.
        holds: what the folder holds, such as ``evaluation``.
        advice: what the user can do about a folder that is in use otherwise.
        reads: whether this process is rank 0; others know the folder, but nothing of what is in it.

    Raises:
        RopewalkError: if the folder holds something else, or its ``run.json`` is damaged.
    """

    def __init__(
        self, folder: Path | None, holds: str, advice: str = "give another --out", reads: bool = True
    ) -> None:
        self.folder, self.holds, self.advice = folder, holds, advice
        self._memory: dict[str, Record] = {}
        self._written = False
        self.about = Folder(holds=holds)
        self.begun = folder is not None and reads and (folder / RUN).is_file()
        """Whether a step of this run has begun, in this process or before."""
        if folder is None or not reads:
            return
        if self.begun:
            values = _read(folder / RUN)
            if values.get("format") != FORMAT or "holds" not in values:
                raise RopewalkError(
                    f"{folder} was written by another version of ropewalk, which this one cannot continue; {advice}"
                )
            self.about = _checked(Folder, values, folder / RUN, advice)
            if self.about.holds != holds:
                raise RopewalkError(f"{folder} holds a {self.about.holds}, not a {holds}; {advice}")
        # Hidden files do not count: the lock of this run is one.
        elif folder.is_dir() and any(not each.name.startswith(".") for each in folder.iterdir()):
            raise RopewalkError(f"{folder} is not empty and contains no {holds}; {advice}")

    def note_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Write changes of settings that decide no result, or none yet, into the history of the run.

        A process that was killed before it could take note elsewhere may repeat this: the last lines are not doubled.

        Args:
            changes: JSON values, a line of the history each.
        """
        lines = [dict(each) for each in changes]
        if lines and self.about.history[-len(lines) :] != lines:
            self.about.history += lines
        self._write_about()

    # Records

    def record(self, name: str) -> Record | None:
        """The record of a step; None if it has none.

        Raises:
            RopewalkError: if it is damaged, or names a file outside the folder.
        """
        if self.folder is None:
            return self._memory.get(name)
        path = self._path(name)
        if not path.is_file():
            return None
        found = _checked(Record, _read(path), path, "restore the file, or delete it to make this step again")
        for each in (*found.files, *found.kept, *(found.done.digests if found.done else ()), found.aside):
            if each is not None and path_inside(self.folder, each) is None:
                raise RopewalkError(
                    f"{path} lists the file {each!r}, but may list only files in {self.folder}; do not use this folder"
                )
        return found

    def is_done(self, name: str) -> bool:
        """Whether a step was done, whatever has changed since."""
        record = self.record(name)
        return record is not None and record.done is not None

    def records(self) -> dict[str, Record]:
        """All records by the names of their steps."""
        if self.folder is None:
            return dict(self._memory)
        names = sorted(path.stem for path in (self.folder / STEPS).glob("*.json"))
        # What starts with a dot is a record that is being written.
        found = {name: self.record(name) for name in names if not name.startswith(".")}
        return {name: record for name, record in found.items() if record is not None}

    def write(self, name: str, record: Record) -> None:
        """Write the record of a step, and with the first one ``run.json``."""
        if self.folder is None:
            self._memory[name] = record
            return
        # Before the record, so that no folder has steps but not what they are steps of.
        if not self._written:
            self._write_about()
        write_json(self._path(name), record.model_dump())

    def _write_about(self) -> None:
        if self.folder is not None:
            self.about.id = self.about.id or uuid.uuid4().hex
            self.about.launch = launch()
            write_json(self.folder / RUN, self.about.model_dump())
            self.begun = self._written = True

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        assert is_plain(name), name
        return self.folder / STEPS / f"{name}.json"

    # Is it still the same?

    def survey(self, steps: Sequence[Step], again: str | None = None, deep: bool = False) -> Todo:
        """Find out what there is to do, before anything is changed.

        Args:
            steps: all steps of the job, in order.
            again: name of a step to be made again, with all steps that use its result; None for none.
            deep: whether to hash large files too.

        Raises:
            RopewalkError: if a precious step would have to be thrown away, unless ``again`` says so, or a record is
                damaged.
        """
        anew = _with_followers(steps, again)
        asked: set[str] = set()
        short: set[str] = set()
        while True:
            found: dict[str, Found] = {}
            for step in steps:
                found[step.name] = self._judged(step, found, anew, short, deep)
            needed = {name for step in steps if found[step.name].state != State.DONE for name in step.inputs}
            names = {name for name in needed - asked if name in found and found[name].state == State.DONE}
            if not names:
                break
            asked |= names
            for step in steps:
                if step.name in names and step.reached is not None and isinstance(step.goal, int):
                    short |= {step.name} if step.reached() < step.goal else set()
        for step in steps:
            if step.precious and step.name not in anew and self.record(step.name) is not None:
                for name in (step.name, *step.inputs):
                    if name in found and found[name].differences:
                        self.refuse(step, found[name], name)
                if found[step.name].state is State.OUTDATED:
                    self.refuse(step, found[step.name], step.name)
        return Todo(found, frozenset(anew), frozenset(short))

    def refuse(self, step: Step, found: Found, cause: str) -> None:
        """Raise the refusal of a change that would throw away what a precious step has reached.

        Args:
            step: the precious step.
            found: what is found of ``cause``.
            cause: the step that changed: ``step`` itself, or one of its inputs.
        """
        ways = step.why or (
            f"{self.advice}, or give the settings of that {self.holds}, with which its step {cause} began, to resume it"
        )
        what = listed(list(found.differences))
        raise RopewalkError(
            f"{self.folder} contains a different {self.holds}, which differs in {what}; {ways}"
            if what
            else f"the step {step.name} in {self.folder} began with something else: {found.why}; {ways}"
        )

    def judged(self, step: Step, todo: Todo) -> Found:
        """State of a step when its turn comes, after all that it uses."""
        return self._judged(step, {}, todo.again, todo.short, False)

    def _judged(
        self,
        step: Step,
        earlier: Mapping[str, Found],
        again: Collection[str],
        short: Collection[str],
        deep: bool,
    ) -> Found:
        record = self.record(step.name)
        if record is None:
            return Found(State.MISSING)
        if record.aside is not None:
            return Found(State.OTHER, "it is being moved aside")
        if step.name in again:
            return Found(State.OTHER, "that was asked for")
        changed = differences(record.identity, step.identity()) + _other_goal(record.goal, step.goal)
        if changed:
            first = changed[0]
            why = f"{first.key} was {shown(first.was)} and is {shown(first.now)}"
            return Found(State.OTHER, why, tuple(changed))
        unknown = {
            name
            for name in step.inputs
            if name in earlier and earlier[name].state not in (State.DONE, State.OPEN)
        }
        results = self.results(step)
        # An input that it did not have is another result, whatever that will be.
        other = [
            name
            for name in dict.fromkeys((*step.inputs, *record.inputs))
            if (
                name not in record.inputs if name in unknown else record.inputs.get(name) != results.get(name)
            )
        ]
        if other:
            return Found(State.OUTDATED, f"the result of {other[0]} changed")
        if record.done is None or step.name in short or _is_short(record.goal, step.goal):
            return Found(State.BEGUN)
        if wrong := self.damage(record, deep):
            return Found(State.DAMAGED, wrong[0])
        if unknown:
            return Found(State.WAITS)
        return Found(State.DONE) if record.open is None else Found(State.OPEN, record.open)

    def results(self, step: Step) -> dict[str, str]:
        """Digests of the results that a step uses, as far as they are there."""
        records = {name: self.record(name) for name in step.inputs}
        return {name: each.done.result for name, each in records.items() if each and each.done}

    def damage(self, record: Record, deep: bool = False) -> list[str]:
        """What is wrong with the files of a step that is done, a sentence each.

        Args:
            record: of the step.
            deep: whether to hash large files too.
        """
        if record.done is None or self.folder is None:
            return []
        found = []
        for name, wanted in record.done.digests.items():
            path = self.folder / name
            if not deep and wanted.bytes > SMALL and path.is_file() and path.stat().st_size == wanted.bytes:
                continue
            if (wrong := damage(path, wanted)) is not None:
                # Of its path, `damage` gives the last part alone.
                found.append(f"{path}: {wrong}")
        return found

    # What moves and what is written

    def mark(self, name: str) -> Record | None:
        """Note in the record of a step that its files are to be moved to ``earlier/``; None without a record."""
        record = self.record(name)
        if self.folder is not None and record is not None and record.aside is None:
            place, number = f"{EARLIER}/{name}", 1
            while (self.folder / place).exists():
                number += 1
                place = f"{EARLIER}/{name}-{number}"
            record.aside = place
            self.write(name, record)
        return record

    def set_aside(self, name: str) -> str | None:
        """Move the files and the record of a step to ``earlier/``; a process that is killed here is followed by one
        that goes on moving.

        Returns:
            The folder that they are in now; None if the step has no record.
        """
        record = self.mark(name)
        if self.folder is None or record is None or record.aside is None:
            self._memory.pop(name, None)
            return None
        # A log may belong to several steps, and stays with those that stay.
        others = {
            each
            for key, other in self.records().items()
            if key != name
            for each in (*other.files, *other.kept)
        }
        target = self.folder / record.aside
        with writing(target):
            for each in dict.fromkeys((*record.files, *record.kept)):
                if each not in others and os.path.lexists(self.folder / each):
                    (target / each).parent.mkdir(parents=True, exist_ok=True)
                    (self.folder / each).rename(target / each)
            (target / STEPS).mkdir(parents=True, exist_ok=True)
            # Last: until then the step is not missing, but on its way.
            self._path(name).rename(target / STEPS / f"{name}.json")
        return record.aside

    def begin(self, step: Step, found: Found) -> Record:
        """Write that a step begins, or goes on."""
        # Without a folder, nobody will ask whether it is still the same, and to say so may take long.
        identity = {} if self.folder is None else plain(step.identity())
        record = Record(identity=identity, inputs=self.results(step), goal=plain(step.goal))
        before = self.record(step.name)
        if before is not None:
            record.files, record.kept = before.files, before.kept
            record.before = before.before if before.done is None else before.done.value
            # Whoever goes further than before gets another result, and shall.
            record.promised = before.promised if before.goal == record.goal else None
            if found.state is State.DAMAGED:
                record.promised = before.done
        self.write(step.name, record)
        return record

    def register(self, name: str, record: Record, file: str, kept: bool) -> None:
        """Note a file of a step that runs, before it is written."""
        assert self.folder is None or path_inside(self.folder, file) is not None, file
        names = record.kept if kept else record.files
        if file not in names:
            names.append(file)
            self.write(name, record)

    def finish(
        self,
        name: str,
        record: Record,
        value: Json,
        unable: str | None,
        seconds: float,
        decides: Callable[[Json], Json] | None = None,
    ) -> Json:
        """Write that a step is done, and return its value as JSON gives it back.

        Args:
            name, decides: of the :class:`~ropewalk.runs.steps.Step`.
            record: of the step, with the files that it has written.
            value: what its body returned.
            unable: what could not run; None if everything did.
            seconds: how long its body took.

        Raises:
            RopewalkError: if a damaged step that was made again has another result than the one that later steps used.
        """
        value, digests = plain(value), self._digests(record)
        files = {each: known.sha256 for each, known in digests.items()}
        used = decides or (lambda made: made)
        result = digest([value, files] if decides is None else decides(value))
        if record.promised is not None and any(name in each.inputs for each in self.records().values()):
            if different := differences(used(record.promised.value), used(value)):
                raise RopewalkError(
                    f"{name} in {self.folder} was damaged and made again, but its result is another one: "
                    f"{different[0].key or 'it'} was {shown(different[0].was)} and is {shown(different[0].now)}; start "
                    f"again in another folder, or delete {self._path(name)} to make all that follows again"
                )
            # Files may differ in what decides nothing, such as a date.
            result = record.promised.result
        record.done = Done(value=value, result=result, digests=digests, seconds=round(seconds, 3))
        record.open, record.promised, record.before = unable, None, None
        self.write(name, record)
        return value

    def renew(self, name: str, value: Json) -> None:
        """Record an intended change of a step that is done: its new value and the digests of its files."""
        record = self.record(name)
        assert record is not None
        assert record.done is not None
        self.finish(name, record, value, record.open, record.done.seconds)

    def _digests(self, record: Record) -> dict[str, FileDigest]:
        if self.folder is None:
            return {}
        paths = [self.folder / name for name in record.files]
        inside = [each for path in paths for each in ([path] if path.is_file() else sorted(path.rglob("*")))]
        with _reading(self.folder):
            files = [each for each in inside if each.is_file()]
            return {each.relative_to(self.folder).as_posix(): FileDigest.of(each) for each in files}


def _with_followers(steps: Sequence[Step], first: str | None) -> set[str]:
    """A step and all that use its result, directly or not."""
    found = {first} if first is not None else set()
    for step in steps:
        if found & set(step.inputs):
            found.add(step.name)
    return found


def _other_goal(then: Any, now: Any) -> list[Difference]:
    """What keeps one goal from leading to another: a list may only grow at its end, and the kind of a goal stays."""
    if isinstance(then, dict) and isinstance(now, dict) and list(then) == list(now):
        return [replace(each, key=key) for key in now for each in _other_goal(then[key], now[key])]
    if isinstance(then, list) and isinstance(now, list):
        return [Difference("goal", then, now)] if differences(then, now[: len(then)]) else []
    # Fewer steps than are done, say, change nothing about them.
    return (
        [] if isinstance(then, int) and isinstance(now, int) else differences({"goal": then}, {"goal": now})
    )


def _is_short(then: Any, now: Any) -> bool:
    if isinstance(then, dict) and isinstance(now, dict):
        return any(_is_short(then[key], now[key]) for key in now)
    if isinstance(then, list) and isinstance(now, list):
        return len(then) < len(now)
    return isinstance(then, int) and isinstance(now, int) and then < now


def _read(path: Path) -> dict[str, Any]:
    with _reading(path):
        text = path.read_bytes()
    try:
        values = parse_json(text, strict=True)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise RopewalkError(
            f"{path} is damaged: {error}; restore the file, or delete it to make its step again"
        ) from error
    return values


def _checked(kind: type[M], values: Mapping[str, Any], path: Path, advice: str) -> M:
    try:
        # As JSON, whose objects stand for digests.
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise RopewalkError(f"{path} is damaged: {explain(error, kind)}; {advice}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


def alone(folder: Path, part: str, advice: str) -> AbstractContextManager[None]:
    """Let one process at a time do a part of what a folder holds, while others may do other parts.

    Raises:
        RopewalkError: if another process does this part.
    """
    return locked(folder, advice, file=part)


@contextmanager
def held(
    folder: Path | None,
    holds: str,
    resume: bool | None = None,
    advice: str = "give another --out",
    restarts: int = 0,
    wait: float = 0,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Store]:
    """Open an output folder in one process.

    Args:
        folder, holds, resume, advice, prepare: see :func:`opened`.
        restarts: number of times torchrun has restarted the processes.
        wait: seconds to wait for another process that writes to the folder.
    """
    # Before the lock, which would create the folder.
    if folder is not None and resume and not (folder / RUN).is_file():
        raise RopewalkError(f"nothing to resume: {folder} contains no {holds}; omit --resume to start one")
    with nullcontext() if folder is None else locked(folder, advice, wait=wait):
        prepare()
        store = Store(folder, holds, advice)
        restarted = restarts > 0 and store.about.launch == launch()
        if resume is False and store.begun and not restarted:
            raise RopewalkError(
                f"{folder} already contains a {holds}; either resume this {holds} with --resume, or {advice}"
            )
        if folder is not None:
            # Under the lock: another process's unfinished files look the same.
            records = store.records().values()
            inside = {(folder / name).parent for each in records for name in (*each.files, *each.kept)}
            for place in {folder, folder / STEPS, *inside}:
                remove_left_overs(place)
        yield store


@contextmanager
def opened(
    folder: Path | None,
    holds: str,
    world: World,
    resume: bool | None = None,
    advice: str = "give another --out",
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Store]:
    """Open an output folder, and lock it on rank 0 until the block ends; every rank must call this function.

    Nothing is written but the lock until a step begins. Processes that torchrun restarts after a failure resume what
    they began, whatever ``resume`` says.

    Args:
        folder: the output folder, created if missing; None for a run without one.
        holds: what the folder holds, such as ``evaluation``.
        world: the processes.
        resume: whether the folder must hold a run (True), must not (False), or may (None).
        advice: what the user can do about a folder that is in use otherwise.
        prepare: called on rank 0 under the lock before the folder is read. It may fill the folder, and refuse it in
            the words of the job.

    Yields:
        The store; on ranks other than 0 it only knows the folder.

    Raises:
        RopewalkError: if another process has locked the folder, or ``resume`` and the folder do not go together.
    """
    stores: list[Store] = []
    with ExitStack() as stack:
        # The lock and the records are those of rank 0, which returns nothing, because others cannot have them.
        world.on_rank_0(
            lambda: stores.append(
                stack.enter_context(held(folder, holds, resume, advice, world.restarts, prepare=prepare))
            )
        )
        yield stores[0] if stores else Store(folder, holds, advice, reads=False)
