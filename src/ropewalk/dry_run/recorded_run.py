"""How much longer computation takes than its roofline, by the recorded steps of a run on the same hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.models.config.read import read_config
from ropewalk.planning.sizing.time import GPUS, gpu_named
from ropewalk.training.folder import METRICS, RECIPE, VERSIONS
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.file import load_recipe
from ropewalk.training.recipe.recipe import Recipe

WARM_UP = 3
"""First steps of each stage that are left out: they compile kernels and fill the allocator's caches."""


@dataclass(frozen=True)
class Slowdown:
    """A factor for computation, from measured steps.

    Attributes:
        factor: measured seconds of a step, divided by the planned ones of the same recipe.
        words: what it was measured on, for people.
    """

    factor: float
    words: str


@dataclass(frozen=True)
class RecordedRun:
    """What a run has recorded of its speed.

    Attributes:
        folder: folder of the run.
        recipe: its recipe.
        gpu: name of its GPUs.
        ranks: number of its processes.
        steps: stage, from 0, and seconds of each steady step.
    """

    folder: Path
    recipe: Recipe
    gpu: str
    ranks: int
    steps: tuple[tuple[int, float], ...]

    def compared(self, planned: Mapping[int, float]) -> Slowdown:
        """The factor, from the planned seconds of a step of each stage."""
        factor = median(seconds / planned[stage] for stage, seconds in self.steps)
        number = "1 step" if len(self.steps) == 1 else f"{len(self.steps)} steps"
        return Slowdown(factor, f"in {self.folder} (median of {number} on {self.gpu})")


def recorded_run(folder: Path, recipe: Recipe, gpu: str) -> RecordedRun:
    """Read the steps of a run that a plan is to be measured by.

    Args:
        folder: folder of the run.
        recipe: recipe to plan.
        gpu: kind of GPU to plan for, of :data:`~ropewalk.planning.sizing.time.GPUS`.

    Raises:
        RopewalkError: if the folder holds no run, or no steady steps with their parts, or if the run was on another
            device or of another model.
    """
    if not (folder / RECIPE).is_file():
        raise RopewalkError(
            f"--measured {folder} has no {RECIPE}; give the output folder of a run of `ropewalk extend`"
        )
    device, ranks = _machine(folder / VERSIONS)
    kind, _, name = device.partition(" ")
    if kind != "cuda" or gpu_named(name) != GPUS[gpu]:
        raise RopewalkError(
            f"--measured {folder} was recorded on {device}, and the plan is for {gpu}; give a run on the same kind of "
            "GPU"
        )
    theirs = load_recipe(folder / RECIPE)
    _check_same_model(folder, theirs, recipe)
    steps = tuple(
        (line["stage"], float(line["forward_backward"]) + float(line["optimizer_update"]))
        for line in MetricsLog(folder / METRICS).read()
        if line["step"] > WARM_UP and line["stage"] < len(theirs.stages) and _has_parts(line)
    )
    if not steps:
        raise RopewalkError(
            f"--measured {folder} has no recorded step to measure by; {METRICS} needs a step after the first {WARM_UP} "
            "of a stage, with forward_backward and optimizer_update"
        )
    return RecordedRun(folder, theirs, name, ranks, steps)


def _has_parts(line: Mapping[str, Any]) -> bool:
    parts = line.get("forward_backward"), line.get("optimizer_update")
    return all(isinstance(part, float) and part > 0 for part in parts)


def _machine(path: Path) -> tuple[str, int]:
    """Type and name of a run's device, and its number of processes."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return str(found["device"]), int(found["processes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RopewalkError(
            f"{path} does not say on which device and with how many processes the run was recorded ({error}); record "
            "the run again"
        ) from error


def _check_same_model(folder: Path, theirs: Recipe, ours: Recipe) -> None:
    there, here = (_dimensions(recipe) for recipe in (theirs, ours))
    # A saved config spells out values that another leaves to its class.
    for key in sorted(there.keys() & here.keys()):
        if there[key] != here[key]:
            raise RopewalkError(
                f"--measured {folder} trained a model with {key} {there[key]}, and {ours.model} has {here[key]}; give "
                "a run of the same architecture"
            )


def _dimensions(recipe: Recipe) -> dict[str, Any]:
    """The whole numbers of a model's config, without those of positions, RoPE and tokens, and its type."""
    config = read_config(recipe.model, recipe.trust_remote_code)
    apart = ("position", "rope", "token")
    numbers = {
        key: value
        for key, value in config.values.items()
        if type(value) is int and not any(word in key for word in apart)
    }
    return numbers | {"model_type": config.model_type}
