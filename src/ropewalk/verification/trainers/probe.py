"""Probe a trainer: run one step of it on documents of ours, and check what the step computed."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.results import Result
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel.context import RunContext
from ropewalk.verification.result import Check, Outcome
from ropewalk.verification.settings import TrainerProbeSettings
from ropewalk.verification.trainers import checks
from ropewalk.verification.trainers.step import recorded
from ropewalk.verification.trainers.target import (
    Documents,
    Subject,
    load_function,
    make_documents,
    make_subject,
    reference_config,
)
from ropewalk.versions import software_versions

NAMES = {
    "apart": ("documents apart", "losses with and without a change of one token of another document"),
    "causal": ("no later tokens", "losses with and without a change of a later token"),
    "labels": ("labels", "each target with the next token"),
    "targets": ("targets in their document", "document of each target with that of its token"),
    "whole": ("whole documents", "tokens of each row with the documents"),
    "mean": ("token mean", "weights of all targets in the gradient of a step"),
    "rope": ("RoPE in training", "angles applied with the config's method in float64"),
    "saved": ("RoPE after save and load", "angles applied with the config's method in float64"),
    "windows": ("windows", "tokens that each layer reaches with the config"),
}
"""Name and comparison of each check, in the order of the table."""
LOSSES_ALONE = "TARGET returns losses alone; return a Trainer or a pair (model, step) to check this"


@dataclass(frozen=True)
class TrainerProbeResult(Result):
    """Result of a probe, the same on every rank.

    Attributes:
        target: what was probed.
        trainer: class of the trainer.
        documents, tokens: number of documents, and of their tokens.
        ranks: number of processes.
        versions: versions of the software.
        seconds: duration of the probe.
        checks: the checks in the order of the table.
    """

    target: str
    trainer: str
    documents: int
    tokens: int
    ranks: int
    versions: dict[str, str]
    seconds: float
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.passed is False]


def probe_trainer(
    settings: TrainerProbeSettings,
    context: RunContext | None = None,
    function: Callable[..., Any] | None = None,
) -> TrainerProbeResult:
    """Check in a trainer that documents stay apart, and that its loss, RoPE and windows are right.

    Args:
        settings: the trainer and the documents.
        context: processes of torchrun, each of which must call this function.
        function: the function itself, instead of the one that ``settings.target`` names.

    Raises:
        RopewalkError: if the function cannot be found, fails, or returns nothing that can be probed.
    """
    context, started = context or RunContext(), time.perf_counter()
    documents = make_documents(settings)
    # What the trainer prints must not get into the result.
    with redirect_stdout(sys.stderr), _quiet():
        subject = make_subject(function or load_function(settings.target), documents)
        if subject.losses is not None:
            outcomes = _of_losses(subject, documents, settings)
        else:
            outcomes = _of_step(subject, documents, settings, context)
    return TrainerProbeResult(
        target=settings.target,
        trainer=subject.name,
        documents=len(documents),
        tokens=sum(map(len, documents)),
        ranks=context.world.size,
        versions=software_versions(),
        seconds=time.perf_counter() - started,
        checks=tuple(
            Check(**vars(outcomes[key]), name=name, compared=compared, seconds=0.0)
            for key, (name, compared) in NAMES.items()
        ),
    )


class _quiet:
    """Keeps remarks of the trainer's library off the screen; its errors stay."""

    def __enter__(self) -> None:
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(logging.NOTSET)


def _of_losses(subject: Subject, documents: Documents, settings: TrainerProbeSettings) -> dict[str, Outcome]:
    apart = checks.losses_apart(subject, documents, settings.tokens, _spare(documents))
    return {**dict.fromkeys(NAMES, Outcome.not_run(LOSSES_ALONE)), "apart": apart}


def _spare(documents: Documents) -> int:
    """A token id that no document has."""
    return max(map(max, documents)) + 1


def _of_step(
    subject: Subject, documents: Documents, settings: TrainerProbeSettings, context: RunContext
) -> dict[str, Outcome]:
    world, model = context.world, subject.model
    assert subject.step is not None
    config: ModelConfig = reference_config(subject, settings.config)
    spare = _spare(documents)
    rows = model.get_input_embeddings().weight.shape[0]
    if spare >= rows:
        raise RopewalkError(
            f"the documents need token ids up to {spare}, but the model embeds {rows}; lower --documents, --length or "
            "--first-token"
        )
    built = checks.rope_now(model, config)
    with recorded(model, documents) as batches:
        subject.step()
    if not batches:
        raise RopewalkError(
            f"the step of {subject.name} did not call the model's decoder with input_ids; let the function return the "
            "model that the step trains"
        )
    moves, several = checks.moves_of(model, batches, settings.tokens, spare)
    own = {
        "apart": checks.documents_apart(moves, several),
        "causal": checks.causal(moves),
        "rope": checks.rope_in_training(built, batches, model, config),
        "windows": checks.windows(model, batches, config),
    }
    reason = checks.unclear_targets(batches)
    weights = None
    if reason is None:
        own["labels"], offset = checks.labels_are_next(batches)
        owners = {token: number for number, each in enumerate(documents) for token in each}
        own["targets"] = checks.targets_stay(batches, offset, owners)
        weights = [checks.weights_of(batch) for batch in batches]
    else:
        own["labels"] = own["targets"] = Outcome.not_run(reason)
    gathered = world.gather((own, weights, checks.pieces_of(batches)))
    outcomes = {key: _worst([each[key] for each, _, _ in gathered]) for key in own}
    outcomes["whole"] = checks.documents_whole([each for _, _, each in gathered], documents)
    known = [each for _, each, _ in gathered if each is not None]
    outcomes["mean"] = (
        checks.token_mean(known, world.size > 1)
        if len(known) == world.size
        else Outcome.not_run(reason or "targets are unknown on another rank")
    )
    outcomes["saved"] = _saved(subject, config, context)
    return outcomes


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The first failure of any rank, otherwise the outcome of a rank where the check applied."""
    for rank, outcome in enumerate(outcomes):
        if outcome.passed is False:
            return outcome if len(outcomes) == 1 else replace(outcome, note=f"rank {rank}: {outcome.note}")
    return next((outcome for outcome in outcomes if outcome.passed), outcomes[0])


def _saved(subject: Subject, config: ModelConfig, context: RunContext) -> Outcome:
    if subject.save is None:
        return Outcome.not_run("the model has no save_pretrained")
    # Every rank calls the trainer's save, which may gather shards.
    with tempfile.TemporaryDirectory(prefix="ropewalk-probe-") as folder:
        subject.save(Path(folder))
        context.world.barrier()
        found = checks.rope_saved(subject, Path(folder), config) if context.is_rank_0 else Outcome.not_run("")
    return context.world.gather(found)[0]
