"""Finished runs and evaluations: their results, their recipe and what they cost, read from their folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.record import RESULTS, read_record
from ropewalk.evaluation.results import TaskResult
from ropewalk.experiments.cell_names import STAGE, cell_names
from ropewalk.io.files import parse_json
from ropewalk.training.folder import METRICS, RECIPE, SUMMARY
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.update.peak_memory import GPU, PROCESS

MOST_KEYS = 4
"""Largest number of keys in the name of a cell."""
NOT_COMPARED = ("output", "checkpoints", "trackers", "seed")
"""Keys of a recipe that make no other cell: where it writes, what it keeps, and the seed."""


@dataclass(frozen=True)
class Cost:
    """Training cost of one run.

    Attributes:
        hours: time of its training steps.
        tokens_per_second: tokens over that time; None if it did not train.
        gpu_memory, process_memory: most bytes of rank 0 on its GPU, or of its process on a CPU; None if not recorded.
        tokens: tokens in the rows of its training steps.
    """

    hours: float
    tokens_per_second: float | None
    gpu_memory: int | None = None
    process_memory: int | None = None
    tokens: int = 0


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, or an evaluation.

    Attributes:
        folder: its folder.
        results: results after training, or of the evaluation.
        recipe: flat keys and values of its recipe; None for an evaluation.
        seed: seed of the run, or of the evaluation's samples.
        cost: cost of its training; None for an evaluation.
        base: RoPE base of its last stage; None if not recorded.
    """

    folder: Path
    results: tuple[TaskResult, ...]
    recipe: Mapping[str, Any] | None
    seed: int
    cost: Cost | None
    base: float | None = None


def read_finished(folder: Path) -> FinishedRun:
    """Read a finished run, or the folder of a finished evaluation.

    Raises:
        RopewalkError: if the folder has neither, or its files are damaged.
    """
    summary = folder / SUMMARY
    if not summary.is_file():
        # A folder that does not exist goes on to read_record, which says so.
        if folder.is_dir() and not (folder / RESULTS).is_file():
            raise RopewalkError(
                f"the run in {folder} is not finished; finish it with: ropewalk extend {folder / RECIPE} --resume"
                if (folder / RECIPE).is_file()
                else f"{folder} has neither the {SUMMARY} of a finished run nor the {RESULTS} of an evaluation; give "
                "the folder of one of these"
            )
        record, results = read_record(folder)
        return FinishedRun(folder, tuple(results), None, int(record["settings"].get("seed", 0)), None)
    try:
        values = parse_json(summary.read_text(encoding="utf-8"), strict=True)
        results = [TaskResult.from_json(each) for each in values["after"]]
        base = [None, *(stage.get("rope_theta") for stage in values.get("stages", ()))][-1]
        text = (folder / RECIPE).read_text(encoding="utf-8")
    except OSError as error:
        raise RopewalkError(f"cannot read {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RopewalkError(
            f"{summary} is damaged ({error}); delete the file, and write it again with: ropewalk extend "
            f"{folder / RECIPE} --resume"
        ) from error
    recipe = parse_recipe(text, str(folder / RECIPE))
    # Every value written out, so that a default and the same value given by hand compare as equal.
    plain = recipe.model_dump(mode="json")
    # Runs of a grid share a cache of rows, a run by hand has another or none; the rows are the same.
    data = {key: value for key, value in plain["data"].items() if key != "cache"}
    kept = {key: value for key, value in plain.items() if key not in NOT_COMPARED} | {"data": data}
    return FinishedRun(folder, tuple(results), dict(_flat(kept)), recipe.seed, cost_of(folder), base)


def cost_of(folder: Path) -> Cost:
    """Compute the training cost of the run in a folder from the log of its steps."""
    steps = MetricsLog(folder / METRICS).read()
    seconds = sum(float(step.get("seconds") or 0) for step in steps)
    # The log has rates, so tokens are rate times duration; a plain mean of rates would overweight short steps.
    tokens = sum(
        float(step.get("seconds") or 0) * float(step.get("tokens_per_second") or 0) for step in steps
    )
    # A largest value of 0 means that no step recorded this peak.
    peaks = [max((int(step.get(key) or 0) for step in steps), default=0) or None for key in (GPU, PROCESS)]
    return Cost(seconds / 3600, tokens / seconds if seconds else None, peaks[0], peaks[1], round(tokens))


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in pairs:
            # The root has no name, so its children's keys would start with a dot.
            yield from _flat(item, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def cells_of(runs: Sequence[FinishedRun]) -> dict[str, dict[int, FinishedRun]]:
    """Group finished runs into cells: runs that differ by their seed alone are one cell.

    Cells are named by the keys in which recipes differ, or by their folders, in the order given.

    Raises:
        RopewalkError: if two runs are the same cell with the same seed.
    """
    groups: list[list[FinishedRun]] = []
    for run in runs:
        # Evaluations record no recipe, so nothing tells which of them belong together: each is a cell of its own.
        group = next(
            (each for each in groups if run.recipe is not None and each[0].recipe == run.recipe), None
        )
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    # Two cells may differ only in keys that their names leave out, and then the folder tells them apart.
    folders = [group[0].folder for group in groups]
    short = [folder.name for folder in folders]
    names = [
        name if short.count(name) == 1 else str(folder) for name, folder in zip(short, folders, strict=True)
    ]
    if differing := _differing([group[0].recipe for group in groups]):
        values = [[(group[0].recipe or {}).get(key) for key in differing] for group in groups]
        names = cell_names(differing, values, names)
    found: dict[str, dict[int, FinishedRun]] = {}
    for name, group in zip(names, groups, strict=True):
        cell = found.setdefault(name, {})
        for run in group:
            if run.seed in cell:
                raise RopewalkError(
                    f"{cell[run.seed].folder} and {run.folder} are runs of the same recipe with the same seed; leave "
                    "one out"
                )
            cell[run.seed] = run
    return found


def _differing(recipes: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Keys in which recipes differ; empty if one has no recipe, or too many differ for a name."""
    known = [recipe for recipe in recipes if recipe is not None]
    if len(known) < len(recipes):
        return []
    keys = dict.fromkeys(key for recipe in known for key in recipe)
    found: dict[tuple[Any, ...], str] = {}
    for key in keys:
        values = [recipe.get(key) for recipe in known]
        if any(value != values[0] for value in values):
            # A key that was varied in every stage alike is named once.
            found.setdefault((STAGE.sub("", key), *map(repr, values)), key)
    return [*found.values()] if len(found) <= MOST_KEYS else []
