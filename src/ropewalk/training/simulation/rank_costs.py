"""Play a rank of a step in processes of its own, and keep what counts of it.

The processes are new ones because torch takes a device only before its first backward, and because a simulated device
and a fake process group have no place in the process of whoever asks.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeVar
from unittest import mock

from ropewalk.models.config.read import read_config
from ropewalk.parallel.rank_pool import process_context
from ropewalk.planning.sizing.time import Transfers
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.simulation.assumed_documents import Documents
from ropewalk.training.simulation.extending import extended, extended_fields
from ropewalk.training.simulation.few_layers import LEAST_LAYERS, further, layers_of_run
from ropewalk.training.simulation.memory import Memory, extended_memory
from ropewalk.training.simulation.recording import RECOMPUTATION, Operator, flops_by_phase
from ropewalk.training.simulation.simulated import register_device
from ropewalk.training.simulation.step import MOST_PASSES, DryStep, dry_step

MOST_PROCESSES = 3
"""Processes that play the runs of a model at the same time: a model with two kinds of layers has three runs."""

LIBRARIES = (__name__, "torch.distributed.fsdp", "transformers.modeling_utils")
"""Modules that a run needs and that take seconds to import."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Wait:
    """A place at which the host waits for the GPU: line of code, moment of the step, and number of times per step."""

    place: str
    moment: str
    number: int


@dataclass(frozen=True)
class Copy:
    """A copy between host and GPU during a step: line of code, direction, number of times, and bytes."""

    place: str
    direction: str
    number: int
    bytes: int


@dataclass(frozen=True)
class RankCosts:
    """What a step does on one rank.

    Attributes:
        rank: the rank.
        memory: its memory.
        operators: calls of operators on the device.
        transfers: bytes and number of its transfers.
        waits, copies: waits of the host, and copies between host and device.
    """

    rank: int
    memory: Memory
    operators: Counter[Operator]
    transfers: Transfers
    waits: tuple[Wait, ...]
    copies: tuple[Copy, ...]

    @property
    def flops(self) -> Counter[str]:
        """Operations: ``dense``, ``attention``, ``recurrent``, and ``model`` without recomputation."""
        return flops_of(self.operators)


class Player(Protocol):
    """Plays one rank of a stage."""

    def __call__(
        self, resolved: ResolvedRecipe, number: int, documents: Documents, rank: int
    ) -> RankCosts: ...


_PLAYER: ContextVar[Player | None] = ContextVar("player", default=None)
"""What plays at present."""


@contextmanager
def played_by(player: Player) -> Iterator[Player]:
    """Let a function play all ranks while the context is open."""
    before = _PLAYER.set(player)
    try:
        yield player
    finally:
        _PLAYER.reset(before)


@contextmanager
def in_own_process() -> Iterator[Player]:
    """Processes that play ranks one after the other, as long as the outermost such context is open.

    The first rank starts them, which takes seconds of imports; the runs of a deep model are played at the same time.
    """
    if (player := _PLAYER.get()) is not None:
        yield player
        return
    with ProcessPoolExecutor(
        min(MOST_PROCESSES, os.cpu_count() or 1),
        process_context(LIBRARIES),
        # The server that they are forks of may have started with another.
        initializer=_take_environment,
        initargs=(dict(os.environ),),
    ) as processes:

        def started(function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
            # A new process imports the caller's script, which may be about to join a process group.
            with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
                return processes.submit(function, *arguments).result

        with played_by(partial(play, start=started)) as aside:
            yield aside


def _take_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _when_asked(function: Callable[..., Result], *arguments: Any) -> Callable[[], Result]:
    return lambda: function(*arguments)


def play(
    resolved: ResolvedRecipe,
    number: int,
    documents: Documents,
    rank: int,
    start: Callable[..., Callable[[], Any]] = _when_asked,
) -> RankCosts:
    """Play a rank: its memory on the rows that need most, its operations on the mean of all rows.

    Args:
        resolved: the recipe, for a CPU or for CUDA, which is then simulated.
        number: index of the stage, from 0.
        documents: documents to pack rows with.
        rank: rank of the stage's mesh.
        start: begins to call a function, and returns what waits for its result; by default, this process calls it.
    """
    here = resolved.stages[number]
    rows = documents.packed(here.settings.stage)
    deep = len(read_config(resolved.model, resolved.recipe.trust_remote_code).layers) > LEAST_LAYERS

    def steps_on(numbers: Sequence[int]) -> Steps:
        return steps_of(lambda which: start(_run, resolved, number, documents, numbers, rank, which), deep)

    if here.engine in ("varlen", "flex") and here.mesh.ring == 1:
        # The scratch memory of varlen grows with the documents, and the memory of flex does not depend on them;
        # operations follow from the pairs.
        counted = worst = rows.most_documents()
    else:
        # A ring exchanges the keys that queries see, and sdpa keeps what each run needs.
        worst, counted = rows.most_pairs(), rows.typical()
    largest = steps_on(worst)
    steps = largest if counted == worst else steps_on(counted)
    weights = steps.weights
    pairs = rows.share_of_pairs(counted, steps.steps[0].layers)
    found = [each.recording for each in steps.steps]
    waits = extended([each.waits for each in found], weights)
    copies = extended([each.copies for each in found], weights)
    return RankCosts(
        rank,
        extended_memory(largest.steps, largest.weights),
        Counter(extended([operators_of(each, pairs) for each in steps.steps], weights)),
        extended_fields([transfers_of(each) for each in steps.steps], weights),
        tuple(Wait(place, moment, count) for (place, moment), count in waits.items()),
        tuple(Copy(*key, *counted) for key, counted in copies.items()),
    )


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a model with some of its layers, whose sum by weight is the step of all of them."""

    steps: tuple[DryStep, ...]
    weights: tuple[int, ...]


def steps_of(step: Callable[[int], Callable[[], DryStep | None]], deep: bool) -> Steps:
    """Play a step with a few layers, and once more with one more of each kind that has more; or with all layers.

    Args:
        step: begins a run of :func:`layers_of_run`, and returns what waits for it.
        deep: whether there probably are several; the first two then begin at once.
    """
    runs = [step(which) for which in range(2 if deep else 1)]
    few = runs[0]()
    assert few is not None
    rest = further(few.kinds) if len(few.kept) < len(few.kinds) else {}
    runs += [step(which) for which in range(len(runs), len(rest) + 1)]
    more = [found for run in runs[1 : len(rest) + 1] if (found := run()) is not None]
    return Steps((few, *more), (1 - sum(rest.values()), *rest.values()))


def _run(
    resolved: ResolvedRecipe,
    number: int,
    documents: Documents,
    numbers: Sequence[int],
    rank: int,
    which: int,
) -> DryStep | None:
    """Play a step on the rows with these numbers, with the layers of a run; None if there is no such run."""
    device = register_device(resolved.capability) if resolved.device.type == "cuda" else resolved.device
    rows = documents.packed(resolved.stages[number].settings.stage).rows(numbers)
    rope = resolved.methods[number] or resolved.rope
    return dry_step(resolved, number, rope, rows, device, rank, lambda kinds: layers_of_run(kinds, which))


def repeated(step: DryStep) -> int:
    """Passes of a step beyond those that were executed; each repeats the first."""
    return step.passes - min(step.passes, MOST_PASSES)


def operators_of(step: DryStep, pairs: float = 1.0) -> Counter[Operator]:
    """Calls of operators of a rank in a step.

    Args:
        step: a step.
        pairs: visible pairs of the rows to count for, as a multiple of those of the step's own rows.
    """
    total = step.recording.operators.copy()
    if repeated(step):
        first, second = step.started[:2]
        for each, number in (second.operators - first.operators).items():
            total[each] += number * repeated(step)
    found: Counter[Operator] = Counter()
    for each, number in total.items():
        if each.kind == "attention":
            each = each._replace(
                flops=round(each.flops * pairs),
                repeated=round(each.repeated * pairs),
                # What it takes beyond the pairs grows with the queries alone.
                timed_flops=round(each.timed_flops + each.flops * (pairs - 1)),
            )
        found[each] += number
    return found


def flops_of(operators: Mapping[Operator, int]) -> Counter[str]:
    """Operations: dense, attention, recurrent, and ``model`` without recomputation."""
    found: Counter[str] = Counter()
    for (kind, moment), count in flops_by_phase(operators).items():
        found[kind] += count
        found["model"] += 0 if moment == RECOMPUTATION else count
    return found


def transfers_of(step: DryStep) -> Transfers:
    total = dict(step.recording.sent)
    if repeated(step):
        first, second = step.started[:2]
        for key, (bytes_, calls) in second.sent.items():
            before = first.sent.get(key, (0, 0))
            there = total[key]
            total[key] = (
                there[0] + (bytes_ - before[0]) * repeated(step),
                there[1] + (calls - before[1]) * repeated(step),
            )
    by_group: dict[str, tuple[int, int]] = {}
    for (group, _), (bytes_, calls) in total.items():
        name = step.groups.get(group, "shard")
        there = by_group.get(name, (0, 0))
        by_group[name] = there[0] + bytes_, there[1] + calls
    moved = sum(bytes_ for (_, way), (_, bytes_) in step.recording.copies.items() if way == "to the host")
    executed = min(step.passes, MOST_PASSES)
    return Transfers(
        by_group.get("shard", (0, 0)),
        by_group.get("replicate", (0, 0)),
        by_group.get("sequence", (0, 0)),
        by_group.get("ring", (0, 0)),
        # What is offloaded comes back.
        2 * moved * step.passes // executed,
    )
