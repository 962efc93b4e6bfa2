"""compare: make the grid of a recipe, or read finished runs, and say which differences are more than chance."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.comparison import ScoreDifference
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import score_records
from ropewalk.experiments.cell_names import AUTO_BASE, short_number
from ropewalk.experiments.finished_runs import FinishedRun, cells_of, read_finished
from ropewalk.experiments.grid import Grid, Run, make_grid, read_grid
from ropewalk.experiments.settings import GRID, CompareSettings
from ropewalk.experiments.statistics import differences, means_over_seeds
from ropewalk.io.files import write_json, write_text
from ropewalk.io.orphan import ends_with_this_process
from ropewalk.io.results import Result, frame_of
from ropewalk.parallel import World
from ropewalk.parallel.context import RunContext
from ropewalk.runs import Runner, Step, Store, Work, alone, held
from ropewalk.training.folder import PAGE, RECIPE, SUMMARY
from ropewalk.training.recipe.file import dump_recipe

if TYPE_CHECKING:
    import pandas

COMPARISON = "comparison.json"
LONGEST_WAIT = 60
"""Seconds to wait while another process writes the recipes of the same grid."""
LAST_LINES = 4096
"""Bytes at the end of a run's log in which its error is looked for."""


@dataclass(frozen=True)
class Failure:
    """A run that failed, while others went on.

    Attributes:
        cell, seed: the run.
        reason: last error in its log.
        log: the log.
    """

    cell: str
    seed: int
    reason: str
    log: Path


@dataclass(frozen=True)
class Cell:
    """Results of one cell.

    Attributes:
        name: what varies, in short, such as ``base 1e4``, or the folder of a finished run.
        seeds: seeds of its finished runs.
        results: mean of each task over the seeds, with a 95 % interval.
        hours: mean time of the training steps of its runs; None for evaluations.
        tokens_per_second: tokens of all its runs over their time; None for evaluations.
        gpu_memory, process_memory: most bytes of rank 0 of any run, on its GPU or of its process; None if not recorded.
        folders: folders of its finished runs, in the order of the seeds.
        tokens: mean number of tokens in the rows of these steps; None for evaluations.
        fewest_hours, most_hours: shortest and longest time of its runs; None for evaluations.
    """

    name: str
    seeds: tuple[int, ...]
    results: tuple[TaskResult, ...]
    hours: float | None
    tokens_per_second: float | None
    gpu_memory: int | None = None
    process_memory: int | None = None
    folders: tuple[Path, ...] = ()
    tokens: float | None = None
    fewest_hours: float | None = None
    most_hours: float | None = None


@dataclass(frozen=True)
class ExperimentResult(Result):
    """Result of a comparison of cells.

    Attributes:
        output: folder of the experiment; None for finished runs without one.
        reference: name of the cell that the others are compared with.
        cells: the cells with finished runs, in the order of the grid.
        differences: for each other cell, its differences from the reference; empty while that has no finished run.
        failures: runs that failed.
        unfinished: number of runs that are neither finished nor failed.
        conclusion: one sentence.
    """

    output: Path | None
    reference: str
    cells: tuple[Cell, ...]
    differences: Mapping[str, tuple[ScoreDifference, ...]]
    failures: tuple[Failure, ...]
    unfinished: int
    conclusion: str

    def scores(self) -> list[dict[str, Any]]:
        """The scores in long form, one row each; ``cell`` is the name of the cell."""
        records = score_records({cell.name: cell.results for cell in self.cells})
        return [{("cell" if key == "when" else key): value for key, value in row.items()} for row in records]

    def differences_frame(self) -> pandas.DataFrame:
        """The differences in long form, one row each, as :meth:`to_frame` gives the scores.

        The columns are ``cell``, ``reference``, and those of
        :class:`~ropewalk.evaluation.comparison.ScoreDifference`, with ``low`` and ``high`` for ``ci95``. ``score_a`` is
        the reference's score and ``score_b`` the cell's.

        Raises:
            RopewalkError: if pandas is not installed.
        """
        rows = []
        for name, found in self.differences.items():
            for each in found:
                values = each.to_json()
                low, high = values.pop("ci95")
                ends = {"low": low, "high": high}
                rows.append({"cell": name, "reference": self.reference, **values, **ends})
        return frame_of(rows, "differences_frame()")


def compare(settings: CompareSettings, context: RunContext | None = None) -> ExperimentResult:
    """Run a recipe with every combination of the given values and compare the results, or compare finished runs.

    The folder of a comparison is read again: its finished runs are compared, and none is started.

    Args:
        settings: a recipe and the values to vary, or the folders of finished runs, or the folder of a comparison.
        context: the output folder, which is required for a recipe, and the reporter.

    Returns:
        ``cells`` has the mean scores of each combination or finished run. ``reference`` is the name of the first
            one. ``differences`` maps the name of each other one to its differences from the reference, with 95 %
            intervals. ``failures`` lists the runs that failed, and ``conclusion`` sums up the comparison in one
            sentence. ``comparison.json`` in the output folder has the same values.

    Raises:
        RopewalkError: for invalid input, before any run starts. Also if there is no finished run to compare.
    """
    context = context or RunContext()
    failures: list[Failure] = []
    unfinished = 0
    if len(settings.what) > 1:
        cells = cells_of([read_finished(Path(folder).expanduser()) for folder in settings.what])
        reference = next(iter(cells))
        if len(cells) < 2:
            raise RopewalkError(
                "the runs differ only by their seed, so there is nothing to compare; name a run of another recipe"
            )
    else:
        if settings.is_reread:
            grid = read_grid(Path(settings.what[0]).expanduser() / GRID)
        elif context.output is None:
            raise RopewalkError("a comparison that runs a recipe needs an output folder; give --out")
        else:
            grid = _started(settings, context.output)
            # Each part of the runs once at a time; another process would find its runs in use one by one.
            part = "runs" if settings.share is None else f"runs {settings.share.replace('/', ' of ')}"
            with alone(context.output, part, "give another --out"):
                failures = _run_all(grid, settings, context)
        found = _finished_cells(grid)
        cells = {_with_base(name, runs): runs for name, runs in found.items()}
        first = grid.cells[0]
        reference = _with_base(first, found.get(first, {}))
        # Runs of other parts (--part) count as unfinished, because other jobs may still make them.
        unfinished = sum(not _is_finished(each) for each in grid.runs) - len(failures)
        if not cells:
            why = f": {failures[0].reason} (see {failures[0].log})" if failures else ""
            raise RopewalkError(f"no run in {context.output or settings.what[0]} is finished{why}")
    result = _compared(context.output, reference, cells, failures, unfinished)
    if context.output is not None:
        # Under the lock of a grid, whose next holder removes files that it takes for left over.
        with _locked(context.output) if settings.vary else nullcontext():
            write_json(context.output / COMPARISON, result.to_json())
    return result


def _started(settings: CompareSettings, output: Path) -> Grid:
    """The grid, checked as a whole and recorded in its folder."""
    # Imported here, because finished runs and evaluations are compared without torch.
    from ropewalk.training.preflight import resolve

    grid = make_grid(settings.what[0], settings.vary, settings.seeds, settings.overrides, output)
    # With a launcher, a run has processes that this one lacks, and resolve() would refuse meshes that fit them.
    if settings.launch is None:
        for each in grid.runs:
            # Each cell once: seeds make no difference to what a run refuses.
            if each.seed == grid.seeds[0] and not each.folder.exists():
                try:
                    resolve(each.recipe)
                except RopewalkError as error:
                    runs = f"the runs with {each.cell}" if each.cell else "the runs"
                    raise RopewalkError(f"{runs} cannot start: {error}") from error
    # An array of jobs starts at once, and each of them writes the same files, so they wait for one another.
    with _locked(output) as store:
        Runner(store, World()).run([_recorded(grid)])
        for each in grid.runs:
            if not each.file.is_file():
                each.file.parent.mkdir(parents=True, exist_ok=True)
                write_text(each.file, dump_recipe(each.recipe))
    return grid


def _locked(output: Path) -> AbstractContextManager[Store]:
    """The records of a grid's folder, for a moment: other parts (--part) run beside this one."""
    return held(output, "comparison", wait=LONGEST_WAIT)


def _recorded(grid: Grid) -> Step:
    """The step that writes what a grid is: values and seeds may be added to it, and nothing else change."""

    def write(work: Work) -> None:
        write_json(work.file(GRID), grid.record())

    varied = {f"--vary {each.key}": list(each.values) for each in grid.varied}
    return Step(
        "grid",
        lambda: {"recipe": grid.base, "--vary": [each.key for each in grid.varied]},
        (),
        write,
        # The first value is the reference, and names of cells must stay.
        goal={**varied, "--seeds": list(grid.seeds)},
        precious=True,
        why="keep the recipe, and all values and seeds in this order, and add new ones only after them, or give "
        "another --out",
    )


def _is_finished(run: Run) -> bool:
    # With its report: a run that was killed while it wrote that has all results, and completes the rest in seconds.
    return (run.folder / SUMMARY).is_file() and (run.folder / PAGE).is_file()


def _run_all(grid: Grid, settings: CompareSettings, context: RunContext) -> list[Failure]:
    """Run what is not finished; a failure does not end the others."""
    mine = [each for number, each in enumerate(grid.runs) if settings.is_mine(number)]
    todo = [each for each in mine if not _is_finished(each)]
    if len(todo) < len(mine):
        context.reporter.note(f"finished already: {len(mine) - len(todo)} of {len(mine)} runs")
    if not todo:
        return []
    devices = _devices(settings, len(todo))
    failures: dict[str, Failure] = {}
    processes = _Processes()
    # Threads suffice: each only waits for the process of its run.
    with context.reporter.bar("runs", len(todo)) as advance, ThreadPoolExecutor(devices.qsize()) as pool:
        advance(0, todo[0].cell)
        try:
            futures = {
                pool.submit(_run_one, each, settings.launch, devices, processes): each for each in todo
            }
            for done, future in enumerate(as_completed(futures), start=1):
                each = futures[future]
                reason = future.result()
                if reason is not None:
                    failures[str(each.folder)] = Failure(each.cell, each.seed, reason, each.log)
                    context.reporter.note(f"{each.cell}, seed {each.seed}, failed: {reason}")
                advance(done, f"{each.cell}, seed {each.seed}")
        # Ctrl-C included: the runs are in sessions of their own, so it reaches them only from here.
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.end()
            raise
    # In the order of the grid, because futures complete in any order.
    return [failures[str(each.folder)] for each in todo if str(each.folder) in failures]


def _devices(settings: CompareSettings, most: int) -> queue.SimpleQueue[str | None]:
    """One entry for each run that may go on at a time: the GPU it may see, or None for all that this process sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # The user's own selection, whose entries may be GPU or MIG UUIDs that no index can replace.
    names = seen.split(",") if seen else [str(n) for n in range(count)]
    alone = settings.launch is not None or not count
    jobs = min(settings.jobs or (1 if alone else count), most)
    for number in range(jobs):
        found.put(None if alone else names[number % count])
    return found


class _Processes:
    """The runs that go on now, so that they can be ended with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a command to its end and return its status; -1 without running it if all are to end."""
        with log.open("ab") as file:
            # Held until the process is registered, so that end() either finds it or keeps it from starting.
            with self._lock:
                if self._ended:
                    return -1
                process = subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    # A session of its own: Ctrl-C reaches this process alone, which then ends the runs in order.
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)

    def end(self) -> None:
        """Interrupt all running processes, as Ctrl-C does, and let none start."""
        with self._lock:
            self._ended = True
            for process in self._running:
                # The group: torchrun and data workers belong to it. A process that just ended has none.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)


def _run_one(
    run: Run, launch: str | None, devices: queue.SimpleQueue[str | None], processes: _Processes
) -> str | None:
    """Run or resume one cell with one seed; the reason if it failed."""
    device = devices.get()
    try:
        started = [sys.executable] if launch is None else shlex.split(launch)
        command = [*ends_with_this_process(), *started, "-m", "ropewalk", "extend", str(run.file)]
        # The run writes its recipe first, so its presence means that there is something to resume.
        if (run.folder / RECIPE).is_file():
            command.append("--resume")
        environment = dict(os.environ)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        try:
            status = processes.start(command, environment, run.log)
        except OSError as error:
            return f"cannot start {started[0]}: {error.strerror or error}"
        return None if status == 0 else _reason(run.log, status)
    finally:
        devices.put(device)


def _reason(log: Path, status: int) -> str:
    """Last error in a log, or the status."""
    with log.open("rb") as file:
        # The error is at the end, and the log of a long run is too large to read for it.
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_LINES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if line.startswith(("error: ", "interrupted: "))]
    return errors[-1].removeprefix("error: ") if errors else f"it ended with status {status}"


def _finished_cells(grid: Grid) -> dict[str, dict[int, FinishedRun]]:
    cells: dict[str, dict[int, FinishedRun]] = {}
    for each in grid.runs:
        if _is_finished(each):
            cells.setdefault(each.cell, {})[each.seed] = read_finished(each.folder)
    return cells


def _with_base(name: str, runs: Mapping[int, FinishedRun]) -> str:
    """Name of a cell, with the base that ropewalk recommended instead of ``auto``."""
    base = next((run.base for run in runs.values()), None)
    return name if base is None else name.replace(AUTO_BASE, f"base {short_number(base)} (recommended)")


def _compared(
    output: Path | None,
    reference: str,
    cells: Mapping[str, Mapping[int, FinishedRun]],
    failures: Sequence[Failure],
    unfinished: int,
) -> ExperimentResult:
    results = {name: {seed: run.results for seed, run in runs.items()} for name, runs in cells.items()}
    # Another cell in the place of a reference that failed would answer another question.
    found = {name: tuple(each) for name, each in differences(results).items()} if reference in results else {}
    sentence = (
        conclusion(reference, found, {len(runs) for runs in cells.values()})
        if reference in results
        else f"Nothing is compared: the reference {reference} has no finished run."
    )
    return ExperimentResult(
        output,
        reference,
        tuple(_cell(name, runs) for name, runs in cells.items()),
        found,
        tuple(failures),
        unfinished,
        sentence,
    )


def _cell(name: str, runs: Mapping[int, FinishedRun]) -> Cell:
    costs = [run.cost for run in runs.values() if run.cost is not None]
    hours = [cost.hours for cost in costs]
    tokens = sum(cost.tokens for cost in costs)
    return Cell(
        name,
        tuple(runs),
        tuple(means_over_seeds({seed: run.results for seed, run in runs.items()})),
        fmean(hours) if costs else None,
        # A mean of the runs' rates would contradict the mean time where runs differ in it.
        tokens / sum(hours) / 3600 if sum(hours) else None,
        max((cost.gpu_memory for cost in costs if cost.gpu_memory), default=None),
        max((cost.process_memory for cost in costs if cost.process_memory), default=None),
        tuple(run.folder for run in runs.values()),
        tokens / len(costs) if costs else None,
        min(hours, default=None),
        max(hours, default=None),
    )


def conclusion(reference: str, found: Mapping[str, Sequence[ScoreDifference]], seeds: set[int]) -> str:
    """One sentence on which differences are more than chance, the clearest first.

    Args:
        reference: name of the first cell.
        found: differences of the other cells.
        seeds: numbers of seeds of the cells.
    """
    real = sorted(
        ((name, each) for name, some in found.items() for each in some if each.real),
        key=lambda pair: pair[1].p_adjusted,
    )
    tested = sum(each.reason is None for some in found.values() for each in some)
    caution = (
        ""
        if max(seeds, default=0) > 1
        else "; each cell has one seed, so the variation between training runs is not counted"
    )
    if not tested:
        return f"No difference from {reference} could be tested{caution}."
    if not real:
        return f"No difference from {reference} is more than chance ({tested} tested){caution}."
    name, clearest = real[0]
    rest = len(real) - 1
    others = (
        "nothing else is more than chance"
        if not rest
        else f"{rest} other {'difference is' if rest == 1 else 'differences are'} more than chance"
    )
    return f"{name} {_compared_words(clearest, reference)}; {others}{caution}."


def _compared_words(each: ScoreDifference, reference: str) -> str:
    """``is better than full by 12.0 points (3.0 to 21.0) at 1,024 tokens on passkey``."""
    better = each.difference > 0 if each.unit == "percent" else each.difference < 0
    amount = abs(each.difference)
    # On one side of 0 the interval is shown as amounts, like the difference; across 0 it keeps its signs.
    low, high = sorted(abs(end) for end in each.ci95) if each.ci95[0] * each.ci95[1] > 0 else each.ci95
    words = f"is {'better' if better else 'worse'} than {reference}"
    where = "" if each.length is None else f" at {each.length:,} tokens"
    task = each.suite if each.task == each.suite else f"{each.suite} {each.task}"
    if each.unit == "percent":
        return f"{words} by {amount:.1f} points ({low:.1f} to {high:.1f}){where} on {task}"
    on = "" if task == "perplexity" else f" on {task}"
    direction = "lower" if better else "higher"
    return f"{words}: its perplexity is {amount:.1f} % {direction} ({low:.1f} to {high:.1f} %){where}{on}"
