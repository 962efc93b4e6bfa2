"""Verify a recipe: start or join the processes, and run the checks one after another on all ranks."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ropewalk.errors import RopewalkError
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
    """Result of a verification before it is reported.

    Attributes:
        case: model, rows and settings that were verified.
        processes: the processes that ran, as text.
        own: the recipe's mesh; None if it was not verified.
        checks: results of the checks.
    """

    case: Case
    processes: str
    own: MeshShape | None
    checks: list[Check]


def verify(config: VerifySettings, context: RunContext | None = None) -> VerifyResult:
    """Check that packing, parallelism, and saving and loading checkpoints do not change a recipe's results.

    Args:
        config: the recipe, and how many layers, rows and tokens to verify.
        context: processes of torchrun, each of which must call this function. A single process starts ``config.ranks``
            processes itself. The reporter receives progress, and a note for each setting in which the verification
            differs from the recipe.

    Returns:
        ``checks`` has, for each check, its ``name``, the measured ``error``, the largest error that rounding alone
            explains (``budget``), and ``passed``, which is None if the check does not apply. ``failed`` has the names
            of the checks that failed. The results are complete only on rank 0.

    Raises:
        RopewalkError: if ropewalk would refuse to run the recipe, or if more layers, rows or tokens are requested than
            exist.

    Example:
        >>> from ropewalk.verification import VerifySettings, verify
        >>> result = verify(VerifySettings(recipe="demo", layers=1, length=32))  # doctest: +SKIP
        >>> result.failed  # doctest: +SKIP
        []
    """
    context, started = context or RunContext(), time.perf_counter()
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
        pattern=" and ".join(dict.fromkeys(row.layout.pattern for row in case.rows)),
        precision=case.precision,
        device=case.device,
        versions=software_versions(),
        mesh=found.processes,
        recipe_mesh=None if found.own is None else str(found.own),
        seconds=time.perf_counter() - started,
        checks=tuple(found.checks),
    )


def _on_own_ranks(recipe: Recipe, config: VerifySettings, context: RunContext) -> _Verified:
    """Verify in a pool of gloo processes on this machine."""
    ranks = config.ranks
    requested = recipe.stage(0).parallel
    own = MeshShape(**requested.model_dump()) if isinstance(requested, Parallel) else None
    here = own if own is not None and own.world_size == ranks else None
    if own is not None and own.world_size > 1 and here is None:
        context.rank_0_reporter.note(
            f"the recipe's mesh ({own}) is not verified, because it needs {own.world_size} processes; pass --ranks "
            f"{own.world_size} to verify it"
        )
    # This process alone cannot form the recipe's mesh; the processes of the pool build their own meshes.
    first = recipe.stages[0].model_copy(update={"parallel": None})
    alone = recipe.model_copy(update={"parallel": "auto", "stages": [first, *recipe.stages[1:]]})
    # The pool outlives single checks, because starting processes that import torch takes longer than most checks.
    with _scratch(Path(recipe.output), shared=False) as folder, Ranks(ranks) as pool:
        case, remarks, _ = prepare(alone, folder, _rows(config.rows, ranks), config.length, config.layers)
        for remark in remarks:
            context.rank_0_reporter.note(remark)
        checks = run_checks(
            planned_checks(case, ranks, here),
            lambda planned: pool.run(run_planned, planned, case)[0],
            context.rank_0_reporter,
        )
    return _Verified(case, f"{ranks} gloo processes on this machine", here, checks)


def _on_given_ranks(recipe: Recipe, config: VerifySettings, context: RunContext) -> _Verified:
    """Verify in the processes that torchrun started, also on the recipe's mesh."""
    world = context.world
    several = world.local_size < world.size
    with _scratch(Path(recipe.output), shared=several) if world.is_rank_0 else _nothing() as folder:
        rows = _rows(config.rows, world.size)
        case, remarks, mesh = world.on_rank_0(
            lambda: prepare(recipe, folder, rows, config.length, config.layers, world)
        )
        for remark in remarks:
            context.rank_0_reporter.note(remark)
        # Rank 0's device may have an index, such as cuda:0; a mesh is made from the type alone.
        kind = case.device.partition(":")[0]
        checks = run_checks(
            planned_checks(case, world.size, mesh),
            lambda each: run_in(each, case, world, kind),
            context.rank_0_reporter,
        )
        # Leaving this block deletes the folder, so every rank must be done with it first.
        world.barrier()
    return _Verified(case, f"{world.size} processes of torchrun, {kind}", mesh, checks)


def _rows(requested: int, ranks: int) -> int:
    """Round the number of rows up to a multiple of the ranks."""
    return -(-requested // ranks) * ranks


@contextmanager
def _scratch(output: Path, shared: bool) -> Iterator[Path]:
    """Temporary folder; next to the run's output if other machines must see it, because that file system is shared."""
    place = output.expanduser().absolute().parent if shared else None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ropewalk-verify-", dir=place) as folder:
        yield Path(folder)


@contextmanager
def _nothing() -> Iterator[Path]:
    """Stand-in for :func:`_scratch` on ranks other than 0, which get the path from rank 0."""
    yield Path()


def run_checks(
    planned: Sequence[Planned], call: Callable[[Planned], Check], reporter: Reporter | None = None
) -> list[Check]:
    """Run checks one after another. A check that raises in the pool counts as failed, and the remaining checks run.

    Args:
        planned: checks from :func:`planned_checks`.
        call: runs a check on all ranks and returns the result of rank 0.
        reporter: receiver of progress.

    Raises:
        Exception: any exception of ``call`` other than a failure in the pool.
    """
    checks = []
    with (reporter or Silent()).bar("verify", len(planned)) as advance:
        for number, each in enumerate(planned):
            advance(number, each.name)
            started = time.perf_counter()
            try:
                checks.append(call(each))
            except RankFailure as error:
                # Any failure of the model, a library or the machine is a finding; the pool starts new processes.
                checks.append(_check(each, _stopped(error), time.perf_counter() - started))
        advance(len(planned), "")
    return checks


def run_planned(planned: Planned, case: Case, device_type: str = "cpu") -> Check:
    """Run one check in a pool of ranks, each of which must call this function; rank 0 has the result."""
    with joined(device_type) as world:
        started = time.perf_counter()
        outcome = _outcome(planned, case, world, device_type)
        found = _check(planned, outcome, time.perf_counter() - started)
    return found


def run_in(planned: Planned, case: Case, world: World, device_type: str) -> Check:
    """Run one check in processes of torchrun, which are not restarted after a failure.

    An error that every rank knows of becomes the check's result, and all ranks continue with the next check. Any other
    error must end the process: the other ranks may be waiting for this one in a collective, and only its exit
    interrupts them.

    Raises:
        Exception: an error of this rank alone.
    """
    started = time.perf_counter()
    try:
        outcome = _outcome(planned, case, world, device_type)
    except RopewalkError as error:
        if not error.known_to_all:
            raise
        outcome = _stopped(error)
    # Ranks wait here while rank 0 works alone: the control group has a timeout of days, the default group of minutes.
    world.barrier()
    return _check(planned, outcome, time.perf_counter() - started)


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
        # Any failure of the model, a library or the machine is a finding, and no other rank waits in a collective.
        return _stopped(error)


def _stopped(error: BaseException) -> Outcome:
    return Outcome(None, None, False, f"stopped: {reason_of(error)}")


def _check(planned: Planned, outcome: Outcome, seconds: float) -> Check:
    return Check(**vars(outcome), name=planned.name, compared=planned.compared, seconds=seconds)


def reason_of(error: BaseException) -> str:
    """One line that describes an error; for a failure in the pool, the last line of the first rank's traceback."""
    if isinstance(error, RankFailure):
        # One rank's last line is enough for a sentence; a failure of the model fails every rank alike.
        first = re.split(r"^rank \d+: ", str(error), flags=re.MULTILINE)[1]
        line: str = [line for line in first.splitlines() if line.strip()][-1]
        return re.sub(r"^(ropewalk\.errors\.)\w+: ", "", line)
    if isinstance(error, RopewalkError):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
