"""One training stage: from a model or checkpoint to a checkpoint at the stage's context length."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

import torch

from ropewalk.attention.flash import flash_activated
from ropewalk.errors import RunFailure, Stopped
from ropewalk.io.progress import Advance, Silent
from ropewalk.io.signals import noted_signals
from ropewalk.models.attention.hooks import localities_of
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.compute.pieces import fuse_pieces
from ropewalk.models.compute.routing import Routing
from ropewalk.models.compute.tiled_mlp import tile_mlps
from ropewalk.models.load import cast_parameters, checkpoint_activations
from ropewalk.parallel.heartbeat import heartbeat, outlast_heartbeats
from ropewalk.rope import RopeMethod
from ropewalk.training.checkpoint.files import CHECKPOINTS, Position
from ropewalk.training.checkpoint.sharded import load_checkpoint, load_moments, load_weights
from ropewalk.training.checkpoint.writing import checkpointing
from ropewalk.training.copied import copying
from ropewalk.training.final_weights import best_checkpoint
from ropewalk.training.folder import left_off
from ropewalk.training.measurement import Measurement, measure_during, tracked
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.resolved import AtStage, ResolvedStage, load_for_run, share_of_step
from ropewalk.training.stage_engine import engine_of_stage, measures_engine
from ropewalk.training.update.clock import StepClock
from ropewalk.training.update.optimizer import MasterAdamW, learning_rate_at
from ropewalk.training.update.peak_memory import peak_memory
from ropewalk.training.update.speed import Speed
from ropewalk.training.update.step import Batch, ForwardPass, StepResult, micro_batches, prepare, train_step

log = logging.getLogger("ropewalk")

Made = TypeVar("Made")

HEARTBEATS = "heartbeats"
"""Subfolder of a run of several processes that shows, while it trains, where each of them is."""
CONTINUE = "the same command with --resume continues from the last checkpoint"
MOST_SKIPPED = 3
"""Number of consecutive steps with a non-finite loss or gradient after which the run fails."""


@dataclass(frozen=True, eq=False)
class StageRun:
    """Input of one stage.

    Attributes:
        number: index of the stage, counted from 0.
        at: state of the run at the stage: recipe, processes, rows and latest checkpoint.
        rope: RoPE method that the stage trains with.
        tokens_before, steps_before: tokens and steps of earlier stages.
        resumed: whether the latest checkpoint belongs to this stage rather than to the end of the previous one.
        measurement: evaluation during the stage; None if there is none.
    """

    number: int
    at: AtStage
    rope: RopeMethod
    tokens_before: int
    steps_before: int
    resumed: bool = False
    measurement: Measurement | None = None


def run_stage(run: StageRun, metrics: MetricsLog) -> Path:
    """Train a stage from its start or from one of its checkpoints; with 0 steps only its RoPE changes.

    Args:
        run: input of the stage.
        metrics: log that receives each step.

    Returns:
        The checkpoint of its last step.

    Raises:
        RunFailure: if the loss or the gradient is not finite for several steps, or in the last one.
        Stopped: if SIGTERM or SIGUSR1 arrived, on any rank; after the current step and its checkpoint.
        RopewalkError: if a checkpoint cannot be written or read.
    """
    if not measures_engine(run.at.resolved, run.number):
        return _run_stage(run, metrics)
    choice = engine_of_stage(run.number, run.at)
    at = replace(run.at, resolved=run.at.resolved.with_engine(run.number, choice.engine))
    with flash_activated(choice.flash):
        return _run_stage(replace(run, at=at), metrics)


def _run_stage(run: StageRun, metrics: MetricsLog) -> Path:
    """:func:`run_stage` with the engine that the stage's settings name."""
    resolved, context = run.at.resolved, run.at.context
    recipe = resolved.recipe
    stage = recipe.stages[run.number]
    model, optimizer, position = _begun(run)
    aux_loss = resolved.router_aux_losses[run.number]
    forward = ForwardPass(resolved.stages[run.number].precision, stage.offload_activations, aux_loss)
    speed, clock = Speed.of_stage(model, context.mesh), StepClock(model.device)
    skipped, last = 0, run.at.weights
    label = f"stage {run.number + 1}/{len(recipe.stages)} training"
    stopped_by = 0
    outlast_heartbeats(context.world, recipe.step_timeout)
    with (
        noted_signals() as noted,
        heartbeat(run.at.output / HEARTBEATS, context.world, recipe.step_timeout, CONTINUE) as progress,
        (context.rank_0_reporter if stage.steps else Silent()).bar(label, stage.steps) as advance,
        checkpointing(
            run.at.output / CHECKPOINTS,
            model,
            optimizer,
            resolved.tokenizer,
            recipe.checkpoints,
            context,
            copying(run.at.output, recipe.checkpoints.copy_to),
            stage.offload_optimizer,
        ) as checkpoints,
    ):
        advance(position.step, "")
        if not stage.steps:
            # The next stage, the export and a resumed run start from a checkpoint, also after a stage without steps.
            last = checkpoints.save(position)
        steps = range(position.step, stage.steps)
        # Rows of the next step are read, and plans of attention made, while the device computes this one.
        ahead = waited_for(made_ahead(partial(_batches, run, model), steps))
        progress.reached(position.step + 1)
        for step, (batches, waited) in zip(steps, ahead, strict=True):
            started_at = time.perf_counter()
            rate = learning_rate_at(step, stage)
            result = train_step(model, batches, optimizer, rate, forward, context.mesh, clock)
            # train_step has read the loss back, so on a GPU at most the update of the weights is still running.
            seconds = time.perf_counter() - started_at
            parts = {"rows_wait": waited} | clock.seconds()
            # Evaluations, checkpoints and their copies may take longer than any step.
            progress.pause()
            done = step + 1
            # Rows have a fixed length, so progress in tokens follows from the step, in a resumed run too.
            tokens = run.tokens_before + done * stage.rows_per_step * stage.context
            if context.is_rank_0:
                values = _values(run.number, done, result, rate, tokens, seconds) | parts
                values |= speed.of(batches, seconds) | peak_memory(model.device) | checkpoints.seconds()
                # Before the check below, so that the log shows the steps that diverged.
                metrics.append(values, run.steps_before + done)
            skipped = 0 if result.applied else skipped + 1
            # A single step may overflow by chance; several in a row, or the last one, mean divergence.
            if skipped == MOST_SKIPPED or (skipped and done == stage.steps):
                raise context.world.known_to_all(
                    RunFailure(
                        f"the loss or the gradient was not finite in {_last(skipped, done)} of stage "
                        f"{run.number + 1}; resume from the latest checkpoint, which is not affected, with a lower "
                        f"learning rate: --resume --set stages.{run.number}.learning_rate={stage.learning_rate / 2:g}"
                    )
                )
            advance(done, f"loss {result.loss:.3f}  {result.tokens / seconds:,.0f} tokens/s")
            reached, ends = Position(run.number, done, tokens), done == stage.steps
            # No checkpoint right after skipped steps: a retry should start before the divergence.
            due = (done % recipe.checkpoints.every == 0 and not skipped) or ends
            # Before the checkpoint, so that a run that resumes from it has all measurements up to its step.
            if (
                run.measurement is not None
                and not skipped
                and (ends or done % (recipe.evaluation.every or done) == 0)
            ):
                # Whatever turns out to be the best of the last stage can be exported.
                due = due or (recipe.export.weights == "best" and run.number == len(recipe.stages) - 1)
                shown = _beside(advance, done)
                results = measure_during(reached, model, run.measurement, context, shown)
                metrics.track(tracked(results), run.steps_before + done)
            # Ranks receive a signal between different steps, but must stop after the same one.
            stopped_by = context.world.highest(noted())
            if due or (stopped_by and not skipped):
                last = checkpoints.save(reached, _best(run, reached))
            if stopped_by:
                break
            if not ends:
                # Reading its rows belongs to the next step, and may be what hangs.
                progress.reached(done + 1)
    # After the block, which completes checkpoints that are written in the background.
    _tell_last_checkpoint(run, checkpoints.seconds(), metrics)
    # Again, because a signal may have arrived since the last step asked.
    stopped_by = stopped_by or context.world.highest(noted())
    if stopped_by:
        raise context.world.known_to_all(
            Stopped(f"stopped by {Signals(stopped_by).name}: {left_off(run.at.output)}")
        )
    assert last is not None
    return last


def _tell_last_checkpoint(run: StageRun, seconds: dict[str, float], metrics: MetricsLog) -> None:
    """Say how long the last checkpoint took, which no later step has a line for."""
    if run.at.context.is_rank_0:
        stage = run.at.resolved.recipe.stages[run.number]
        metrics.track(seconds, run.steps_before + stage.steps)
    if (waited := seconds.get("checkpoint_wait", 0.0)) >= 1:
        run.at.context.rank_0_reporter.note(
            f"stage {run.number + 1}: waited {waited:,.0f} s for the last checkpoint"
        )


def _last(count: int, step: int) -> str:
    """The last steps up to a step, in words."""
    return f"step {step}" if count == 1 else f"steps {step - count + 1} to {step}"


def _best(run: StageRun, reached: Position) -> Path | None:
    """The checkpoint to keep because it is the best so far; None if the run does not export the best."""
    recipe, output = run.at.resolved.recipe, run.at.output
    if recipe.export.weights != "best":
        return None
    return run.at.context.world.on_rank_0(lambda: best_checkpoint(output, recipe, reached))


def _beside(advance: Advance, step: int) -> Callable[[str, int, int], None]:
    """Show the progress of an evaluation beside the bar of the training, which stays at its step."""
    return lambda what, done, total: advance(step, f"evaluation {what} {done}/{total}")


def _begun(run: StageRun) -> tuple[LossModel, MasterAdamW, Position]:
    """Model, optimizer and position at which the stage starts or resumes; also sets the random state."""
    resolved, context, after, resumed = run.at.resolved, run.at.context, run.at.weights, run.resumed
    decided = resolved.stages[run.number].settings
    bfloat16 = resolved.stages[run.number].precision == "bfloat16"
    model = load_for_run(
        resolved,
        context,
        resolved.model,
        (run.rope, decided.stage.context),
        torch.float32,
        torch.bfloat16 if bfloat16 else None,
        resolved.other_ropes[run.number],
        with_adapter=True,
        offload=decided.stage.offload_optimizer,
        engine=resolved.stages[run.number].engine,
    )
    # Before the masters are made, which are copies of these weights.
    if after is not None and not resumed:
        load_weights(after, model, context.world, context.mesh)
    optimizer = ready_to_train(model, resolved.stages[run.number], bfloat16 and context.mesh is None)
    if after is not None and not resumed and decided.stage.moments != "reset":
        rewarm = decided.stage.moments == "rewarm"
        load_moments(after, model, optimizer, context.world, context.mesh, rewarm)
    # Before load_checkpoint, which restores the saved random state.
    torch.manual_seed(decided.seed)
    position = Position(run.number, 0, run.tokens_before)
    if after is not None and resumed:
        position = load_checkpoint(after, model, optimizer, context.world, context.mesh)
    return model, optimizer, position


def ready_to_train(model: LossModel, stage: ResolvedStage, narrowed: bool) -> MasterAdamW:
    """Prepare a loaded model for training in place, and make its optimizer.

    Args:
        model: model with float32 parameters, except for frozen ones under an adapter.
        stage: the stage.
        narrowed: whether parameters are cast to bfloat16, with float32 masters. A sharded model keeps float32 shards
            and gathers them in bfloat16, so only a whole model needs masters.
    """
    settings, masters = stage.settings.stage, None
    if narrowed:
        kept = "cpu" if settings.offload_optimizer else model.device
        masters = {
            name: p.detach().to(kept, copy=True) for name, p in model.named_parameters() if p.requires_grad
        }
        cast_parameters(model, torch.bfloat16)
    model.train()
    if settings.gradient_checkpointing:
        checkpoint_activations(model.model, stage.keeping)
    # Before tiles, each of which is then a call of the compiled MLP.
    for name in fuse_pieces(model.model, "inductor" if stage.compiled else None):
        log.warning("not compiled: %s", name)
    if settings.tiled_mlp is not None:
        tile_mlps(model.model, settings.tiled_mlp)
    return MasterAdamW(
        model.named_parameters(), stage.settings.optimizer, masters, settings.offload_optimizer
    )


def made_ahead(make: Callable[[int], Made], steps: Sequence[int]) -> Iterator[Made]:
    """Yield ``make(step)`` for each step, computing the next one in a background thread."""
    # One step ahead and no more: a prepared step holds its rows and attention plans in memory.
    with ThreadPoolExecutor(1, "rows") as pool:
        coming = [pool.submit(make, step) for step in steps[:1]]
        for following in (*steps[1:], None):
            if not coming:
                return
            # Also raises here what the thread raised, such as damage to the packed rows.
            made = coming.pop().result()
            if following is not None:
                coming.append(pool.submit(make, following))
            yield made


def waited_for(items: Iterator[Made]) -> Iterator[tuple[Made, float]]:
    """Yield each item with the seconds that it was waited for."""
    asked = time.perf_counter()
    for item in items:
        yield item, time.perf_counter() - asked
        asked = time.perf_counter()


def _batches(run: StageRun, model: LossModel, step: int) -> list[Batch]:
    """This rank's micro-batches of one step, with attention plans and positions prepared."""
    resolved, context, rows = run.at.resolved, run.at.context, run.at.training_rows(run.number)
    here = resolved.stages[run.number]
    stage = here.settings.stage
    wanted = rows.of_step(step, stage.rows_per_step, here.settings.seed)
    mine = [rows.read(each) for each in share_of_step(wanted, context)]
    batches = micro_batches(mine, stage.rows_per_batch, context.mesh)
    return prepare(batches, here.engine, model.device, localities_of(model.model))


def _values(
    stage: int, step: int, result: StepResult, learning_rate: float, tokens: int, seconds: float
) -> dict[str, Any]:
    values = {
        "stage": stage,
        "step": step,
        # JSON has neither NaN nor infinity; `applied` shows that there was one.
        "loss": result.loss if math.isfinite(result.loss) else None,
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
        "learning_rate": learning_rate,
        "tokens": tokens,
        "trained_tokens": result.trained_tokens,
        "padding": result.padding,
        "tokens_per_second": result.tokens / seconds,
        "seconds": seconds,
        "applied": result.applied,
    }
    return values if result.routing is None else values | _routing_values(result.routing)


def _routing_values(routing: Routing) -> dict[str, Any]:
    """Routing metrics aggregated over all routers, and under ``routers`` one value per router in layer order."""
    violation, entropy, unused = routing.max_violation, routing.entropy, routing.unused
    aux_loss = routing.aux_loss
    if aux_loss is not None and not math.isfinite(aux_loss):
        aux_loss = None
    return {
        "router_aux_loss": aux_loss,
        "max_violation": max(violation),
        "expert_entropy": sum(entropy) / len(entropy),
        "unused_experts": sum(unused),
        # Four digits suffice for plots, and a line has many routers.
        "routers": {
            "max_violation": [round(each, 4) for each in violation],
            "expert_entropy": [round(each, 4) for each in entropy],
            "unused_experts": unused,
        },
    }
