"""One stage of a run: from a model folder to a checkpoint at the stage's context length."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import PackedRows, rows_for_step
from ropewalk.errors import RunFailure
from ropewalk.integrations.losses import OutputHead
from ropewalk.integrations.models import checkpoint_activations, load_model
from ropewalk.rope import RopeMethod
from ropewalk.training.checkpoint import Position, restore, save_checkpoint
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.optimizer import MasterAdamW, learning_rate_at
from ropewalk.training.recipe import Recipe
from ropewalk.training.reporter import Reporter
from ropewalk.training.step import StepResult, train_step

MOST_SKIPPED = 3
"""Steps in a row whose loss or gradient is not finite before a run gives up."""


@dataclass(frozen=True)
class StageRun:
    """What one stage works on.

    Attributes:
        number: counted from 0.
        recipe: the whole recipe.
        source: model folder to start from.
        rope: method that the stage trains with.
        rows: packed training rows.
        tokenizer: saved beside the weights.
        checkpoints: folder that checkpoints go to.
        device: where to train.
        precision: float32, bfloat16-autocast or bfloat16.
        tokens_before, steps_before: done in earlier stages.
    """

    number: int
    recipe: Recipe
    source: str
    rope: RopeMethod
    rows: PackedRows
    tokenizer: Any
    checkpoints: Path
    device: torch.device
    precision: str
    tokens_before: int
    steps_before: int


def run_stage(
    run: StageRun, metrics: MetricsLog, reporter: Reporter, resume_from: Path | None = None
) -> Position:
    """Train a stage from its start, or on from one of its checkpoints; the last one is its result.

    Raises:
        RunFailure: if the loss stays not finite.
        RopewalkError: if a checkpoint cannot be written or read.
    """
    stage = run.recipe.stages[run.number]
    model = load_model(
        run.source if resume_from is None else str(resume_from),
        rope=run.rope,
        engine=run.recipe.engine,
        dtype=torch.float32,
        exact_rope=run.recipe.exact_rope,
        device=run.device,
        max_position_embeddings=stage.context,
        trust_remote_code=run.recipe.trust_remote_code,
    )
    masters = None
    if run.precision == "bfloat16":
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.to(torch.bfloat16)
    head = OutputHead.of(model)
    model.train()
    if stage.gradient_checkpointing:
        checkpoint_activations(model)
    optimizer = MasterAdamW(model.named_parameters(), run.recipe.optimizer, masters)
    torch.manual_seed(run.recipe.seed + run.number)
    position = Position(run.number, 0, run.tokens_before)
    if resume_from is not None:
        restore(resume_from, optimizer)
        position = Position(run.number, int(resume_from.name.rpartition("-step")[2]), run.tokens_before)
    skipped = 0
    label = f"stage {run.number + 1}/{len(run.recipe.stages)} training"
    with reporter.bar(label, stage.steps) as advance:
        advance(position.step, "")
        for step in range(position.step, stage.steps):
            began = time.perf_counter()
            wanted = rows_for_step(step, stage.rows_per_step, len(run.rows), run.recipe.seed + run.number)
            rate = learning_rate_at(
                step, stage.learning_rate, stage.warmup_steps, stage.steps, stage.schedule
            )
            result = train_step(
                model,
                head,
                [run.rows[i] for i in wanted],
                optimizer,
                rate,
                stage.rows_per_batch,
                run.precision,
            )
            seconds = time.perf_counter() - began
            done = step + 1
            tokens = run.tokens_before + done * stage.rows_per_step * stage.context
            metrics.append(_values(run.number, done, result, rate, tokens, seconds), run.steps_before + done)
            skipped = 0 if result.applied else skipped + 1
            if skipped == MOST_SKIPPED or (skipped and done == stage.steps):
                raise RunFailure(
                    f"loss or gradient was not finite in the last {skipped} steps up to step {done}; the latest "
                    "checkpoint is untouched: start again with a lower learning rate"
                )
            advance(done, f"loss {result.loss:.3f}  {result.tokens / seconds:,.0f} tokens/s")
            if (done % run.recipe.checkpoints.every == 0 and not skipped) or done == stage.steps:
                save_checkpoint(
                    run.checkpoints,
                    model,
                    run.tokenizer,
                    optimizer,
                    Position(run.number, done, tokens),
                    run.recipe.checkpoints.keep,
                )
    return Position(
        run.number, stage.steps, run.tokens_before + stage.steps * stage.rows_per_step * stage.context
    )


def _values(
    stage: int, step: int, result: StepResult, learning_rate: float, tokens: int, seconds: float
) -> dict[str, Any]:
    return {
        "stage": stage,
        "step": step,
        "loss": result.loss if math.isfinite(result.loss) else None,
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
        "learning_rate": learning_rate,
        "tokens": tokens,
        "trained_tokens": result.trained_tokens,
        "tokens_per_second": result.tokens / seconds,
        "seconds": seconds,
        "applied": result.applied,
    }
