"""A job with every kind of step, small enough to be killed at each of its writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ropewalk.io.files import write_json
from ropewalk.parallel import World
from ropewalk.runs import Lines, Runner, Step, Work, opened

NUMBERS = Lines[int, tuple[int, int]](
    key=lambda entry: entry[0],
    write=lambda entry: {"n": entry[0], "loss": entry[1]},
    read=lambda values: (int(values["n"]), int(values["loss"])),
    repeated=lambda old, new: None if old == new else f"two losses of {new[0]}",
)
STEPS = ("rows", "table", "train", "after")


@dataclass
class Job:
    """Rows, a table of logged losses, training with restart points, and an evaluation of its result.

    Attributes:
        data, scale, steps, metric: settings of its four steps.
        calls: what the bodies did, in order.
    """

    folder: Path | None
    data: str = "a"
    scale: int = 1
    steps: int = 3
    metric: str = "mean"
    world: World = field(default_factory=World)
    unable: str | None = None
    calls: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def list(self) -> list[Step]:
        return [
            Step("rows", lambda: {"data": self.data}, (), self._rows),
            Step("table", lambda: {"table": {"scale": self.scale}}, ("rows",), self._table),
            Step(
                "train",
                lambda: {"rate": 1},
                ("table",),
                self._train,
                self.steps,
                self._reached,
                precious=True,
            ),
            Step("after", lambda: {"metric": self.metric}, ("train",), self._after),
        ]

    def run(self, again: str | None = None, resume: bool | None = None, until: str | None = None) -> Any:
        with opened(self.folder, "toy", self.world, resume) as store:
            runner = Runner(store, self.world, self)
            steps = self.list()
            todo = runner.survey(steps, again)
            runner.set_aside(todo)
            return runner.run(steps, todo, until)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def _rows(self, work: Work) -> Any:
        self.calls.append("rows")
        if work.folder is not None:
            write_json(work.file("data/rows.json"), [self.data])
        return {"rows": 1}

    def _table(self, work: Work) -> Any:
        log = work.log("table.jsonl", NUMBERS, header={"scale": self.scale})
        for number in range(3):
            if number not in log.known:
                self.calls.append(f"loss {number}")
                log.add((number, number * self.scale))
        found = sum(loss for _, loss in log.known.values())
        if work.folder is not None:
            write_json(work.file("table.json"), {"sum": found})
        if self.unable is not None:
            work.cannot(self.unable)
        return {"sum": found}

    def _reached(self) -> int:
        assert self.folder is not None
        found = [int(path.stem.split("-")[1]) for path in (self.folder / "checkpoints").glob("step-*.json")]
        return max(found, default=0)

    def _train(self, work: Work) -> Any:
        at = self._reached() if work.folder is not None else 0
        state = 0
        if at:
            state = json.loads((self.folder / f"checkpoints/step-{at}.json").read_text())
        for step in range(at + 1, self.steps + 1):
            self.calls.append(f"step {step}")
            state += step * work.inputs["table"]["sum"]
            if work.folder is not None:
                write_json(work.kept(f"checkpoints/step-{step}.json"), state)
        return {"state": state, "steps": self.steps}

    def _after(self, work: Work) -> Any:
        self.calls.append("after")
        if work.folder is not None:
            write_json(work.file("after.json"), work.inputs["train"])
        return work.inputs["train"]["state"]


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a folder that two equal runs have in common: names, bytes, and records without their clocks."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name == "run.json":
            continue
        found[name] = path.read_text()
        if name.startswith("steps/"):
            values = json.loads(found[name])
            if values["done"] is not None:
                del values["done"]["seconds"]
            found[name] = values
    return found


WRITES = ("replace", "rename", "mkdir", "unlink", "fsync", "rmdir")


def left_by_kills(folder: Path, copies: Path, job: Any) -> Iterator[Path]:
    """Run a job, and give what a kill before each of its changes of the disk leaves of a folder.

    A process that is killed flushes nothing, and its lock goes with it: what it leaves is what lies on the disk at that
    moment, so one run that is copied is as good as one that is killed for each change. Two kills that leave the same
    are one.

    Args:
        folder: that the job changes.
        copies: of it, as kills leave it; none of a folder that is not there yet.
        job: runs in this process, to its end.
    """
    found: list[Path] = []
    last: Any = ()

    def copied() -> None:
        nonlocal last
        now = _on_disk(folder)
        if now != last:
            last = now
            found.append(copies / str(len(found)))
            if now is not None:
                shutil.copytree(folder, found[-1])

    with pytest.MonkeyPatch.context() as patch:
        # Copying makes folders too.
        inside = False

        def patched(function: Any) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal inside
                if not inside:
                    inside = True
                    copied()
                    inside = False
                return function(*arguments, **named)

            return call

        for name in WRITES:
            patch.setattr(os, name, patched(getattr(os, name)))
        job()
    yield from found


def _on_disk(folder: Path) -> dict[str, bytes | None] | None:
    """Every name in a folder, with the bytes of a file."""
    if not folder.exists():
        return None
    paths = sorted(folder.rglob("*"))
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in paths
    }
