"""Choose the mesh for ``parallel: auto``: the coarsest split of rows with which a stage fits the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.attention.recurrent import passes_states
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.time import Cluster
from ropewalk.training.memory_need import (
    USABLE,
    Bounds,
    Need,
    bounds,
    keeping_all,
    may_keep,
    most_kept,
    played_need,
)
from ropewalk.training.recipe.recipe import Stage
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.simulation.rank_costs import in_own_process

WORTH = 0.01
"""Smallest share of the step time that replicas must save to be chosen."""
TILE = 2**14
"""Tokens of a tile of MLPs that is suggested: its products are as quick as those of a whole row."""
MOST_FACTOR = 2**8
"""Most ranks that an error message suggests, as a multiple of those that there are."""


class DoesNotFit(RopewalkError):
    """No mesh of so many ranks has room for the sequences.

    Attributes:
        remedy: says what would fit; that takes dry runs of its own.
    """

    def __init__(self, said: str, remedy: Callable[[], str]) -> None:
        super().__init__(said)
        self.remedy = remedy


@dataclass(frozen=True)
class MeshChoice:
    """Search for the mesh of a stage.

    Attributes:
        config: config of the model.
        parameters: number of its parameters; None if it is not known.
        stage: the stage.
        precision: its resolved precision.
        trained: number of parameters that an adapter trains; None if all parameters of the model are trained.
        on_gpu: whether ranks have CPU memory beside that of their devices.
        cluster: memory, ranks per machine, and speeds, which matter for replicas alone.
        on_mesh: resolves the recipe with changes of the stage, on a mesh.
        number: index of the stage, from 0.
    """

    config: ModelConfig
    parameters: int | None
    stage: Stage
    precision: str
    trained: int | None
    on_gpu: bool
    cluster: Cluster
    on_mesh: Callable[[Stage, MeshShape], ResolvedRecipe]
    number: int

    def choose(self, world_size: int) -> MeshShape:
        """Choose the mesh that splits each sequence over as few ranks as possible.

        The number of ranks per sequence is the smallest one whose memory, by a dry run of a step, fits in 90 % of a
        rank's memory and for which the sequences of a step divide evenly over the data-parallel groups. Ulysses is
        preferred to the ring as far as its degree divides the heads and stays within a node. Parameters are sharded
        over all ranks, unless replicas on whole nodes fit and save at least 1 % of the expected step time.

        Args:
            world_size: number of ranks.

        Raises:
            DoesNotFit: if no mesh fits.
            RopewalkError: if the meshes that fit do not divide the sequences of a step; the message says what would.
                Also if a dry run cannot follow the model.
        """
        # One process for all dry runs, which is started by the first.
        with in_own_process():
            found = self.first(world_size)
            if found is None:
                raise self.refusal(world_size)
            best, least = found, math.inf
            # The fewest replicas first: of equals, these need least memory.
            for hybrid in self.hybrids(found):
                if least is math.inf:
                    least = (1 - WORTH) * self.seconds(found)
                if (seconds := self.seconds(hybrid)) < least:
                    best, least = hybrid, seconds
            return best

    def first(self, world_size: int) -> MeshShape | None:
        """The mesh without replicas that fits with the smallest sequence degree."""
        return next(
            (mesh for mesh in self.meshes(world_size) if self.divides(mesh) and self.fits(mesh)), None
        )

    def meshes(self, world_size: int) -> Iterator[MeshShape]:
        """One mesh for each number of ranks that a sequence can be split over."""
        whole = self.config.indexed_layers or not passes_states(self.config)
        most = 1 if whole else min(world_size, self.stage.context)
        for degree in range(1, most + 1):
            if world_size % degree == 0:
                sequence = self.ulysses_degree(degree, world_size)
                yield MeshShape(shard=world_size // degree, ring=degree // sequence, sequence=sequence)

    def ulysses_degree(self, degree: int, world_size: int) -> int:
        """Largest part of a sequence degree that Ulysses can take within a node."""
        # On several nodes, a group whose size does not divide a node's would straddle two nodes.
        within = self.cluster.ranks_per_node if world_size > self.cluster.ranks_per_node else world_size
        return math.gcd(degree, self.config.common_heads or 1, within)

    def hybrids(self, mesh: MeshShape) -> Iterator[MeshShape]:
        """Hybrid-sharding meshes with replicas on whole nodes that fit, fewest replicas first."""
        # Dry runs, which would compare meshes, walk along the row in an indexer, which takes too long.
        for replicate in () if self.config.indexed_layers else range(2, mesh.shard + 1):
            if (
                # Whole nodes only: replicas exchange nothing but gradient shards, which suits a slow network.
                mesh.shard % replicate == 0
                and mesh.shard_degree // replicate % self.cluster.ranks_per_node == 0
            ):
                hybrid = replace(mesh, replicate=replicate, shard=mesh.shard // replicate)
                if not self.fits(hybrid):
                    # More replicas need more memory.
                    return
                yield hybrid

    def divides(self, mesh: MeshShape) -> bool:
        return self.stage.rows_per_step % (mesh.data_degree * self.stage.rows_per_batch) == 0

    def fits(self, mesh: MeshShape) -> bool:
        """Whether a rank has room, by a dry run if a bound does not decide it."""
        memory = self.cluster.bytes_per_rank
        if (known := self.bounds(mesh).decides(memory)) is not None:
            return known
        if self.config.indexed_layers:
            # Their dry run walks along the row, which takes minutes, and there is one mesh to choose.
            return True
        # A stage that has room for kept attention will keep it, so that this dry run decides both.
        kept = self.need(mesh, with_kept=True)
        if kept.fits(memory):
            return True
        added = most_kept(self.config, self.stage, mesh, self.precision)
        # Often it decides, too, that there is no room without.
        return replace(kept, device=kept.device - added).fits(memory) and self.need(mesh).fits(memory)

    def bounds(self, mesh: MeshShape) -> Bounds:
        """What a step takes on a mesh, as far as it can be said without a dry run."""
        return bounds(
            self.config, self.parameters, self.stage, mesh, self.precision, self.trained, self.on_gpu
        )

    def need(self, mesh: MeshShape, with_kept: bool = False) -> Need:
        """What a step takes on a mesh, by a dry run; with kept attention, if ``auto`` may keep it."""
        resolved = self.on_mesh(self.stage, mesh)
        if with_kept and may_keep(resolved, self.number):
            resolved = keeping_all(resolved, self.number)
        try:
            return played_need(resolved, self.number)
        except EngineError as error:
            raise RopewalkError(
                f"parallel: auto needs a dry run of the training step, which fails: {error}; in the recipe, set "
                "parallel.replicate, parallel.shard, parallel.ring and parallel.sequence instead of parallel: auto"
            ) from error

    def seconds(self, mesh: MeshShape) -> float:
        return self.need(mesh).seconds(mesh, self.cluster)

    def refusal(self, world_size: int) -> RopewalkError:
        """Why there is no mesh, and what to change."""
        # The finest split of sequences needs least memory, and has the fewest data-parallel groups, hence the smallest
        # multiple.
        *_, mesh = self.meshes(world_size)
        context, each = self.stage.context, mesh.data_degree * self.stage.rows_per_batch
        if self.fits(mesh):
            return RopewalkError(
                f"no mesh of {world_size} {_ranks(world_size)} both divides rows_per_step "
                f"{self.stage.rows_per_step} evenly and has enough memory for rows of {context:,} tokens; set "
                f"rows_per_step to a multiple of {each}, which divides evenly over parallel {mesh.setting}"
            )
        known, memory = self.bounds(mesh), self.cluster.bytes_per_rank
        if known.decides(memory) is None:
            needed = f"an estimated {self.need(mesh).device / 1e9:,.1f} GB"
        else:
            needed = f"{known.least / 1e9:,.1f} GB or more"
        return DoesNotFit(
            f"rows of {context:,} tokens do not fit on {world_size} {_ranks(world_size)} with the stage's settings: "
            f"even with parallel: {mesh.setting}, a rank needs {needed}, but has {memory / 1e9:,.1f} GB, of which "
            f"{USABLE * memory / 1e9:,.1f} GB are usable",
            lambda: self.remedy(world_size),
        )

    def remedy(self, world_size: int) -> str:
        """Say what would make the stage fit, with the smallest change first."""
        with in_own_process():
            return self._remedy(world_size)

    def _remedy(self, world_size: int) -> str:
        changes = [(self, "")]
        if not self.stage.gradient_checkpointing:
            changes.append((self.changed(gradient_checkpointing=True), "gradient_checkpointing"))
        if not self.stage.offload_activations:
            names = [*(name for _, name in changes[1:]), "offload_activations"]
            with_offload = self.changed(gradient_checkpointing=True, offload_activations=True)
            changes.append((with_offload, " and ".join(names)))
        # Without a change of settings only more ranks can help, and those cost more.
        for changed, name in changes[1:]:
            if changed.first(world_size) is not None:
                return f"set {name} to true"
        spared = changes[-1][0].changed(tiled_mlp=self.stage.tiled_mlp or TILE)
        settings = [name for _, name in changes[1:]][-1:]
        for changed, name in (
            (spared, f"tiled_mlp to {TILE:,}"),
            # An adapter's few weights stay on the device.
            (spared.changed(offload_optimizer=self.trained is None), "offload_optimizer to true"),
        ):
            settings.append(name)
            if changed.first(world_size) is not None:
                shown = [f"{each} to true" if " to " not in each else each for each in settings]
                return f"set {', and '.join(shown)}"
        # Keyed by ranks: a change of settings is named only if it needs fewer ranks than those before it.
        ways: dict[int, str] = {}
        for changed, name in changes:
            ranks = changed.least_ranks(world_size)
            if ranks is not None and all(ranks < other for other in ways):
                ways[ranks] = f"{ranks:,} ranks" + (f" with {name}" if name else "")
        if ways:
            return f"use {', or '.join(ways.values())}"
        return f"even {MOST_FACTOR * world_size:,} ranks would not suffice"

    def changed(self, **settings: Any) -> MeshChoice:
        """The search for the mesh of the stage with other settings."""
        return replace(self, stage=self.stage.model_copy(update=settings))

    def least_ranks(self, world_size: int) -> int | None:
        """Smallest number of ranks that fits among twice, four times, ... the present number; None if none does."""
        ranks = 2 * world_size
        while ranks <= MOST_FACTOR * world_size:
            *_, finest = self.meshes(ranks)
            if self.divides(finest) and self.fits(finest):
                return ranks
            ranks *= 2
        return None


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"
