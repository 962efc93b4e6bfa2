"""Tasks leave the same files wherever they run, and what another process has committed counts as done."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.runs.tasks import Failed, Processes, run_tasks
from tests.programs import Program


def write(folder: Path, number: int) -> int:
    """A task."""
    if number < 0:
        raise RopewalkError(f"no task has the number {number}")
    (folder / str(number)).write_text("x" * number)
    return number


def die(folder: Path, number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def there(folder: Path, number: int) -> bool:
    return (folder / str(number)).exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_each_task_runs_once_and_only_where_it_is_missing(tmp_path: Path, workers: int) -> None:
    (tmp_path / "3").write_text("another's")
    found = run_tasks(
        Processes(workers), write, tmp_path, range(7), lambda number: there(tmp_path, number), tmp_path
    )
    assert sorted(found) == [0, 1, 2, 4, 5, 6]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        **{str(number): "x" * number for number in range(7)},
        "3": "another's",
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_one_sentence_and_other_tasks_keep_their_files(tmp_path: Path, workers: int) -> None:
    with pytest.raises(RopewalkError, match=r"^no task has the number -1$"):
        list(
            run_tasks(
                Processes(workers),
                write,
                tmp_path,
                [1, 2, -1, *range(3, 50)],
                lambda number: there(tmp_path, number),
                tmp_path,
            )
        )
    assert {"1", "2"} <= {path.name for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) < 20


def test_a_task_that_fails_while_another_process_commits_it_is_done(tmp_path: Path) -> None:
    asked: list[int] = []

    def done(number: int) -> bool:
        asked.append(number)
        # Not yet when its turn comes, but when it has failed.
        return asked.count(number) > 1

    assert list(run_tasks(Processes(1), write, tmp_path, [-1, 2], done, tmp_path)) == [-1, 2]


def test_files_that_others_commit_meanwhile_are_not_made_again(tmp_path: Path) -> None:
    made = run_tasks(
        Processes(1), write, tmp_path, range(9), lambda number: there(tmp_path, number), tmp_path
    )
    assert next(made) == 0
    for number in (4, 5):
        (tmp_path / str(number)).write_text("another's")
    assert list(made) == [1, 2, 3, 6, 7, 8]


def test_items_are_read_no_further_ahead_than_the_tasks_in_progress(tmp_path: Path) -> None:
    read = 0

    def endless() -> Iterator[int]:
        nonlocal read
        while True:
            read += 1
            yield read

    # Pools that other tests share live on.
    before = set(multiprocessing.active_children())
    stream = Processes(2).run(write, tmp_path, endless())
    for _ in range(30):
        next(stream)
    assert read <= 30 + 3
    stream.close()
    assert set(multiprocessing.active_children()) <= before


def test_a_failed_task_is_a_value(tmp_path: Path) -> None:
    ((item, result),) = Processes(1).run(write, tmp_path, [-2])
    assert isinstance(result, Failed)
    assert (item, str(result.error)) == (-2, "no task has the number -2")


def test_a_dead_worker_is_told(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match="a worker process died; if memory ran out, use fewer workers"):
        list(Processes(2).run(die, tmp_path, range(5)))


ORPHANS = """
import multiprocessing, os, sys, time
from pathlib import Path
# What the workers inherit.
os.dup2(os.open(sys.argv[2], os.O_WRONLY), 1)
sys.path.insert(0, sys.argv[3])
from ropewalk.runs.tasks import Processes
from tests.runs.test_tasks import write
if __name__ == "__main__":
    stream = Processes(2).run(write, Path(sys.argv[1]), range(1000))
    next(stream)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    parent = Program(ORPHANS, tmp_path, pipe, Path(__file__).parents[2])
    with pipe.open() as said:
        workers = [int(word) for word in said.readline().split()]
        parent.kill()
        # The pipe ends when the last worker that inherited it has gone.
        said.read()
    parent.communicate()
    assert len(workers) == 2


def test_files_that_never_appear_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropewalk.runs.tasks.VISIBLE_SECONDS", 0.01)
    start = time.monotonic()
    with pytest.raises(RopewalkError, match="the files do not appear on this machine; set --out"):
        list(run_tasks(Processes(1), write, tmp_path, [1], lambda _: False, tmp_path))
    assert time.monotonic() - start < 10
