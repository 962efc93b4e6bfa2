"""Heartbeats: each rank writes a file that says where it is, and a run that hangs ends with the rank at fault.

A collective that one rank never reaches stops all others inside torch, where no exception arrives. A thread of each
rank therefore writes to the run's folder, which all ranks share, and reads what the others wrote if no step completes.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

from ropewalk.io.files import write_text
from ropewalk.parallel.world import LAST_WORDS, World

INTERVAL = 15.0
"""Seconds between two heartbeats at most."""
PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Beat:
    """Content of a rank's file.

    Attributes:
        rank: its rank.
        host, process: its machine, and its process id there.
        step: the step it is in, counted from 1 within the stage.
        place: the line of ropewalk that its main thread is in, and the innermost function that runs there.
        number: number of heartbeats so far; it stands still if the process is stopped or its machine is lost.
    """

    rank: int
    host: str
    process: int
    step: int
    place: str
    number: int


class Progress(Protocol):
    """Receives where a rank is."""

    def reached(self, step: int) -> None:
        """Begin a step, counted from 1."""

    def pause(self) -> None:
        """Begin work that may take any time; the next step ends it."""


class _Alone:
    def reached(self, step: int) -> None: ...

    def pause(self) -> None: ...


@contextmanager
def heartbeat(folder: Path, world: World, timeout: float, advice: str) -> Iterator[Progress]:
    """Write heartbeats during the block, and yield what to tell of each step.

    If a step takes ``timeout`` seconds without a pause, every process of the run exits with status 1, and the lowest
    rank that is still alive prints which ranks hold up the others. One process alone has no heartbeat.

    Args:
        folder: folder for the files, which all ranks see; each deletes its own at the end.
        world: ranks of the run, each of which must call this function.
        timeout: seconds.
        advice: how to continue; the end of the message.
    """
    if world.size == 1:
        yield _Alone()
        return
    folder.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    watch = _Watch(folder, world, timeout, advice, threading.get_ident(), ended)
    thread = threading.Thread(target=watch.run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            _file(folder, world.rank).unlink(missing_ok=True)
            # Empty once the last rank has deleted its file.
            folder.rmdir()


class _Watch:
    def __init__(
        self, folder: Path, world: World, timeout: float, advice: str, main: int, ended: threading.Event
    ) -> None:
        self.folder, self.world, self.timeout, self.advice = folder, world, timeout, advice
        self.main, self.ended = main, ended
        self.step, self.since, self.number = 0, time.monotonic(), 0
        self.interval = min(INTERVAL, timeout / 4)

    def reached(self, step: int) -> None:
        self.step, self.since = step, time.monotonic()

    def pause(self) -> None:
        self.since = math.inf

    def run(self) -> None:
        self.beat()
        while not self.ended.wait(self.interval):
            self.beat()
            if time.monotonic() - self.since > self.timeout:
                self.end_if_stuck()

    def beat(self) -> None:
        frame = sys._current_frames().get(self.main)
        self.number += 1
        beat = Beat(self.world.rank, socket.gethostname(), os.getpid(), self.step, _place(frame), self.number)
        # A file system that is full or gone for a moment must not end a run that trains.
        with suppress(Exception):
            write_text(_file(self.folder, self.world.rank), json.dumps(asdict(beat)))

    def end_if_stuck(self) -> None:
        since, earlier = self.since, read_beats(self.folder)
        for _ in range(3):
            self.ended.wait(self.interval)
            # A step that was only slow may complete meanwhile.
            if self.ended.is_set() or self.since != since:
                return
            self.beat()
        now = read_beats(self.folder)
        silent = [
            rank
            for rank in range(self.world.size)
            if rank not in now or (rank in earlier and earlier[rank].number == now[rank].number)
        ]
        alive = [rank for rank in range(self.world.size) if rank not in silent]
        if alive and alive[0] == self.world.rank:
            text = f"no step was completed for {self.timeout:,.0f} s: {diagnosis(now, silent)}; {self.advice}"
            # Written at once: the main thread, which may hold the lock of stderr, does not come back.
            os.write(2, f"\nerror: {text}\n".encode())
        else:
            # A launcher kills all processes when the first one ends.
            time.sleep(2 * self.interval + LAST_WORDS)
        os._exit(1)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def read_beats(folder: Path) -> dict[int, Beat]:
    """The latest heartbeats in a folder by rank; files that cannot be read count as missing."""
    beats = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, TypeError):
            beat = Beat(**json.loads(path.read_text(encoding="utf-8")))
            beats[beat.rank] = beat
    return beats


def _place(frame: FrameType | None) -> str:
    """The innermost line of ropewalk in a stack, and the innermost function of another package."""
    innermost = "" if frame is None else frame.f_code.co_name
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            path = Path(code.co_filename).relative_to(PACKAGE).as_posix()
            return f"{path}:{frame.f_lineno} ({innermost})"
        frame = frame.f_back
    return innermost or "its end"


def diagnosis(beats: Mapping[int, Beat], silent: Sequence[int]) -> str:
    """Say which ranks hold up the others: those that do not respond, else those that are not where most are.

    Args:
        beats: heartbeats by rank.
        silent: ranks without a new heartbeat.
    """
    if silent:
        named = [
            f"{_who(beats[rank])}, last in step {beats[rank].step} at {beats[rank].place}"
            if rank in beats
            else f"rank {rank}, which never wrote one"
            for rank in silent
        ]
        return f"no heartbeat from {' and '.join(named)}"
    places = Counter((beat.step, beat.place) for beat in beats.values())
    (step, place), most = places.most_common(1)[0]
    apart = [beat for beat in beats.values() if (beat.step, beat.place) != (step, place)]
    if not apart:
        return (
            f"all {len(beats)} ranks are in step {step} at {place}, so the network or a GPU may have stopped"
        )
    # Without a majority, as with two ranks, the reader has to judge from the places.
    if most <= len(apart):
        return "; ".join(f"{_who(beat)} is in step {beat.step} at {beat.place}" for beat in beats.values())
    named = [
        f"{_who(beat)} is in step {beat.step} at {beat.place}" for beat in sorted(apart, key=lambda b: b.rank)
    ]
    return f"{'; '.join(named)}; the other {most} ranks are in step {step} at {place}"


def _who(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.process} on {beat.host})"


def outlast_heartbeats(world: World, timeout: float) -> None:
    """Let collectives of all process groups wait longer than the heartbeat, which names ranks where torch does not.

    Args:
        world: ranks of the run; its control group keeps its own timeout.
        timeout: seconds of the heartbeat.
    """
    if world.size == 1:
        return
    # Both private: torch has no other way to change a timeout later. torchtitan does the same.
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in list(_world.pg_map):
        if group is not world.control:
            _set_pg_timeout(timedelta(seconds=2 * timeout + 60), group)
