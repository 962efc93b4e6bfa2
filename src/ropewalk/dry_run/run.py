"""Plan a run on named hardware: memory, operations, bytes sent and time of every stage, from a dry run of its step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import torch

from ropewalk.attention.api import KERNELS
from ropewalk.attention.speeds import SPEEDS
from ropewalk.dry_run.recorded_run import Slowdown, recorded_run
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import format_length
from ropewalk.io.progress import Reporter
from ropewalk.io.results import Result
from ropewalk.models.attention.kernels import kernel_packages
from ropewalk.models.attention.recurrent import passes_states
from ropewalk.models.config.read import read_config
from ropewalk.models.load import choose_device
from ropewalk.parallel import MeshShape, World
from ropewalk.parallel.context import RunContext
from ropewalk.planning.sizing.recurrent import SHARES
from ropewalk.planning.sizing.time import Cluster, gpu_named, waiting_seconds
from ropewalk.training.memory_need import USABLE, may_keep, most_kept
from ropewalk.training.mesh_choice import TILE, DoesNotFit
from ropewalk.training.preflight import Machine, device_bytes, resolve
from ropewalk.training.recipe.recipe import Parallel, Recipe
from ropewalk.training.resolved import ResolvedRecipe, ResolvedStage
from ropewalk.training.simulation.assumed_documents import Documents, documents_of
from ropewalk.training.simulation.memory import Memory
from ropewalk.training.simulation.rank_costs import (
    Copy,
    Player,
    RankCosts,
    Wait,
    in_own_process,
    played_by,
)
from ropewalk.training.simulation.roofline import compute_seconds

ONE_NODE = 8
SAVINGS = {
    "gradient_checkpointing": "true: less memory for a third more time",
    "offload_activations": "checkpoints of layers wait in the CPU's memory",
    "tiled_mlp": "the MLP in tiles of so many tokens",
    "offload_optimizer": "the optimizer's states and step are the CPU's",
}
"""Settings of a stage that save memory with what they do, each with more cost of time than those before it."""
MOST_CHANGES = 8
"""Most changes that are tried in a dry run of their own if a stage does not fit."""


@dataclass(frozen=True)
class Change:
    """A change that was tried because a stage does not fit, or because it leaves memory free.

    Attributes:
        change: the change, as a recipe or command states it.
        peak: most bytes per GPU with it; None if the recipe does not allow it.
        host: bytes of CPU memory of a machine with it.
        fits: whether the stage then fits.
        reason: why the recipe does not allow it; empty if it does.
        settings: the settings of the stage that it changes, those of changes before it included; empty for GPUs.
        seconds: time of a step with it; None for hardware whose speed is not known.
    """

    change: str
    peak: int | None
    fits: bool
    reason: str = ""
    host: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class PlannedStage:
    """A stage on the planned hardware.

    Attributes:
        number: index of the stage, counted from 1.
        context: tokens of a row.
        steps, rows_per_step: those of the recipe.
        mesh: degrees of parallelism, in words.
        device: type of device, ``cuda`` or ``cpu``.
        engine, precision: resolved attention engine and precision.
        kernels: attention kernels of :data:`ropewalk.attention.speeds.SPEEDS` that it runs.
        recurrent: what computes recurrent layers, in words; empty if the model has none.
        documents: what was assumed of the documents, in words.
        memory: memory of the rank that needs most.
        rank: that rank.
        usable: bytes of a GPU that a run may fill.
        host: bytes of CPU memory that the processes of a machine need, besides programs and files.
        host_usable: bytes of CPU memory of a machine that a run may fill.
        fits: whether the peak is within ``usable``, and ``host`` within ``host_usable``.
        changes: changes that were tried if it does not fit, the first one that fits last.
        spare: settings that save memory and were turned off if it fits, costliest first, until it fits no more.
        finer: the mesh that was tried because ``auto`` chose one without room to keep results of attention.
        attention: what checkpointed layers keep of their attention, in words; empty if it is not computed again anyway.
        flops: operations of a step over all ranks, recomputation included: ``dense``, ``attention``, ``recurrent`` if
            the model has such kernels.
        model_flops: operations of a step without recomputation.
        sent: bytes that the rank that sends most sends in a step: ``shards``, ``replicas``, ``ulysses``, ``ring``.
        offloaded: bytes that a rank copies to CPU memory and back in a step.
        waits: places at which the host waits for the GPU.
        copies: copies between host and GPU within a step.
        time: time of a step and of the stage; None for hardware whose speed is not known.
    """

    number: int
    context: int
    steps: int
    rows_per_step: int
    mesh: str
    device: str
    engine: str
    precision: str
    kernels: tuple[str, ...]
    recurrent: str
    documents: str
    memory: Memory
    rank: int
    usable: int
    host: int
    host_usable: int
    fits: bool
    changes: tuple[Change, ...]
    spare: tuple[Change, ...]
    finer: Change | None
    attention: str
    flops: dict[str, int]
    model_flops: int
    sent: dict[str, int]
    offloaded: int
    waits: tuple[Wait, ...]
    copies: tuple[Copy, ...]
    time: StageTime | None

    def including(self, change: Change) -> str:
        """One of the stage's changes in words, with those before it that it includes: ``a and b and also c``."""
        among = self.changes if change in self.changes else self.spare
        before = among[: among.index(change)] if change.settings else ()
        kept = [each.change for each in before if each.settings and each.peak is not None]
        return f"{' and '.join(kept)} and also {change.change}" if kept else change.change


@dataclass(frozen=True)
class StageTime:
    """Estimated time of a stage.

    Attributes:
        seconds: time of a step.
        compute_seconds, exchange_seconds, exposed_seconds: its parts: operators, exchanges of attention, and transfers
            that computation does not hide.
        kinds: the operators' time by ``matmul``, ``attention``, ``other``, and ``recurrent`` if there are such kernels.
        tokens_per_second: throughput of all ranks.
        utilisation: model FLOPs utilisation, 0 to 1.
        days_per_billion_tokens: days of training for 10^9 tokens.
        hours: time of the whole stage.
        cost: price of the whole stage; None without a price.
    """

    seconds: float
    compute_seconds: float
    kinds: dict[str, float]
    exchange_seconds: float
    exposed_seconds: float
    tokens_per_second: float
    utilisation: float
    days_per_billion_tokens: float
    hours: float
    cost: float | None


@dataclass(frozen=True)
class PlannedRun(Result):
    """A recipe on named hardware.

    Attributes:
        model: the recipe's model.
        ranks: number of processes, each with a device.
        device: kind of device: a GPU's name, or ``cpu``.
        device_bytes: memory of one rank.
        stages: the recipe's stages with steps.
        assumptions: what times rest on, one sentence each.
    """

    model: str
    ranks: int
    device: str
    device_bytes: int
    stages: tuple[PlannedStage, ...]
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage fits."""
        return all(stage.fits for stage in self.stages)

    def overview(self) -> list[dict[str, Any]]:
        """A row for each stage: whether it fits, its peak of memory in GB (10^9 bytes), and its time and cost."""
        return [
            {
                "stage": stage.number,
                "context": stage.context,
                "mesh": stage.mesh,
                "fits": stage.fits,
                "peak_gb": stage.memory.peak / 1e9,
                "step_seconds": time and time.seconds,
                "tokens_per_second": time and time.tokens_per_second,
                "hours": time and time.hours,
                "cost": time and time.cost,
            }
            for stage in self.stages
            for time in [stage.time]
        ]

    def statement(self) -> list[str]:
        """The hardware, and what would make a stage fit that does not."""
        where = f"{self.ranks} x {self.device} ({self.device_bytes / 1e9:.3g} GB each)"
        lines = [f"{self.model} on {where}: {'fits' if self.fits else 'does not fit'}"]
        for stage in self.stages:
            would = next(
                (f"with {stage.including(each)} it fits" for each in stage.changes if each.fits),
                "no change fits",
            )
            lines += [] if stage.fits else [f"stage {stage.number}: {would}"]
        return lines


def plan(
    recipe: Recipe, hardware: HardwareSettings | None = None, context: RunContext | None = None
) -> PlannedRun:
    """Run the real training step of every stage without data and without GPUs, and derive what it takes.

    Args:
        recipe: recipe to plan. Of its model only the config is read.
        hardware: GPUs to plan for.
        context: reporter of progress; its other values are ignored.

    Raises:
        RopewalkError: for an invalid recipe, a mesh that does not suit the GPUs, or a measured run of another model or
            GPU.
        EngineError: if the model does something that a dry run cannot follow, or that would fail on a GPU.
    """
    hardware = hardware or HardwareSettings()
    context = context or RunContext()
    cluster = hardware.cluster
    target = _Target(
        name=hardware.gpu,
        ranks=hardware.gpus or _requested(recipe),
        ranks_per_node=cluster.ranks_per_node,
        machine=Machine(torch.device("cuda", 0), cluster.bytes_per_rank, cluster.capability),
        host=cluster.host_bytes,
        cluster=cluster,
        price=hardware.price,
        document_length=hardware.document_length,
    )
    if hardware.measured is not None:
        run = recorded_run(hardware.measured, recipe, hardware.gpu)
        theirs = _planned(run.recipe, replace(target, ranks=run.ranks), context)
        seconds = {stage.number - 1: stage.time.seconds for stage in theirs.stages if stage.time is not None}
        target = replace(target, slowdown=run.compared(seconds))
    return _planned(recipe, target, context)


def plan_here(recipe: Recipe, world: World | None = None, context: RunContext | None = None) -> PlannedRun:
    """Plan a recipe for this machine: its GPUs, or its CPU where it has none.

    Times are given for the GPUs of :data:`~ropewalk.planning.sizing.time.GPUS` alone, and never guessed for others.

    Args:
        recipe: recipe to plan.
        world: processes of the run; one per GPU if None, or one on the CPU.
        context: reporter of progress.

    Raises:
        RopewalkError, EngineError: as for :func:`plan`.
    """
    device = choose_device(recipe.device)
    on_gpu = device.type == "cuda"
    ranks = (
        world.size if world is not None and world.size > 1 else (torch.cuda.device_count() if on_gpu else 1)
    )
    per_node = world.local_size if world is not None and world.size > 1 else ranks
    memory = device_bytes(device) // (1 if on_gpu else per_node)
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    known = gpu_named(name) if on_gpu else None
    cluster = None if known is None else replace(known, ranks_per_node=per_node, bytes_per_rank=memory)
    host = device_bytes(torch.device("cpu"))
    target = _Target(name, ranks, per_node, Machine(device, memory, elsewhere=False), host, cluster)
    return _planned(recipe, target, context or RunContext())


def _planned(recipe: Recipe, target: _Target, context: RunContext) -> PlannedRun:
    numbers = [number for number, stage in enumerate(recipe.stages) if stage.steps]
    # One process for the dry runs of all stages, those that choose their meshes included.
    with announced(context.rank_0_reporter) as player:
        stages = tuple(_Planner(recipe, target, number, context, player).planned() for number in numbers)
    kernels = {kernel for stage in stages for kernel in stage.kernels}
    return PlannedRun(
        model=recipe.model,
        ranks=target.ranks,
        device=target.name,
        device_bytes=target.machine.memory,
        stages=stages,
        assumptions=tuple(_assumptions(target, kernels, {stage.recurrent for stage in stages})),
    )


@contextmanager
def announced(reporter: Reporter, what: str = "") -> Iterator[Player]:
    """Processes that play ranks, with a note on each rank before it is played, which takes a while.

    Args:
        reporter: receives the notes.
        what: words before those of the stage; none by default.
    """
    numbers = count(1)
    with in_own_process() as player:

        def play(resolved: ResolvedRecipe, number: int, documents: Documents, rank: int) -> RankCosts:
            here = resolved.stages[number]
            keeping = "" if here.keeping is None else f", {here.keeping}"
            on = [name for name in SAVINGS if getattr(here.settings.stage, name)]
            settings = f", with {' and '.join(on)}" if on else ""
            reporter.note(
                f"dry run {next(numbers)}: {what}stage {number + 1} of {len(resolved.stages)}, mesh {here.mesh}, "
                f"rank {rank}{settings}{keeping}"
            )
            return player(resolved, number, documents, rank)

        with played_by(play):
            yield play


@dataclass(frozen=True)
class _Target:
    """Hardware to plan for.

    Attributes:
        name: kind of device, for people.
        ranks, ranks_per_node: number of processes, and of those on one machine.
        machine: device and memory of a rank.
        host: memory of the CPU of a machine.
        cluster: assumed speeds; None if they are not known.
        price: price of a GPU hour; None for none.
        document_length: tokens of each document; None for the recipe's own.
        slowdown: factor for the time of computation; None for that of the roofline alone.
    """

    name: str
    ranks: int
    ranks_per_node: int
    machine: Machine
    host: int
    cluster: Cluster | None
    price: float | None = None
    document_length: int | None = None
    slowdown: Slowdown | None = None

    @property
    def usable(self) -> int:
        """Bytes of a rank that a run may fill."""
        return int(USABLE * self.machine.memory)

    @property
    def host_usable(self) -> int:
        """Bytes of CPU memory of a machine that a run may fill."""
        return int(USABLE * self.host)

    def host_needed(self, played: RankCosts, mesh: MeshShape) -> int:
        """Bytes of CPU memory that a machine needs if all its ranks need what this one does."""
        return played.memory.host_bytes * min(mesh.world_size, self.ranks_per_node)

    def fits(self, played: RankCosts, mesh: MeshShape) -> bool:
        """Whether a rank fits on its device, and its machine's ranks in the CPU's memory."""
        return played.memory.peak <= self.usable and self.host_needed(played, mesh) <= self.host_usable


def _requested(recipe: Recipe) -> int:
    """Number of ranks that a recipe's meshes request; one node if they are left to ``auto``."""
    asked = {MeshShape(**each.model_dump()).world_size for each in _meshes(recipe)}
    if len(asked) > 1:
        raise RopewalkError(
            f"the stages' parallel requests {' and '.join(map(str, sorted(asked)))} processes; give --gpus"
        )
    return asked.pop() if asked else ONE_NODE


def _meshes(recipe: Recipe) -> Iterator[Parallel]:
    for each in (recipe.parallel, *(stage.parallel for stage in recipe.stages)):
        if isinstance(each, Parallel):
            yield each


@dataclass(frozen=True)
class _Planner:
    """Plans one stage.

    Attributes:
        recipe: the recipe.
        target: hardware to plan for.
        number: index of the stage, from 0.
        context: reporter of progress.
        player: plays ranks.
    """

    recipe: Recipe
    target: _Target
    number: int
    context: RunContext
    player: Player

    def planned(self) -> PlannedStage:
        """The stage as the recipe states it, and the smallest change that fits if it does not."""
        resolved = self.resolved()
        length, short_length = self.target.document_length, resolved.short_lengths[self.number]
        documents = documents_of(self.recipe, self.number, length, self.context, short_length)
        ranks = self.played(resolved, documents, _extremes(resolved.stages[self.number].mesh))
        most = max(ranks, key=lambda each: each.memory.peak)
        fits = self.target.fits(most, resolved.stages[self.number].mesh)
        changes = () if fits else tuple(self.changes(resolved, documents, most.memory))
        spare = tuple(self.spare(resolved, documents, most.memory)) if fits else ()
        accounts = _Accounts(resolved, self.number, self.target, documents, tuple(ranks))
        finer = self.finer(resolved, documents, most.memory) if fits else None
        return accounts.stage(most, changes, spare, finer)

    def resolved(self, recipe: Recipe | None = None, ranks: int | None = None) -> ResolvedRecipe:
        """The recipe on the planned hardware; where ``auto`` finds no mesh that fits, on the finest one."""
        recipe, target = recipe or self.recipe, self.target
        ranks = ranks or target.ranks
        world = World(0, ranks, 0, min(ranks, target.ranks_per_node))
        machine, stages = target.machine, range(self.number, self.number + 1)
        try:
            return resolve(recipe, world, training=stages, machine=machine)
        except DoesNotFit:
            # Without a limit, auto would not split rows at all.
            return resolve(finest(recipe, self.number, ranks), world, training=stages, machine=machine)

    def played(self, resolved: ResolvedRecipe, documents: Documents, ranks: Sequence[int]) -> list[RankCosts]:
        """The stage's step on some of its ranks."""
        return [self.player(resolved, self.number, documents, rank) for rank in ranks]

    def changes(self, resolved: ResolvedRecipe, documents: Documents, memory: Memory) -> Iterator[Change]:
        """Changes from the smallest to the largest, each in a dry run, up to the first that fits.

        Settings come before GPUs, and each change includes those before it that the recipe allows.
        """
        recipe, number = self.recipe, 0
        settings: dict[str, Any] = {}
        mesh = resolved.stages[self.number].mesh
        for name, value in self.settings(mesh, memory):
            stated = format_length(value) if name == "tiled_mlp" else str(value).lower()
            changed = _with(recipe, self.number, **{name: value})
            key = f"stages.{self.number}.{name}: {stated}"
            change = self.tried(documents, key, changed, self.target.ranks, {**settings, name: value})
            yield change
            if change.fits:
                return
            if change.peak is not None:
                recipe, settings = changed, change.settings
            number += 1
        if self.target.machine.device.type == "cpu":
            # More processes on this machine share its memory.
            return
        also = "" if recipe is self.recipe else " with the settings above"
        for factor in (2**power for power in range(1, MOST_CHANGES - number + 1)):
            # More GPUs for one row: a GPU's share of parameters shrinks in any case.
            finer = replace(mesh, ring=mesh.ring * factor)
            gpus, arranged = self.target.ranks * factor, _arranged(recipe, self.number, finer)
            change = self.tried(documents, f"{gpus} GPUs ({finer}){also}", arranged, gpus)
            yield change
            if change.fits:
                return

    def settings(self, mesh: MeshShape, memory: Memory) -> Iterator[tuple[str, Any]]:
        """Settings of the stage that save memory and are not set, each with more cost of time than those before it."""
        stage = self.recipe.stages[self.number]
        if memory.peak <= self.target.usable:
            # The CPU's memory alone is too small, and settings that save the device's would need more of it.
            if memory.host.get("attention"):
                yield "keep_attention", False
            return
        tokens = stage.rows_per_batch * stage.context // mesh.sequence_degree
        # An adapter's few weights stay on the device.
        values = (True, True, TILE if tokens > TILE else None, self.recipe.adapter is None)
        for name, value in zip(SAVINGS, values, strict=True):
            if value and not getattr(stage, name):
                yield name, value

    def spare(self, resolved: ResolvedRecipe, documents: Documents, memory: Memory) -> Iterator[Change]:
        """Settings that save memory turned off, costliest first, each in a dry run, up to the first that does not fit.

        Each includes those before it.
        """
        recipe, settings = self.recipe, dict[str, Any]()
        stage, config = recipe.stages[self.number], read_config(resolved.model, recipe.trust_remote_code)
        mesh = resolved.stages[self.number].mesh
        tokens = stage.rows_per_batch * stage.context // mesh.sequence_degree
        for name in reversed(SAVINGS):
            if not getattr(stage, name):
                continue
            # Every layer but the one that is computed again would keep at least three tensors of the hidden size.
            kept = 3 * 2 * tokens * config.values.get("hidden_size", 0) * (len(config.layers) - 1)
            if name == "gradient_checkpointing" and memory.peak + kept > self.target.usable:
                return
            off = None if name == "tiled_mlp" else False
            settings = {**settings, name: off}
            recipe = _with(recipe, self.number, **{name: off})
            key = f"stages.{self.number}.{name}: {'null' if off is None else 'false'}"
            change = self.tried(documents, key, recipe, self.target.ranks, settings)
            yield change
            if not change.fits:
                return

    def finer(self, resolved: ResolvedRecipe, documents: Documents, memory: Memory) -> Change | None:
        """A finer split of rows than that of ``auto``, if it surely has room to keep results of attention; or None.

        ``auto`` takes the coarsest split that fits, whether results are then kept or not.
        """
        here, recipe = resolved.stages[self.number], self.recipe
        stage, mesh = here.settings.stage, here.mesh
        config = read_config(resolved.model, recipe.trust_remote_code)
        kept = here.keeping is not None and here.keeping.on_device
        if here.settings.parallel != "auto" or kept or not may_keep(resolved, self.number):
            return None
        if self.target.cluster is None or config.indexed_layers or not passes_states(config):
            return None
        for times in range(2, mesh.shard + 1):
            sequence = mesh.sequence * times
            # By Ulysses alone, within a node: what a ring costs is seldom less than running attention again.
            if (
                mesh.shard % times
                or (config.common_heads or 1) % sequence
                or self.target.ranks_per_node % sequence
            ):
                continue
            finer = replace(mesh, shard=mesh.shard // times, sequence=sequence)
            # Apart from these results, a rank holds no more with fewer tokens.
            if memory.peak + most_kept(config, stage, finer, here.precision) <= self.target.usable:
                arranged = _arranged(recipe, self.number, finer)
                return self.tried(documents, f"parallel: {finer.setting}", arranged, self.target.ranks)
        return None

    def tried(
        self,
        documents: Documents,
        change: str,
        recipe: Recipe,
        ranks: int,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> Change:
        """A dry run of the stage with a change."""
        try:
            resolved = self.resolved(recipe, ranks)
            mesh = resolved.stages[self.number].mesh
            played = self.played(resolved, documents, _extremes(mesh))
        except RopewalkError as error:
            return Change(change, None, False, str(error))
        most = max(played, key=lambda each: each.memory.peak)
        stage = _Accounts(resolved, self.number, self.target, documents, tuple(played)).stage(most)
        seconds = None if stage.time is None else stage.time.seconds
        return Change(
            change, most.memory.peak, stage.fits, host=stage.host, settings=dict(settings), seconds=seconds
        )


def _with(recipe: Recipe, number: int, **changes: Any) -> Recipe:
    stages = list(recipe.stages)
    stages[number] = stages[number].model_copy(update=changes)
    return recipe.model_copy(update={"stages": tuple(stages)})


def _arranged(recipe: Recipe, number: int, mesh: MeshShape) -> Recipe:
    """The recipe with a mesh, of its own as well as of the stage: the recipe's may ask for other numbers of GPUs."""
    parallel = Parallel(**asdict(mesh))
    return _with(recipe.model_copy(update={"parallel": parallel}), number, parallel=parallel)


def finest(recipe: Recipe, number: int, gpus: int) -> Recipe:
    """The recipe with every GPU at work on the same rows, by Ulysses as far as ``auto`` would and a ring beyond."""
    # parallel.sequence has to divide the heads, which a power of two up to a node usually does.
    sequence = math.gcd(gpus, ONE_NODE)
    return _arranged(recipe, number, MeshShape(ring=gpus // sequence, sequence=sequence))


def _extremes(mesh: MeshShape) -> tuple[int, ...]:
    """Ranks at both ends of the ring, which differ most in the keys that they receive and the pairs they compute."""
    return (0,) if mesh.ring == 1 else (0, (mesh.ring - 1) * mesh.sequence)


@dataclass(frozen=True, eq=False)
class _Accounts:
    """Totals of a stage from the recorded steps of some ranks."""

    resolved: ResolvedRecipe
    number: int
    target: _Target
    documents: Documents
    ranks: tuple[RankCosts, ...]

    def stage(
        self,
        most: RankCosts,
        changes: tuple[Change, ...] = (),
        spare: tuple[Change, ...] = (),
        finer: Change | None = None,
    ) -> PlannedStage:
        """The planned stage; ``most`` is the rank that needs most memory."""
        here = self.resolved.stages[self.number]
        stage, mesh, usable = here.settings.stage, here.mesh, self.target.usable
        # Ranks at the two ends of a ring differ, and those between lie between them.
        dense, attention, recurrent, model = (
            sum(each.flops[kind] for each in self.ranks) // len(self.ranks) * mesh.world_size
            for kind in ("dense", "attention", "recurrent", "model")
        )
        kernels = tuple(sorted({each.name for each in most.operators if each.kind == "attention"}))
        return PlannedStage(
            number=self.number + 1,
            context=stage.context,
            steps=stage.steps,
            rows_per_step=stage.rows_per_step,
            mesh=str(mesh),
            device=self.target.machine.device.type,
            engine=here.engine,
            precision=here.precision,
            kernels=kernels,
            recurrent=_recurrent(self.resolved),
            documents=self.documents.words,
            memory=most.memory,
            rank=most.rank,
            usable=usable,
            host=self.target.host_needed(most, mesh),
            host_usable=self.target.host_usable,
            fits=self.target.fits(most, mesh),
            changes=changes,
            spare=spare,
            finer=finer,
            attention=_kept_of(here),
            flops={"dense": dense, "attention": attention} | ({"recurrent": recurrent} if recurrent else {}),
            model_flops=model,
            sent={
                name: max(getattr(each.transfers, name)[0] for each in self.ranks)
                for name in ("shards", "replicas", "ulysses", "ring")
            },
            offloaded=max(each.transfers.host for each in self.ranks),
            waits=most.waits,
            copies=most.copies,
            time=self.time(self.target.cluster, model) if kernels and self.target.cluster else None,
        )

    def time(self, cluster: Cluster, model: int) -> StageTime:
        """Time on hardware of known speed; a step lasts as long as on its slowest rank."""
        here = self.resolved.stages[self.number]
        stage, mesh = here.settings.stage, here.mesh
        kinds = max(
            (compute_seconds(each.operators, cluster) for each in self.ranks),
            key=lambda each: sum(each.values()),
        )
        if self.target.slowdown is not None:
            kinds = {kind: spent * self.target.slowdown.factor for kind, spent in kinds.items()}
        compute = sum(kinds.values())
        waiting = [waiting_seconds(each.transfers, mesh, compute, cluster) for each in self.ranks]
        exchange, exposed = (max(each[part] for each in waiting) for part in (0, 1))
        seconds = compute + exchange + exposed
        tokens = stage.rows_per_step * stage.context
        hours = stage.steps * seconds / 3600
        price = self.target.price
        return StageTime(
            seconds=seconds,
            compute_seconds=compute,
            kinds=kinds,
            exchange_seconds=exchange,
            exposed_seconds=exposed,
            tokens_per_second=tokens / seconds,
            utilisation=model / (seconds * cluster.peak_flops * mesh.world_size),
            days_per_billion_tokens=1e9 * seconds / tokens / 86400,
            hours=hours,
            cost=None if price is None else hours * mesh.world_size * price,
        )


def _kept_of(stage: ResolvedStage) -> str:
    if not stage.settings.stage.gradient_checkpointing or stage.engine not in KERNELS:
        return ""
    return (
        "results of attention are computed again in the backward"
        if stage.keeping is None
        else str(stage.keeping)
    )


def _attention_shares(cluster: Cluster, kernels: Collection[str]) -> str:
    if cluster.attention_efficiency is not None:
        return f"{cluster.attention_efficiency:.0%}"
    known = {name: SPEEDS[name][cluster.generation] for name in sorted(kernels)}
    return ", ".join(f"{speed.share:.0%} ({name}; {speed.source})" for name, speed in known.items())


def _recurrent(resolved: ResolvedRecipe) -> str:
    """What computes the recurrent layers of a model, in words; empty if it has none."""
    config = read_config(resolved.model, resolved.recipe.trust_remote_code)
    if not config.recurrent_layers:
        return ""
    packages = kernel_packages(config)
    if resolved.missing:
        return f"transformers' own code, because {' and '.join(resolved.missing)} cannot be found here"
    if resolved.device.type == "cpu" or not packages:
        return "transformers' own code"
    return f"the kernels of {' and '.join(packages)}, which must be installed"


def _assumptions(target: _Target, kernels: Collection[str], recurrent: Collection[str]) -> Iterator[str]:
    cluster, memory = target.cluster, f"{target.machine.memory / 1e9:.3g} GB"
    if cluster is None:
        yield f"{target.name}: {memory} per process; its speed is not known, so no time is given"
    elif not kernels:
        yield f"{target.name}: {memory}; attention runs as plain products, of unknown speed, so no time is given"
    else:
        yield (
            f"{target.name}: {memory} at {cluster.memory_bandwidth / 1e12:g} TB/s, "
            f"{cluster.peak_flops / 1e12:g} TFLOP/s of dense bfloat16 products, "
            f"{cluster.nvlink / 1e9:g} GB/s between GPUs of a node, {cluster.network / 1e9:g} GB/s between nodes"
        )
        speed = SHARES[cluster.generation]
        of_recurrent = (
            f"kernels of recurrent layers {speed.share:.0%} ({speed.source}), " if any(recurrent) else ""
        )
        yield (
            f"an operator takes the time of its operations or of its bytes: products reach "
            f"{cluster.matmul_efficiency:.0%} of the peak, attention {_attention_shares(cluster, kernels)}, "
            f"{of_recurrent}and everything else {cluster.memory_efficiency:.0%} of the memory's bandwidth"
        )
        if cluster.generation == "cdna3":
            yield "ropewalk has not run on a GPU of AMD; the engines are those of an A100"
        if target.slowdown is not None:
            yield (
                f"computation takes {target.slowdown.factor:.2f} times as long as that, as the steps "
                f"{target.slowdown.words} did beside a plan of their own recipe"
            )
        yield (
            f"links reach {cluster.link_efficiency:.0%} of their bandwidth, and computation hides "
            f"{cluster.overlap:.0%} of the transfers that can overlap with it"
        )
    for words in sorted(filter(None, recurrent)):
        yield f"recurrent layers are computed by {words}"
    on_gpu = target.machine.device.type != "cpu"
    rest = "the CUDA context, NCCL" if on_gpu else "libraries, other programs"
    yield f"a run may fill {USABLE:.0%} of the memory; the rest is for {rest} and fragmentation"
