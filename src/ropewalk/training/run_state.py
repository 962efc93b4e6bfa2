"""What the steps of a run share in one process: the recipe, its documents, and how far the training is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ropewalk.data import PackedRows, TrainingRows, open_rows
from ropewalk.data.rows.packed_rows import is_packed
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import DrawnDocuments
from ropewalk.models.compute.losses import LossModel
from ropewalk.parallel.context import RunContext
from ropewalk.rope import RopeMethod
from ropewalk.runs import Runner, Step, Todo
from ropewalk.training.checkpoint.files import CHECKPOINTS
from ropewalk.training.documents import (
    held_out_identity,
    held_out_of_run,
    note_rows,
    open_packed,
    pack_rows,
    rows_with_validation,
    validation_documents,
)
from ropewalk.training.measurement import Measurement
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.changes import Change, Progress
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import AtStage, ResolvedRecipe
from ropewalk.training.stage_rope.base import Before, Decision, method_from
from ropewalk.training.stage_rope.search import SHORT


@dataclass(frozen=True)
class Start:
    """How a launch takes up the run in a folder, as rank 0 found it.

    Attributes:
        resumed: whether the run's training had started before.
        progress: progress according to the names of its checkpoints.
        first, last: numbers of the stages to start again from, and to stop after, counted from 1; None for neither.
        changes: changes of the recipe.
        notes: sentences for the user.
    """

    resumed: bool
    progress: Progress
    first: int | None
    last: int | None
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


@dataclass(eq=False)
class Run:
    """What the steps of a run share in this process.

    Attributes:
        resolved: the recipe.
        context: processes, output folder and reporter.
        contexts: the same for each stage, with the processes arranged as the stage requests.
        runner: runs the steps, and knows the values of those that are done.
        start: how this launch began.
        model: digest of the recipe's model; None if its files are not available.
        asked: suites and lengths of the evaluations before and after training.
        during: those of the evaluations during each stage; None for a stage without.
        splits: what decides the text of each search, in the order in which the searches came up.
        clock: time of the beginning.
        steps: the steps that follow those of the documents.
        todo: what there was to do at the beginning.
        checkpoint: the latest checkpoint, verified; None if there is none, or nothing to do reads it.
        loaded: the recipe's model until it has been evaluated; emptied then, because two would not fit.
        metrics: log of the steps of training.
    """

    resolved: ResolvedRecipe
    context: RunContext
    contexts: list[RunContext]
    runner: Runner
    start: Start
    model: str | None
    asked: dict[str, list[int]]
    during: list[dict[str, list[int]] | None]
    splits: list[dict[str, Any]]
    clock: float
    metrics: MetricsLog
    steps: list[Step] = field(default_factory=list)
    todo: Todo = field(default_factory=Todo)
    checkpoint: Path | None = None
    loaded: list[LossModel] = field(default_factory=list)
    _packed: dict[tuple[int, bool], PackedRows] = field(default_factory=dict)
    _documents: list[DrawnDocuments] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._held_out_texts = cache(lambda: held_out_of_run(self.resolved, self.context))
        # On rank 0 alone: it may read all sources.
        self.held_out_identity = cache(lambda: held_out_identity(self.recipe))

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.resolved.recipe

    @property
    def output(self) -> Path:
        """Folder of the run."""
        assert self.context.output is not None
        return self.context.output

    def value(self, name: str) -> Any:
        """Value of a step, None if it is not done; on rank 0 alone until the step's turn has come."""
        if name in self.runner.values:
            return self.runner.values[name]
        if not self.context.is_rank_0:
            return None
        record = self.runner.store.record(name)
        return None if record is None or record.done is None else record.done.value

    def has_trained(self, number: int) -> bool:
        """Whether there is something of a stage, counted from 0, that training it again would throw away."""
        return self.start.progress.begun > number

    # RoPE

    def decisions(self) -> list[Decision]:
        """RoPE of the first stages, as far as it is decided."""
        values = [self.value(f"rope-{number + 1}") for number in range(len(self.recipe.stages))]
        known = values[: values.index(None)] if None in values else values
        return [Decision.from_json(value) for value in known]

    def before(self, number: int) -> Before | None:
        """RoPE of the model when a stage starts; None if that of an earlier one is not decided."""
        before, made = Before.first((self.resolved.rope, self.resolved.trained_length)), self.decisions()
        if len(made) < number:
            return None
        for stage, decision in zip(self.recipe.stages[:number], made, strict=False):
            before = before.after(stage, decision.method)
        return before

    def exported_method(self) -> RopeMethod:
        """RoPE of the result, with short factors if they were searched."""
        short = self.runner.values.get(SHORT)
        return self.decisions()[-1].method if short is None else method_from(short["method"])

    # Documents

    def pack(self, number: int, before: Mapping[str, Any] | None, short: bool = False) -> dict[str, Any]:
        """Pack the rows of a stage, or its short rows, on rank 0, and return their record."""
        rows, record = pack_rows(self.resolved, self.context, number, before, self._held_out_texts, short)
        note_rows(self.output, number, rows, short)
        self._packed[number, short] = rows
        return record

    def rows(self, number: int | None, short: bool = False) -> PackedRows | None:
        """Packed rows of a stage, verified; packed again if they are gone. Every rank must call this method.

        Args:
            number: index of the stage; None for none.
            short: whether to open its short rows, which only some stages have.
        """
        if number is None or rows_step(number, short) not in rows_steps(self.recipe, number):
            return None
        key = number, short

        def folder() -> str:
            if key not in self._packed:
                record = self.value(rows_step(number, short))
                there = open_packed(self.resolved, self.context, number, record, True, short)
                if there is None:
                    self.pack(number, record, short)
                else:
                    self._packed[key] = there
            return str(self._packed[key].folder.resolve())

        place = Path(self.context.world.on_rank_0(folder))
        if key not in self._packed:
            if not is_packed(place):
                raise RopewalkError(
                    f"the folder of packed rows {place} is not visible on this machine; set output to a folder on a "
                    "file system that all machines share"
                )
            self._packed[key] = open_rows(place)
        return self._packed[key]

    def training_rows(self, number: int) -> TrainingRows | None:
        """All rows of a stage; None if it does not train. Every rank must call this method."""
        rows, short = self.rows(number), self.rows(number, short=True)
        share = self.recipe.stages[number].short_rows or 0.0
        return None if rows is None else TrainingRows(rows, short, share)

    def held_out_rows(self) -> PackedRows | None:
        """Packed rows whose held-out documents the run evaluates on; every rank must call this method."""
        own = [n for n, stage in enumerate(self.recipe.stages) if stage.steps and not stage.own_documents]
        rows = [self.rows(n) if own and n == own[-1] else None for n in range(len(self.recipe.stages))]
        return rows_with_validation(self.recipe, rows)

    def split(self, search: str) -> dict[str, Any] | None:
        """Rows of a search, as they were split off last; None if they were not yet."""
        held_out = self.value("held-out")
        found = [each for each in (held_out or {"searches": []})["searches"] if each["search"] == search]
        return {"rows": found[-1]["sha256"]} if found else None

    def documents(self) -> DrawnDocuments:
        """Documents that evaluations read; every rank must call this method."""
        if not self._documents:
            rows, searched = self.held_out_rows(), searched_of(self.runner.values["held-out"]["searches"])
            self._documents.append(
                self.context.world.on_rank_0(lambda: validation_documents(self.resolved, rows, searched))
            )
        return self._documents[0]

    def measurement(self, stage: int | None = None) -> Measurement:
        """Evaluation before and after training, or during a stage; every rank must call this method."""
        asked = self.asked if stage is None else self.during[stage]
        return Measurement(self.resolved, asked or {}, self.documents(), stage)

    # Stages

    def end_of(self, number: int) -> Path:
        """The checkpoint at the end of a stage that is done, counted from 0."""
        checkpoint: str = self.runner.values[f"train-{number + 1}"]["checkpoint"]
        return self.output / CHECKPOINTS / checkpoint

    def without_rows(self, number: int | None, weights: Path | None) -> AtStage:
        """State of the run at a stage, or after the last one if None, for what reads no rows."""
        context = self.context if number is None else self.contexts[number]
        return AtStage(self.resolved, context, weights)

    def at(
        self, number: int | None, weights: Path | None = None, searched: frozenset[int] | None = None
    ) -> AtStage:
        """State of the run at a stage, or after the last one if None; every rank must call this method.

        Args:
            number: index of the stage.
            weights: checkpoint that the stage starts from; None for the recipe's model.
            searched: documents that searches measure on; None for those of all searches.
        """
        if searched is None:
            searched = searched_of(self.runner.values["held-out"]["searches"])
        return replace(
            self.without_rows(number, weights),
            rows=self.rows(number),
            short_rows=self.rows(number, short=True),
            validation=self.held_out_rows(),
            searched=searched,
        )


def rows_step(number: int, short: bool = False) -> str:
    """Name of the step that packs the rows of a stage, counted from 0, or its short rows."""
    return f"{'short-' if short else ''}rows-{number + 1}"


def rows_steps(recipe: Recipe, number: int) -> tuple[str, ...]:
    """Names of the steps that pack the rows of a stage, counted from 0; none for a stage without training."""
    stage = recipe.stages[number]
    if not stage.steps:
        return ()
    kinds = (False,) if stage.short_rows is None else (False, True)
    return tuple(rows_step(number, short) for short in kinds)


def searched_of(searches: list[dict[str, Any]]) -> frozenset[int]:
    """Hashes of the documents of all searches."""
    return frozenset(number for each in searches for number in each["documents"])
