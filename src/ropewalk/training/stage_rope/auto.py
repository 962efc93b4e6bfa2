"""What an ``auto`` stage chooses: the base of lowest loss before the stage's training, kept for resumed runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.attention.layout import Row
from ropewalk.data import PackedRows
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.sharded import row_losses_of
from ropewalk.evaluation.probe import ProbeResult, probe
from ropewalk.io.files import parse_json, write_json
from ropewalk.io.progress import Reporter
from ropewalk.rope import Default
from ropewalk.training.checkpoint.sharded import load_weights
from ropewalk.training.context import Team
from ropewalk.training.documents import probe_rows
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.methods import AUTO_ROWS
from ropewalk.training.step import autocast

CHOICES = "rope-choices.json"


@dataclass(frozen=True)
class Choice:
    """The base that a stage trains with.

    Attributes:
        stage: counted from 0.
        name: the candidate's name.
        method: its method.
        rows: how many rows it was measured on.
        text: what they are made of, ``held-out`` or ``training``.
        results: of all candidates, as ``ProbeResult.to_json`` gives them, best first.
    """

    stage: int
    name: str
    method: Default
    rows: int
    text: str
    results: tuple[Mapping[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "name": self.name,
            "rotary_dim": self.method.rotary_dim,
            "rope_theta": self.method.rope_theta,
            "rows": self.rows,
            "text": self.text,
            "results": [dict(result) for result in self.results],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Choice:
        """What :meth:`to_json` wrote."""
        method = Default(value["rotary_dim"], value["rope_theta"])
        return cls(
            value["stage"], value["name"], method, value["rows"], value["text"], tuple(value["results"])
        )


def choose_base(
    number: int,
    recipe: Recipe,
    chosen: Plan,
    candidates: Mapping[str, Default],
    latest: Path | None,
    length: int,
    rows: PackedRows,
    output: Path,
    begun: bool,
    reporter: Reporter,
    team: Team,
) -> Choice:
    """The base of a stage: as chosen before, or by a probe whose result is on disk before this returns.

    Args:
        number: of the stage, counted from 0.
        candidates: bases by name.
        latest: checkpoint whose weights the stage starts from; the model's own if None.
        length: tokens that it is trained for.
        rows: the stage's packed rows.
        output: folder of the run.
        begun: whether the stage has a checkpoint already; it is never probed for again.
        reporter: progress.
        team: the processes that take part.

    Raises:
        RopewalkError: if the choice of a stage that has begun is gone.
        RunFailure: if no candidate has a finite loss.
    """
    before = team.world.lead(lambda: _chosen_before(number, candidates, output, begun))
    if before is not None:
        return before
    stage = recipe.stages[number]
    limit = stage.rope.probe_rows or AUTO_ROWS
    measured_on, text = team.world.lead(lambda: probe_rows(recipe, chosen, rows, stage.context, limit))
    results = _probe(latest, recipe, chosen, candidates, measured_on, length, number, reporter, team)
    if not math.isfinite(results[0].loss):
        raise team.world.known_to_all(
            RunFailure(
                f"stage {number + 1}: no candidate of rope auto has a finite loss ({', '.join(candidates)}); the "
                "checkpoint is damaged, or give the base itself with method theta"
            )
        )
    best = results[0].name
    found = tuple(result.to_json() for result in results)
    choice = Choice(number, best, candidates[best], len(measured_on), text, found)
    if team.leads:
        choices = [*choices_in(output).values(), choice]
        write_json(output / CHOICES, [each.to_json() for each in choices])
    reporter.note(f"stage {number + 1}: {describe_choice(choice.to_json())}")
    return choice


def _chosen_before(
    number: int, candidates: Mapping[str, Default], output: Path, begun: bool
) -> Choice | None:
    """What is on the disk of an earlier choice, if it was made and fits the recipe."""
    choice = choices_in(output).get(number)
    if choice is not None and candidates.get(choice.name) != choice.method:
        raise RopewalkError(
            f"{output / CHOICES} says that stage {number + 1} trains with {choice.name} and rope_theta "
            f"{choice.method.rope_theta:g}, which is none of its candidates; restore the file, or start again"
        )
    if choice is None and begun:
        raise RopewalkError(
            f"stage {number + 1} has begun, and {output / CHOICES} does not say with which base; restore the file, "
            "or start again"
        )
    return choice


def describe_choice(choice: Mapping[str, Any]) -> str:
    """One sentence on a choice as :meth:`Choice.to_json` gives it: which candidate won, and by how much."""
    best, *others = choice["results"]
    rows = f"{choice['rows']} {choice['text']} row{'s' if choice['rows'] > 1 else ''}"
    start = (
        f"auto chose {choice['name']}, rope_theta {choice['rope_theta']:,.0f}: loss {best['loss']:.4f} on {rows} "
        "before training"
    )
    return "; ".join([start, *(_behind(other) for other in others)])


def _behind(result: Mapping[str, Any]) -> str:
    if result["loss"] is None:
        return f"{result['name']} has no finite loss"
    low, high = result["difference_ci95"]
    interval = "" if low is None else f" (95 % {low:.4f} to {high:.4f})"
    return f"{result['name']} +{result['difference']:.4f}{interval}"


def choices_in(output: Path) -> dict[int, Choice]:
    """What the stages of a run chose so far, by the stage's number.

    Raises:
        RopewalkError: if the file is damaged.
    """
    path = output / CHOICES
    if not path.is_file():
        return {}
    try:
        choices = [Choice.from_json(value) for value in parse_json(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RopewalkError(f"{path} is damaged ({error}); restore it, or start again") from error
    by_stage = {choice.stage: choice for choice in choices}
    if len(by_stage) < len(choices) or not all(choice.results for choice in choices):
        raise RopewalkError(
            f"{path} is damaged (a stage stands twice, or has no results); restore it, or start again"
        )
    return by_stage


def _probe(
    latest: Path | None,
    recipe: Recipe,
    chosen: Plan,
    candidates: Mapping[str, Default],
    rows: Sequence[Row],
    length: int,
    number: int,
    reporter: Reporter,
    team: Team,
) -> list[ProbeResult]:
    dtype = torch.bfloat16 if chosen.precision == "bfloat16" else torch.float32
    model = team.load(chosen.model, recipe, chosen, dtype=dtype)
    if latest is not None:
        load_weights(latest, model, team.world, team.mesh)
    label = f"stage {number + 1} choosing its base"
    with (
        reporter.bar(label, len(candidates) * len(rows)) as advance,
        autocast(chosen.device, chosen.precision, team.mesh is not None),
    ):

        def progress(done: int, total: int) -> None:
            advance(done, "rows")

        return probe(model.model, candidates, rows, length, progress, row_losses_of(model, team.mesh))
