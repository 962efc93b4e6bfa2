"""Which checks there are for a case and a number of ranks, and how they run: each by itself, on all ranks at once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ropewalk.attention import ENGINES
from ropewalk.errors import Echo, RopewalkError
from ropewalk.io.progress import Reporter, Silent
from ropewalk.parallel import MeshShape, World, joined, make_mesh
from ropewalk.testing.ranks import RankFailure
from ropewalk.verification.case import Case
from ropewalk.verification.checks import (
    checkpoints,
    documents,
    effective_rope,
    engines,
    labels,
    meshes,
    saved_model,
    sharded_attention,
)
from ropewalk.verification.result import Check, Outcome

T = TypeVar("T")

ALONE: Mapping[str, Callable[..., Outcome]] = {
    "documents": documents.packed_equals_separate,
    "engine": engines.engine_equals_reference,
    "labels": labels.labels_of_rows,
    "rope": effective_rope.rope_as_loaded,
}
"""Checks of one process: of the case, and of an engine's name for ``engine``."""

TOGETHER: Mapping[str, Callable[..., Outcome]] = {
    "attention": sharded_attention.attention_on_ranks,
    "shards": labels.labels_of_shards,
    "ranks": meshes.ranks_equal_one,
    "loss": meshes.loss_is_the_mean_of_tokens,
    "wrapped rope": effective_rope.rope_after_wrapping,
    "saved": saved_model.saved_equals_ours,
    "saved rope": effective_rope.rope_after_reload,
    "checkpoint": checkpoints.checkpoint_equals_memory,
    "resume": checkpoints.resumed_equals_unbroken,
}
"""Checks of all ranks: of the case, their mesh and their world; rank 0 has the outcome."""


@dataclass(frozen=True)
class Planned:
    """A check that is to run.

    Attributes:
        kind: key of :data:`ALONE` or :data:`TOGETHER`.
        name, compared: as of a Check.
        shape: of the mesh, for all ranks.
        engine: for the kind ``engine``.
        reason: why it cannot be run, if so.
    """

    kind: str
    name: str
    compared: str
    shape: MeshShape | None = None
    engine: str | None = None
    reason: str | None = None


def planned_checks(case: Case, ranks: int, own: MeshShape | None = None) -> list[Planned]:
    """All checks for a case, in the order that they run.

    Args:
        case: to verify.
        ranks: how many there are, 2 or more.
        own: the recipe's mesh, verified beside the others.
    """
    found = [
        Planned("labels", "labels of rows", "each target with the next token of its document"),
        Planned(
            "documents",
            "packed row = separate documents",
            "packed rows with each document by itself, plain attention",
        ),
    ]
    for engine in ENGINES:
        if engine != "reference":
            text = "attention on the model's own queries, keys and values with float64"
            found.append(Planned("engine", f"engine {engine} = reference", text, engine=engine))
    found.append(Planned("rope", "RoPE as loaded", "angles applied with the recipe's method in float64"))
    shapes = mesh_shapes(case, ranks, own)
    for shape, reason in shapes.items():
        name = f"labels of shards, {shape}"
        found.append(Planned("shards", name, "what all ranks hold with the whole rows", shape, reason=reason))
    for shape, reason in shapes.items():
        if shape.sequence_degree > 1:
            text = "attention on the model's own queries, keys and values with float64"
            found.append(Planned("attention", f"attention on ranks, {shape}", text, shape, reason=reason))
    for shape, reason in shapes.items():
        name = f"{ranks} ranks = 1 rank, {shape}"
        found.append(
            Planned("ranks", name, "the training step on a mesh with one process", shape, reason=reason)
        )
    for shape in {MeshShape(shard=ranks), *([own] if own else [])}:
        found.append(
            Planned(
                "loss", f"loss normalisation, {shape}", "the step with a plain mean over all targets", shape
            )
        )
    last = own or MeshShape(shard=ranks)
    for kind, name, compared in (
        ("wrapped rope", "RoPE after sharding", "angles applied with the recipe's method in float64"),
        ("checkpoint", "sharded checkpoint = memory", "weights and optimiser as read with as written"),
        ("resume", "resumed run = unbroken run", "two steps after a checkpoint, loaded and not"),
        ("saved", "saved folder = model in memory", "logits of plain transformers with ours"),
        ("saved rope", "RoPE after save and load", "angles applied with the recipe's method in float64"),
    ):
        found.append(Planned(kind, name, compared, last))
    return found


def mesh_shapes(case: Case, ranks: int, own: MeshShape | None = None) -> dict[MeshShape, str | None]:
    """Meshes of so many ranks, with the reason why one cannot be."""
    heads = case.num_heads
    no_heads = f"not applicable: {ranks} ranks do not divide the model's {heads} attention heads"
    shapes: dict[MeshShape, str | None] = {
        MeshShape(shard=ranks): None,
        MeshShape(sequence=ranks): no_heads if heads % ranks else None,
        MeshShape(ring=ranks): None,
    }
    if ranks > 2 and ranks % 2 == 0 and heads % 2 == 0:
        shapes[MeshShape(ring=ranks // 2, sequence=2)] = None
    if own is not None:
        shapes.setdefault(own, None)
    return shapes


def run_planned(planned: Planned, case: Case, device_type: str = "cpu") -> Check:
    """Run one check in a pool of ranks, which all call this; rank 0 has the result."""
    with joined(device_type) as world:
        began = time.perf_counter()
        outcome = _outcome(planned, case, world, device_type)
        found = _check(planned, outcome, time.perf_counter() - began)
    return found


def run_in(planned: Planned, case: Case, world: World, device_type: str) -> Check:
    """The same in processes that nobody starts anew.

    What every rank knows to have failed is the check's result, and all go on to the next. Anything else leaves the
    process: the others may be waiting for this rank in the midst of a collective, and only its end can wake them.

    Raises:
        Exception: what went wrong on this rank alone.
    """
    began = time.perf_counter()
    telling = _Telling(**{each.name: getattr(world, each.name) for each in fields(World)})
    try:
        outcome = _outcome(planned, case, telling, device_type)
    except RopewalkError as error:
        if not isinstance(error, Echo) and not any(error is told for told in telling.told):
            raise
        outcome = _stopped(error)
    # The others wait for what rank 0 does alone here, where they have the patience for it.
    world.barrier()
    return _check(planned, outcome, time.perf_counter() - began)


@dataclass(frozen=True, eq=False)
class _Telling(World):
    """A world that remembers which errors of rank 0 all ranks know of.

    Attributes:
        told: by rank 0, which raises them itself; the others raise an Echo.
    """

    told: list[RopewalkError] = field(default_factory=list)

    def lead(self, function: Callable[[], T]) -> T:
        try:
            return super().lead(function)
        except RopewalkError as error:
            self.told.append(error)
            raise

    def known_to_all(self, error: RopewalkError) -> RopewalkError:
        self.told.append(error)
        return super().known_to_all(error)


def _outcome(planned: Planned, case: Case, world: World, device_type: str) -> Outcome:
    if planned.reason is not None:
        return Outcome.not_run(planned.reason)
    if planned.shape is not None:
        return TOGETHER[planned.kind](case, make_mesh(planned.shape, device_type), world)
    if not world.leads:
        return Outcome.not_run("")
    arguments = () if planned.engine is None else (planned.engine,)
    try:
        return ALONE[planned.kind](case, *arguments)
    except Exception as error:
        # Whatever the model, a library or the machine did: that is what was asked, and nobody waits for this rank.
        return _stopped(error)


def _stopped(error: BaseException) -> Outcome:
    return Outcome(None, None, False, f"stopped: {reason_of(error)}")


def _check(planned: Planned, outcome: Outcome, seconds: float) -> Check:
    return Check(
        planned.name, planned.compared, outcome.error, outcome.budget, outcome.passed, seconds, outcome.note
    )


def verify(
    planned: Sequence[Planned], call: Callable[[Planned], Check], reporter: Reporter | None = None
) -> list[Check]:
    """Run checks one after the other; one that fails in a pool has failed, and the others still run.

    Args:
        planned: from :func:`planned_checks`.
        call: runs one on all ranks, and gives what rank 0 found.
        reporter: progress.

    Raises:
        Exception: what ``call`` does, but for a failure in a pool.
    """
    checks = []
    with (reporter or Silent()).bar("verify", len(planned)) as advance:
        for number, each in enumerate(planned):
            advance(number, each.name)
            began = time.perf_counter()
            try:
                checks.append(call(each))
            except RankFailure as error:
                # Whatever the model, a library or the machine did: that is what was asked, and the pool starts afresh.
                checks.append(_check(each, _stopped(error), time.perf_counter() - began))
        advance(len(planned), "")
    return checks


def reason_of(error: BaseException) -> str:
    """One line of an error; of one in a pool, the last line of the first rank's traceback."""
    if isinstance(error, RankFailure):
        first = re.split(r"^rank \d+: ", str(error), flags=re.MULTILINE)[1]
        line: str = [line for line in first.splitlines() if line.strip()][-1]
        return re.sub(r"^(ropewalk\.errors\.)\w+: ", "", line)
    if isinstance(error, RopewalkError):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    """How many passed, failed and did not run."""
    return {
        "passed": sum(check.passed is True for check in checks),
        "failed": sum(check.passed is False for check in checks),
        "not_run": sum(check.passed is None for check in checks),
    }
