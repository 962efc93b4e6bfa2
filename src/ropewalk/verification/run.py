"""Verify a recipe: which processes compute, and how its checks run, each by itself, on all ranks at once."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from ropewalk.errors import Echo, RopewalkError
from ropewalk.io.progress import Reporter, Silent
from ropewalk.parallel import MeshShape, World, joined, make_mesh
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.rank_pool import RankFailure, Ranks
from ropewalk.training import load_recipe
from ropewalk.training.recipe.recipe import Parallel, Recipe
from ropewalk.verification.case import Case, prepare
from ropewalk.verification.checks import Planned, claims, planned_checks
from ropewalk.verification.result import Check, Outcome, VerifyResult
from ropewalk.verification.settings import VerifySettings
from ropewalk.versions import software_versions

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Verified:
    """Attributes: the case; which processes ran; the recipe's mesh, where it was verified; what the checks found."""

    case: Case
    processes: str
    own: MeshShape | None
    checks: list[Check]


def verify(config: VerifySettings, context: RunContext | None = None) -> VerifyResult:
    """Verify on a recipe's model and documents that packing, ranks, checkpoints and RoPE change no number.

    Args:
        config: the recipe, and how much of it.
        context: the processes of torchrun, which all call this; a single one starts ``config.ranks`` others. Its
            reporter is told of what is not as in the recipe, and of progress.

    Returns:
        What rank 0 found; the other ranks have checks without an outcome.

    Raises:
        RopewalkError: as a run of the recipe would, or for more layers, rows or tokens than there are.

    Example:
        >>> result = verify(VerifySettings(recipe="demo", layers=1, length=32))  # doctest: +SKIP
        >>> result.failed  # doctest: +SKIP
        []
    """
    context, began = context or RunContext(), time.perf_counter()
    recipe = context.world.on_rank_0(lambda: load_recipe(config.recipe, list(config.overrides)))
    run = _on_given_ranks if context.world.size > 1 else _on_own_ranks
    found = run(recipe, config, context)
    case = found.case
    return VerifyResult(
        model=recipe.model,
        layers=config.layers,
        rows=len(case.rows),
        length=case.length,
        context=case.context,
        pattern=case.rows[0].layout.pattern,
        precision=case.precision,
        device=case.device,
        versions=software_versions(),
        mesh=found.processes,
        recipe_mesh=None if found.own is None else str(found.own),
        seconds=time.perf_counter() - began,
        checks=tuple(found.checks),
    )


def _on_own_ranks(recipe: Recipe, config: VerifySettings, context: RunContext) -> _Verified:
    """In a pool of processes on this machine, which talk over gloo."""
    ranks = config.ranks
    own = MeshShape(**recipe.parallel.model_dump()) if isinstance(recipe.parallel, Parallel) else None
    here = own if own is not None and own.world_size == ranks else None
    if own is not None and own.world_size > 1 and here is None:
        context.told.note(
            f"the recipe's mesh of {own} takes --ranks {own.world_size}; it is not verified here"
        )
    # A mesh is what torchrun's processes form; there are none.
    alone = recipe.model_copy(update={"parallel": "auto"})
    with _scratch(Path(recipe.output), shared=False) as folder, Ranks(ranks) as pool:
        case, remarks, _ = prepare(alone, folder, _rows(config.rows, ranks), config.length, config.layers)
        for remark in remarks:
            context.told.note(remark)
        checks = run_checks(
            planned_checks(case, ranks, here),
            lambda planned: pool.run(run_planned, planned, case)[0],
            context.told,
        )
    return _Verified(case, f"{ranks} gloo processes on this machine", here, checks)


def _on_given_ranks(recipe: Recipe, config: VerifySettings, context: RunContext) -> _Verified:
    """In the processes that torchrun started, on the recipe's mesh too."""
    world = context.world
    several = world.local_size < world.size
    with _scratch(Path(recipe.output), shared=several) if world.is_rank_0 else _nothing() as folder:
        rows = _rows(config.rows, world.size)
        case, remarks, mesh = world.on_rank_0(
            lambda: prepare(recipe, folder, rows, config.length, config.layers, world)
        )
        for remark in remarks:
            context.told.note(remark)
        kind = case.device.partition(":")[0]
        checks = run_checks(
            planned_checks(case, world.size, mesh), lambda each: run_in(each, case, world, kind), context.told
        )
        world.barrier()
    return _Verified(case, f"{world.size} processes of torchrun, {kind}", mesh, checks)


def _rows(asked: int, ranks: int) -> int:
    """As many rows for each rank."""
    return -(-asked // ranks) * ranks


@contextmanager
def _scratch(output: Path, shared: bool) -> Iterator[Path]:
    """A folder that is gone afterwards; beside the run's output where other machines must see it."""
    place = output.expanduser().absolute().parent if shared else None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ropewalk-verify-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def _nothing() -> Iterator[Path]:
    """Where rank 0 makes the folder."""
    yield Path()


def run_checks(
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

    def on_rank_0(self, function: Callable[[], T]) -> T:
        try:
            return super().on_rank_0(function)
        except RopewalkError as error:
            self.told.append(error)
            raise

    def known_to_all(self, error: RopewalkError) -> RopewalkError:
        self.told.append(error)
        return super().known_to_all(error)


def _outcome(planned: Planned, case: Case, world: World, device_type: str) -> Outcome:
    if planned.reason is not None:
        return Outcome.not_run(planned.reason)
    claim = claims()[planned.kind]
    if planned.shape is not None:
        return claim.check(case, make_mesh(planned.shape, device_type), world)
    if not world.is_rank_0:
        return Outcome.not_run("")
    try:
        return claim.check(case)
    except Exception as error:
        # Whatever the model, a library or the machine did: that is what was asked, and nobody waits for this rank.
        return _stopped(error)


def _stopped(error: BaseException) -> Outcome:
    return Outcome(None, None, False, f"stopped: {reason_of(error)}")


def _check(planned: Planned, outcome: Outcome, seconds: float) -> Check:
    return Check(**vars(outcome), name=planned.name, compared=planned.compared, seconds=seconds)


def reason_of(error: BaseException) -> str:
    """One line of an error; of one in a pool, the last line of the first rank's traceback."""
    if isinstance(error, RankFailure):
        first = re.split(r"^rank \d+: ", str(error), flags=re.MULTILINE)[1]
        line: str = [line for line in first.splitlines() if line.strip()][-1]
        return re.sub(r"^(ropewalk\.errors\.)\w+: ", "", line)
    if isinstance(error, RopewalkError):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
