"""Which checkpoints a run exports: the last, the best by a score during training, or several that are averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.evaluation.tasks.registry import chosen_tasks
from ropewalk.io.lengths import counted
from ropewalk.parallel import World
from ropewalk.training.checkpoint.files import (
    CHECKPOINTS,
    Position,
    check_checkpoint,
    checkpoint_name,
    checkpoints_in,
    place_of,
)
from ropewalk.training.measurement import DuringTraining, evaluated_during, name_of
from ropewalk.training.recipe.export import Export
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe


@dataclass(frozen=True)
class FinalWeights:
    """The checkpoints whose weights a run exports.

    Attributes:
        export: the recipe's choice.
        checkpoints: their folders, the earliest first; the weights of several are averaged.
        score: score of the best; None for other choices.
    """

    export: Export
    checkpoints: tuple[Path, ...]
    score: float | None = None

    def record(self) -> dict[str, Any] | None:
        """JSON values for the record of the exported model and the summary; None for the last checkpoint."""
        if self.export.weights == "last":
            return None
        names = [path.name for path in self.checkpoints]
        return {**dict(self.export), "checkpoints": names, "score": self.score}


def exported_as(record: Mapping[str, Any] | None) -> Export:
    """The choice that an exported model was made with, from :meth:`FinalWeights.record`."""
    if record is None:
        return Export()
    return Export.model_validate({name: record[name] for name in Export.model_fields})


def describe_weights(record: Mapping[str, Any]) -> str:
    """One sentence on the exported weights, from :meth:`FinalWeights.record`."""
    places = [place_of(Path(name)) for name in record["checkpoints"]]
    steps = f"step{'s' * (len(places) > 1)} {', '.join(f'{step:,}' for _, step in places)} of stage {places[-1][0] + 1}"
    if record["weights"] == "average":
        return f"mean of {len(places)} checkpoints: {steps}"
    by = "" if record["by"] is None else f" by {record['by']}"
    return f"{steps}, the best{by} with a score of {record['score']:.4g}"


def final_weights(output: Path, recipe: Recipe, last: Path) -> FinalWeights:
    """The checkpoints that a run exports after its last step.

    Args:
        output: folder of the run.
        recipe: its recipe.
        last: checkpoint of the last step.

    Raises:
        RopewalkError: if a checkpoint is missing.
    """
    export, (stage, step) = recipe.export, place_of(last)
    if export.weights == "last":
        return FinalWeights(export, (last,))
    if export.weights == "average":
        # Only of the last stage: earlier ones were trained with another RoPE.
        there = [path for path in checkpoints_in(output / CHECKPOINTS) if place_of(path)[0] == stage]
        if len(there) < export.average_of:
            raise RopewalkError(
                f"export averages the last {export.average_of} checkpoints of stage {stage + 1}, but "
                f"{output / CHECKPOINTS} contains only {counted(len(there), 'checkpoint')} of this "
                "stage; "
                + (
                    f"set export to {{weights: average, average_of: {len(there)}}}"
                    if len(there) > 1
                    else "set export to 'last'"
                )
            )
        return FinalWeights(export, tuple(there[-export.average_of :]))
    best = _best(output, recipe, Position(stage, step, 0))
    if best is None:
        raise RopewalkError(
            "no evaluation during training measured the score of export.by; set export to 'last'"
        )
    return FinalWeights(export, (_path(output, best[1]),), best[0])


def best_checkpoint(output: Path, recipe: Recipe, until: Position | None) -> Path | None:
    """The checkpoint that would be exported as the best if training ended now, which must not be deleted.

    Args:
        output: folder of the run.
        recipe: its recipe.
        until: later evaluations are left out; None leaves out all.

    Returns:
        Its folder; None if the recipe does not export the best, or nothing was measured in the last stage.
    """
    if recipe.export.weights != "best" or until is None:
        return None
    best = _best(output, recipe, until)
    return None if best is None else _path(output, best[1])


def check_final_weights(output: Path, recipe: Recipe, checkpoint: Path | None) -> None:
    """Raise at the start of a run for checkpoints that it would miss at its end.

    Args:
        output: folder of the run.
        recipe: its recipe.
        checkpoint: checkpoint that the run resumes from; None if there is none.
    """
    if checkpoint is None:
        return
    stage, step = place_of(checkpoint)
    # All steps are done, so the export itself is next.
    if (stage, step) == (len(recipe.stages) - 1, recipe.stages[-1].steps):
        paths = final_weights(output, recipe, checkpoint).checkpoints
    else:
        best = best_checkpoint(output, recipe, Position(stage, step, 0))
        paths = () if best is None else (best,)
    for path in paths:
        if not path.is_dir():
            raise RopewalkError(
                f"export would take the best checkpoint so far, {path.name}, but that checkpoint was deleted; set "
                "export to 'last'"
            )


def check_metric(resolved: ResolvedRecipe, asked: Mapping[str, Sequence[int]] | None) -> None:
    """Raise if no evaluation during the last stage measures the score that decides which weights are the best.

    Args:
        resolved: the recipe.
        asked: suites and lengths of these evaluations; None if there are none.
    """
    export = resolved.recipe.export
    if export.weights != "best":
        return
    evaluation = resolved.recipe.evaluation.in_training()
    planned = []
    if asked:
        chosen = chosen_tasks(evaluation.settings(tuple(asked)), resolved.mesh.world_size > 1)
        planned = [
            name_of(TaskResult.not_run(suite, task, length, "planned"))
            for suite, lengths in asked.items()
            for task in chosen[suite]
            for length in lengths or (None,)
        ]
    # A suite with lengths of its own names its results itself.
    own = [suite for suite, lengths in (asked or {}).items() if not lengths]
    only = _only_suite(resolved.recipe)
    if (
        not any(export.selects(name, only) for name in planned)
        and (export.by or only).split("/")[0] not in own
    ):
        raise RopewalkError(
            f"export.by is {export.by or only}, but evaluation during the last stage measures "
            f"{', '.join(planned) or 'nothing'}; set export.by to a score that is measured"
        )


def check_whole(found: FinalWeights, world: World) -> None:
    """Raise if a checkpoint is damaged; every rank must call this function.

    The last one was written by this process or verified at its start; others may be older.
    """
    for path in found.checkpoints if found.export.weights != "last" else ():
        if (what := check_checkpoint(path, world)) is not None:
            raise world.known_to_all(
                RopewalkError(
                    f"checkpoint {path.name}, which export needs, is damaged ({what}); restore the checkpoint, or set "
                    "export to 'last'"
                )
            )


def _best(output: Path, recipe: Recipe, until: Position) -> tuple[float, DuringTraining] | None:
    """Best score of the last stage's evaluations up to a position, and the latest evaluation that has it."""
    number, only = len(recipe.stages) - 1, _only_suite(recipe)
    best: tuple[float, DuringTraining] | None = None
    for each in evaluated_during(output, until):
        selected = [result for result in each.results if recipe.export.selects(name_of(result), only)]
        scores = [result.score for result in selected]
        # NaN compares false with every number, so a NaN that came first would stay the best.
        if each.stage != number or not scores or not all(map(math.isfinite, scores)):
            continue
        score = fmean(scores)
        # Perplexity is the only score of which less is better.
        lower = selected[0].unit == "perplexity"
        # Equal scores go to the later checkpoint, which has trained longer.
        if best is None or (score <= best[0] if lower else score >= best[0]):
            best = score, each
    return best


def _path(output: Path, measured: DuringTraining) -> Path:
    return output / CHECKPOINTS / checkpoint_name(Position(measured.stage, measured.step, 0))


def _only_suite(recipe: Recipe) -> str:
    """The suite that a recipe without ``export.by`` goes by, which has been checked to be the only one."""
    return recipe.evaluation.in_training().suites[0]
