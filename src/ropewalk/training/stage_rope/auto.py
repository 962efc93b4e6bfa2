"""``auto``: choose the base with the lowest loss before a stage's training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.attention.layout import Row
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.sharded import row_losses_of
from ropewalk.evaluation.rope_probe import ProbedSetting, probe_model
from ropewalk.rope import Default, RopeMethod, candidate
from ropewalk.training.checkpoint.sharded import load_weights
from ropewalk.training.documents import probe_rows
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import AtStage, load_for_run
from ropewalk.training.stage_rope.base import Before
from ropewalk.training.update.step import autocast

CHOICES = "rope-choices.json"
"""File in the run's folder that shows the bases that ``auto`` has chosen."""
AUTO_CANDIDATES = ("critical-dimension", "ntk", "current")
AUTO_ROWS = 4


@dataclass(frozen=True)
class Choice:
    """The base that a stage trains with.

    Attributes:
        stage: index of the stage, counted from 0.
        name: name of the candidate.
        method: RoPE method of the candidate.
        rows: number of rows that the loss was measured on.
        text: origin of the rows, ``held-out`` or ``training``.
        results: results of all candidates from ``ProbedSetting.to_json``, best first.
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


def auto_candidates(recipe: Recipe, number: int, before: Before) -> dict[str, RopeMethod]:
    """The bases that ``auto`` chooses from, by name.

    Args:
        recipe: the recipe.
        number: index of the stage, counted from 0.
        before: state before the stage.

    Raises:
        RopewalkError: if the checkpoint is scaled, a candidate has no base for this context, or the recipe disables
            ropewalk's rotary module.
    """
    if not recipe.exact_rope:
        raise RopewalkError(
            f"stages.{number}.rope: method 'auto' needs ropewalk's rotary module, which exact_rope: false disables; "
            "set exact_rope: true"
        )
    stage, current = recipe.stages[number], before.method
    # A dynamic-NTK checkpoint was trained unscaled: at its trained length dynamic NTK changes nothing.
    base = current.plain
    if not isinstance(base, Default):
        scaled = "the checkpoint is" if number == 0 else "the model after the previous stage is"
        raise RopewalkError(
            f"stages.{number}.rope: method 'auto' compares bases of unscaled RoPE, but {scaled} scaled by "
            f"{current.name}; set method to {current.name!r} to scale further, or to 'default' to keep the RoPE"
        )
    bases: dict[str, RopeMethod] = {}
    for name in stage.rope.limiting.candidates or AUTO_CANDIDATES:
        try:
            method = candidate(name, base, before.length, stage.context)
        except RopewalkError as error:
            raise RopewalkError(f"stages.{number}.rope.candidates: {name}: {error}") from error
        # Only the base of the rule's method counts: the stage trains without scaling.
        bases[name] = Default(method.rotary_dim, method.rope_theta)
    return bases


def choose(candidates: Mapping[str, RopeMethod], number: int, length: int, at: AtStage) -> Choice:
    """Choose the base with the lowest loss; every rank must call this function.

    Args:
        candidates: the bases to choose from.
        number: index of the stage, counted from 0.
        length: trained length of the model before the stage, tokens.
        at: state of the run at the stage, with its rows.

    Raises:
        RopewalkError: if there are too few documents to measure on.
        RunFailure: if no candidate has a finite loss.
    """
    context, rows, stage = at.context, at.rows, at.resolved.recipe.stages[number]
    assert rows is not None
    limit = stage.rope.limiting.probe_rows or AUTO_ROWS
    measured_on, text = context.world.on_rank_0(lambda: probe_rows(at.resolved, rows, stage.context, limit))
    results = _probe(candidates, measured_on, number, length, at)
    # The best comes first, so if its loss is not finite, none is.
    if not math.isfinite(results[0].loss):
        raise context.world.known_to_all(
            RunFailure(
                f"stage {number + 1}: with rope: auto, the loss of every candidate is NaN or infinite "
                f"({', '.join(candidates)}); check the checkpoint, or set rope_theta with method theta"
            )
        )
    best = candidates[results[0].name]
    assert isinstance(best, Default)
    found = tuple(result.to_json() for result in results)
    choice = Choice(number, results[0].name, best, len(measured_on), text, found)
    context.rank_0_reporter.note(f"stage {number + 1}: {describe_choice(choice.to_json())}")
    return choice


def _probe(
    candidates: Mapping[str, RopeMethod], rows: Sequence[Row], number: int, length: int, at: AtStage
) -> list[ProbedSetting]:
    resolved, context = at.resolved, at.context
    here = resolved.stages[number]
    model = load_for_run(
        resolved,
        context,
        resolved.model,
        dtype=here.compute_dtype,
        other_ropes=resolved.other_ropes[number],
        # Checkpoints of a run with an adapter contain its parameters alone.
        with_adapter=at.weights is not None,
    )
    if at.weights is not None:
        load_weights(at.weights, model, context.world, context.mesh)
    label = f"stage {number + 1}: compare bases"
    with (
        context.rank_0_reporter.bar(label, len(candidates) * len(rows)) as advance,
        autocast(resolved.device, here.precision, context.mesh is not None),
    ):

        def progress(done: int, total: int) -> None:
            advance(done, "rows")

        return probe_model(
            model.model, candidates, rows, length, progress, row_losses_of(model, context.mesh)
        )


def describe_choice(choice: Mapping[str, Any]) -> str:
    """One sentence on a choice from :meth:`Choice.to_json`: which candidate won, and by how much."""
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
