"""The result of a run, as its ``summary.json`` has it."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ropewalk.compatibility import Reading
from ropewalk.data.mixture.report import REPORTS
from ropewalk.data.read.embedded import EMBEDDED, RETRIEVAL
from ropewalk.evaluation import TaskResult
from ropewalk.evaluation.score_rows import score_during, score_records
from ropewalk.io.files import write_json
from ropewalk.io.results import Result
from ropewalk.models.checkpoint.origin import origin_of
from ropewalk.rope import LongRope, RopeMethod
from ropewalk.training.checkpoint.files import read_exported_weights
from ropewalk.training.folder import ADAPTER, MODEL, SUMMARY
from ropewalk.training.measurement import evaluated_during, results_in, short_context
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.run_state import Run
from ropewalk.training.stage_engine import choices_in
from ropewalk.training.stage_rope.base import Decision
from ropewalk.training.stage_rope.search import SCALE, SHORT
from ropewalk.versions import software_versions


@dataclass(frozen=True)
class RunResult(Result):
    """Result of a run, as in its ``summary.json``.

    Attributes:
        output: folder of the run.
        model: folder of the extended model.
        trained_length, context: context before and after the run, in tokens.
        engine, device, precision: attention engine, device and precision of the training.
        processes: number of processes, and the degree of each kind of parallelism.
        stages: settings and results of each stage.
        short_factors: result of the search for LongRoPE's short factors, those for inputs up to the original length;
            None if there was no search.
        original_length: trained length before any extension, in tokens, if the result is a longrope checkpoint;
            otherwise None.
        short_context: perplexity at ``original_length`` before and after training; None if it was not measured.
        before, after: evaluation results before and after training.
        during: stage, step and scores of each evaluation during training. Empty, and left out of JSON, if there was
            none.
        exported: checkpoints that the weights of ``model`` come from, and the settings ``export`` of the recipe. The
            weights are those of the checkpoint with the best score, or the mean of several checkpoints. None, and left
            out of JSON, if the weights are those of the last step.
        softmax_scale: the softmax scale in the exported weights, and the losses of all scales that were measured. None,
            and left out of JSON, if the recipe measures none.
        history: changes that ``--resume`` made to the recipe.
        seconds: duration of the process that finished the run.
        versions: versions of the software, and a description of the machine.
        adapter: folder of the adapter. None, and left out of JSON, if the run trained the model's own weights.
        source: the model before the run: its name, its id and revision on the Hub, the licence in its model card, the
            SHA-256 of its config and weights, and its RoPE.
        files: paths of the report and its figures, which only the command ``ropewalk extend`` writes. None, and left
            out of JSON, in ``summary.json`` and in the result of the Python function.
        readers: how other programs read the model's RoPE. None, and left out of JSON, wherever ``files`` is left out.
    """

    output: Path
    model: Path
    trained_length: int
    context: int
    engine: str
    device: str
    precision: str
    processes: dict[str, int]
    stages: tuple[dict[str, Any], ...]
    short_factors: dict[str, Any] | None
    original_length: int | None
    short_context: dict[str, Any] | None
    before: tuple[TaskResult, ...]
    after: tuple[TaskResult, ...]
    during: tuple[dict[str, Any], ...]
    history: tuple[dict[str, Any], ...]
    seconds: float
    versions: dict[str, str]
    source: dict[str, Any]
    adapter: Path | None = None
    exported: dict[str, Any] | None = None
    softmax_scale: dict[str, Any] | None = None
    files: tuple[Path, ...] | None = None
    readers: tuple[Reading, ...] | None = None

    def scores(self) -> list[dict[str, Any]]:
        during = [
            replace(score_during(score), when=f"stage {found['stage']} step {found['step']}").record()
            for found in self.during
            for score in found["scores"]
            if score["score"] is not None
        ]
        return [*score_records({"before": self.before}), *during, *score_records({"after": self.after})]

    def to_json(self) -> dict[str, Any]:
        """Content of ``summary.json``; without the parts that this run does not have, or not yet."""
        values = super().to_json()
        if not values["during"]:
            del values["during"]
        for name in ("adapter", "exported", "softmax_scale", "files", "readers"):
            if values[name] is None:
                del values[name]
        return values


@dataclass(frozen=True)
class StoppedRun(Result):
    """A run that has stopped after a stage, as requested.

    Attributes:
        output: folder of the run.
        stage: the stage after which it stopped, counted from 1.
        stages: number of stages of its recipe.
        checkpoint: checkpoint at the end of the stage.
        seconds: duration of this process.
    """

    output: Path
    stage: int
    stages: int
    checkpoint: Path
    seconds: float


def versions(resolved: ResolvedRecipe) -> dict[str, str]:
    """Versions of the software, and the machine, on which a result depends."""
    device = resolved.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        **software_versions(),
        "platform": platform.platform(),
        "device": f"{device.type} {machine}",
        "processes": str(resolved.mesh.world_size),
        "threads": str(torch.get_num_threads()),
    }


def summary(run: Run) -> RunResult:
    """The content of ``summary.json``, which is written whatever else there was to do."""
    resolved, context, values = run.resolved, run.context, run.runner.values
    before, after = context.world.on_rank_0(
        lambda: [results_in(run.output, when) or [] for when in ("before", "after")]
    )
    decisions = run.decisions()
    # Short factors change the method of the last stage after its training; the summary names the exported one.
    methods = [*(each.method for each in decisions[:-1]), run.exported_method()]
    result = RunResult(
        output=run.output,
        model=run.output / MODEL,
        trained_length=resolved.trained_length,
        context=resolved.target,
        engine=resolved.engine,
        device=str(resolved.device),
        precision=resolved.precision,
        processes={"number": context.world.size, **asdict(resolved.mesh)},
        stages=tuple(
            _stage_summary(number, run, found, method)
            for number, (found, method) in enumerate(zip(decisions, methods, strict=True))
        ),
        short_factors=values[SHORT]["found"] if SHORT in values else None,
        softmax_scale=values.get(SCALE),
        original_length=resolved.original_length,
        short_context=short_context(resolved.original_length, before, after),
        before=tuple(before),
        after=tuple(after),
        during=tuple(each.summary() for each in evaluated_during(run.output)),
        history=tuple(context.world.on_rank_0(lambda: run.runner.store.about.history)),
        seconds=time.perf_counter() - run.clock,
        versions=versions(resolved),
        adapter=None if resolved.adapter is None else run.output / ADAPTER,
        exported=context.world.on_rank_0(lambda: read_exported_weights(run.output / MODEL)),
        source=context.world.on_rank_0(lambda: _source(run)),
    )
    if context.is_rank_0:
        write_json(run.output / SUMMARY, result.to_json())
    # No rank returns before the summary is on disk.
    context.world.barrier()
    return result


def _source(run: Run) -> dict[str, Any]:
    """The model before the run, for the summary."""
    chosen, rope = run.recipe.model, run.resolved.rope
    origin = origin_of(run.resolved.model, chosen if chosen in (EMBEDDED, RETRIEVAL) else None)
    return {**asdict(origin), "sha256": run.model, "rope": {"method": rope.name, **rope.to_entry()}}


def _stage_summary(number: int, run: Run, decision: Decision, method: RopeMethod) -> dict[str, Any]:
    engine = choices_in(run.output).get(number)
    stage, rows = run.recipe.stages[number], run.runner.values.get(f"rows-{number + 1}")
    trained = run.runner.values.get(f"train-{number + 1}") or {}
    ropes = run.resolved.other_ropes[number].items()
    others = {kind: {"method": rope.name, **rope.to_entry()} for kind, rope in ropes}
    found: dict[str, Any] = dict(decision.found)
    if isinstance(method, LongRope):
        found |= {
            "short_factor": list(method.short_factor),
            "long_factor": list(method.long_factor),
            "attention_factor": method.attention_factor,
        }
    return {
        "context": stage.context,
        "method": stage.rope.limiting.method,
        "rope_theta": method.rope_theta,
        **({"other_layers": others} if others else {}),
        **found,
        "pattern": stage.pattern,
        "positions": stage.positions,
        "steps": stage.steps,
        "tokens": stage.steps * stage.rows_per_step * stage.context,
        "rows": 0 if rows is None else rows["rows"],
        "mixture": None if rows is None else rows["mixture"],
        **{key: rows[key] for key in REPORTS if rows is not None and key in rows},
        **({"kinds": trained["kinds"]} if "kinds" in trained else {}),
        **({"own": own} if (own := stage.own_settings) else {}),
        **({} if engine is None else {"engine": engine.summary()}),
    }
