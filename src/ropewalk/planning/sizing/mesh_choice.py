"""Choose the mesh for ``parallel: auto``, and check that a mesh fits the ranks, attention heads and sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ropewalk.errors import RopewalkError
from ropewalk.parallel.mesh import MeshShape
from ropewalk.parallel.ulysses import check_heads
from ropewalk.planning.sizing.memory import estimate_memory
from ropewalk.planning.sizing.model_shape import ShardedRun
from ropewalk.planning.sizing.time import H100, Cluster, estimate_step

USABLE = 0.9
"""Share of a device's memory that an estimate may fill. The rest is for the allocator and kernel workspaces."""
WORTH = 0.01
"""Smallest share of the step time that replicas must save to be chosen."""
TILE = 2**14
"""Tokens of a tile of MLPs that is suggested: its products are as quick as those of a whole row."""
MOST_RANKS = 2**16
"""Largest number of ranks that an error message suggests."""


class DoesNotFit(RopewalkError):
    """No mesh of so many ranks has room for the sequences; the message says what would."""


def check_mesh(
    shape: MeshShape,
    world_size: int,
    num_heads: int,
    row_length: int,
    rows_per_step: int,
    rows_per_batch: int,
) -> None:
    """Check that a mesh can train these sequences, before anything loads.

    Args:
        shape: degrees of parallelism.
        world_size: number of ranks that were started.
        num_heads: number of query heads.
        row_length: sequence length in tokens.
        rows_per_step, rows_per_batch: sequences per optimizer step, and per pass of one group of ranks.

    Raises:
        RopewalkError: if a value does not fit; the message gives the value and one that would fit.
    """
    if shape.world_size != world_size:
        raise RopewalkError(
            f"parallel {shape.setting} needs {shape.world_size} {_ranks(shape.world_size)}, but {world_size} "
            f"{'was' if world_size == 1 else 'were'} started; start {shape.world_size}, or set parallel to "
            f"{_fitted(shape, world_size).setting}"
        )
    check_heads(num_heads, shape.sequence)
    if rows_per_batch < 1:
        raise RopewalkError(f"rows_per_batch must be 1 or more, got {rows_per_batch}")
    if row_length < shape.sequence_degree:
        raise RopewalkError(
            f"parallel.ring x parallel.sequence is {shape.sequence_degree}, but a row of {row_length} "
            f"{'token' if row_length == 1 else 'tokens'} can be split over at most {row_length} "
            f"{_ranks(row_length)}; lower parallel.ring or parallel.sequence"
        )
    each = shape.data_degree * rows_per_batch
    if rows_per_step < 1 or rows_per_step % each:
        # Zero sequences are no choice, so below the first multiple only the next one above is named.
        below, above = rows_per_step // each * each, (max(rows_per_step, 0) // each + 1) * each
        choice = f"{below} or {above}" if below > 0 else f"{above}"
        raise RopewalkError(
            f"rows_per_step must be a positive multiple of {each} ({shape.data_degree} data-parallel groups x "
            f"rows_per_batch {rows_per_batch}), got {rows_per_step}; use {choice}"
        )


def choose_mesh(run: ShardedRun, rows_per_step: int, world_size: int, cluster: Cluster = H100) -> MeshShape:
    """Choose the mesh that splits each sequence over as few ranks as possible.

    The number of ranks per sequence is the smallest one whose estimated memory fits in 90 % of a rank's memory and for
    which the sequences of a step divide evenly over the data-parallel groups. Ulysses is preferred to the ring as far
    as its degree divides the heads and stays within a node. Parameters are sharded over all ranks, unless replicas on
    whole nodes fit and save at least 1 % of the expected step time.

    Args:
        run: model, sequence length and batch of one pass; its mesh is ignored.
        rows_per_step: sequences per optimizer step.
        world_size: number of ranks.
        cluster: ranks per node and their memory; its speeds matter only for hybrid sharding.

    Raises:
        DoesNotFit: if no mesh fits.
        RopewalkError: if the meshes that fit do not divide the sequences of a step; the message says what would.
    """
    for name, value in (
        ("the number of ranks", world_size),
        ("ranks_per_node", cluster.ranks_per_node),
    ):
        if value < 1:
            raise RopewalkError(f"{name} must be 1 or more, got {value}")
    rows_per_batch = run.rows_per_batch
    if rows_per_step < 1 or rows_per_step % rows_per_batch:
        raise RopewalkError(
            f"rows_per_step must be a positive multiple of rows_per_batch {rows_per_batch}, got {rows_per_step}"
        )
    search = _Search(run, rows_per_step, cluster)
    found = search.first(world_size)
    if found is None:
        raise search.refusal(world_size)

    def seconds(mesh: MeshShape) -> float:
        return estimate_step(replace(run, mesh=mesh), rows_per_step, cluster).seconds

    # min takes the first of equals: the one with the fewest replicas.
    hybrid = min(search.hybrids(found), key=seconds, default=found)
    return hybrid if seconds(hybrid) < (1 - WORTH) * seconds(found) else found


@dataclass(frozen=True)
class _Search:
    """Search over meshes for a run whose own mesh is ignored."""

    run: ShardedRun
    rows_per_step: int
    cluster: Cluster

    def first(self, world_size: int) -> MeshShape | None:
        """The mesh without replicas that fits with the smallest sequence degree."""
        return next(
            (mesh for mesh in self.meshes(world_size) if self.fits(mesh) and self.divides(mesh)), None
        )

    def meshes(self, world_size: int) -> Iterator[MeshShape]:
        """One mesh for each number of ranks that a sequence can be split over."""
        for degree in range(1, min(world_size, self.run.row_length) + 1):
            if world_size % degree == 0:
                sequence = self.ulysses_degree(degree, world_size)
                yield MeshShape(shard=world_size // degree, ring=degree // sequence, sequence=sequence)

    def ulysses_degree(self, degree: int, world_size: int) -> int:
        """Largest part of a sequence degree that Ulysses can take within a node."""
        # On several nodes, a group whose size does not divide a node's would straddle two nodes.
        within = self.cluster.ranks_per_node if world_size > self.cluster.ranks_per_node else world_size
        return math.gcd(degree, self.run.model.heads, within)

    def hybrids(self, mesh: MeshShape) -> Iterator[MeshShape]:
        """Hybrid-sharding meshes with replicas on whole nodes that fit, fewest replicas first."""
        for replicate in range(2, mesh.shard + 1):
            if (
                # Whole nodes only: replicas exchange nothing but gradient shards, which suits a slow network.
                mesh.shard % replicate == 0
                and mesh.shard_degree // replicate % self.cluster.ranks_per_node == 0
            ):
                hybrid = replace(mesh, replicate=replicate, shard=mesh.shard // replicate)
                if self.fits(hybrid):
                    yield hybrid

    def bytes(self, mesh: MeshShape) -> int:
        return estimate_memory(replace(self.run, mesh=mesh)).peak

    def fits(self, mesh: MeshShape) -> bool:
        return self.bytes(mesh) <= USABLE * self.cluster.bytes_per_rank

    def divides(self, mesh: MeshShape) -> bool:
        return self.rows_per_step % (mesh.data_degree * self.run.rows_per_batch) == 0

    def refusal(self, world_size: int) -> RopewalkError:
        """Why there is no mesh, and what to change."""
        meshes = list(self.meshes(world_size))
        fitting = [mesh for mesh in meshes if self.fits(mesh)]
        if fitting:
            # The finest split of sequences has the fewest data-parallel groups, hence the smallest multiple.
            mesh = fitting[-1]
            each = mesh.data_degree * self.run.rows_per_batch
            return RopewalkError(
                f"no mesh of {world_size} {_ranks(world_size)} both divides rows_per_step {self.rows_per_step} "
                f"evenly and has enough memory for rows of {self.run.row_length:,} tokens; set rows_per_step to a "
                f"multiple of {each}, which divides evenly over parallel {mesh.setting}"
            )
        # Of meshes that are all too large, the one that comes closest tells how much is missing.
        mesh = min(meshes, key=self.bytes)
        needed, memory = self.bytes(mesh) / 1e9, self.cluster.bytes_per_rank / 1e9
        return DoesNotFit(
            f"rows of {self.run.row_length:,} tokens do not fit on {world_size} {_ranks(world_size)}: even with "
            f"parallel: {mesh.setting}, a rank needs an estimated {needed:,.1f} GB, but has {memory:,.1f} GB, "
            f"of which {USABLE * memory:,.1f} GB are usable; {self.remedy(world_size)}"
        )

    def remedy(self, world_size: int) -> str:
        """Say what would make the run fit, with the smallest change first."""
        run = self.run
        changes = [(run, "")]
        if not run.checkpointing:
            changes.append((replace(run, checkpointing=True), "gradient_checkpointing"))
        if not run.offload:
            names = [*(name for _, name in changes[1:]), "offload_activations"]
            changes.append((replace(run, checkpointing=True, offload=True), " and ".join(names)))
        # Without a change of settings only more ranks can help, and those cost more.
        for changed, name in changes[1:]:
            if replace(self, run=changed).first(world_size) is not None:
                return f"set {name} to true"
        spared = replace(changes[-1][0], tile=run.tile or TILE)
        settings = [name for _, name in changes[1:]][-1:]
        for changed, name in (
            (spared, f"tiled_mlp to {TILE:,}"),
            (replace(spared, offload_optimizer=run.trained is None), "offload_optimizer to true"),
        ):
            settings.append(name)
            if replace(self, run=changed).first(world_size) is not None:
                shown = [f"{each} to true" if " to " not in each else each for each in settings]
                return f"set {', and '.join(shown)}"
        # Keyed by ranks: a change of settings is named only if it needs fewer ranks than those before it.
        ways: dict[int, str] = {}
        for changed, name in changes:
            ranks = replace(self, run=changed).least_ranks(world_size)
            if ranks is not None and all(ranks < other for other in ways):
                ways[ranks] = f"{ranks:,} ranks" + (f" with {name}" if name else "")
        return (
            f"use {', or '.join(ways.values())}" if ways else f"even {MOST_RANKS:,} ranks would not suffice"
        )

    def least_ranks(self, world_size: int) -> int | None:
        """Smallest number of ranks that fits among twice, four times, ... the present number; None if none does."""
        ranks = 2 * world_size
        while ranks <= MOST_RANKS:
            if self.first(ranks) is not None:
                return ranks
            ranks *= 2
        return None


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _fitted(shape: MeshShape, world_size: int) -> MeshShape:
    """Adapt a mesh to another number of ranks, changing the shard degree first, then replicas, then Ulysses."""
    # Change as little as possible: the shard degree alone, then also the replicas, then Ulysses too.
    for kept in (shape, replace(shape, replicate=1)):
        others = kept.replicate * kept.sequence_degree
        if world_size % others == 0:
            return replace(kept, shard=world_size // others)
    sequence = math.gcd(shape.sequence, world_size)
    return MeshShape(shard=world_size // sequence, sequence=sequence)
