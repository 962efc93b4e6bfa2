"""choose_mesh: what ``parallel: auto`` takes; check_mesh: whether a mesh suits ranks, heads and rows."""

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
"""Share of a device's memory that an estimate may fill; the rest is the allocator's and the kernels'."""
WORTH = 0.01
"""Least share of the expected time that replicas must save."""
MOST_RANKS = 2**16
"""No more are proposed to someone whose ranks do not suffice."""


def check_mesh(
    shape: MeshShape,
    world_size: int,
    num_heads: int,
    row_length: int,
    rows_per_step: int,
    rows_per_batch: int,
) -> None:
    """Raise if a mesh cannot train these rows, before anything loads.

    Args:
        shape: the degrees.
        world_size: ranks that were started.
        num_heads: query heads of the model.
        row_length: tokens.
        rows_per_step, rows_per_batch: of the stage.

    Raises:
        RopewalkError: naming the value that does not suit, and one that would.
    """
    if shape.world_size != world_size:
        raise RopewalkError(
            f"parallel {shape} makes {shape.world_size} {_ranks(shape.world_size)}, and {world_size} "
            f"{'was' if world_size == 1 else 'were'} started; {_fitted(shape, world_size)} would do"
        )
    check_heads(num_heads, shape.sequence)
    if rows_per_batch < 1:
        raise RopewalkError(f"rows_per_batch must be 1 or more, got {rows_per_batch}")
    if row_length < shape.sequence_degree:
        raise RopewalkError(
            f"a row of {row_length} tokens cannot be cut over {shape.sequence_degree} ranks (parallel.ring x "
            f"parallel.sequence); use at most {row_length}"
        )
    each = shape.data_degree * rows_per_batch
    if rows_per_step < 1 or rows_per_step % each:
        below, above = rows_per_step // each * each, (max(rows_per_step, 0) // each + 1) * each
        choice = f"{below} or {above}" if below > 0 else f"{above}"
        raise RopewalkError(
            f"rows_per_step {rows_per_step} is not a multiple of {each}, which is {shape.data_degree} groups of ranks "
            f"with rows_per_batch {rows_per_batch}; use {choice}"
        )


def choose_mesh(run: ShardedRun, rows_per_step: int, world_size: int, cluster: Cluster = H100) -> MeshShape:
    """The mesh that cuts rows no finer than it must.

    The least number of ranks a row whose estimated memory fits in 90 % of a rank's, and for which the rows of a step
    divide over the groups of ranks. Ulysses comes before the ring, as far as it divides the heads and stays within a
    node. Parameters are sharded over all ranks, unless groups of whole nodes can hold replicas and a step is expected
    to take at least 1 % less time then.

    Args:
        run: one pass of the run; its mesh has no meaning yet.
        rows_per_step: of the stage.
        world_size: ranks of the run.
        cluster: how many of them share a node, their memory, and speeds for the choice of hybrid sharding alone.

    Raises:
        RopewalkError: if no mesh suits, with what would.
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
            f"rows_per_step {rows_per_step} is not a multiple of rows_per_batch {rows_per_batch}"
        )
    search = _Search(run, rows_per_step, cluster)
    found = search.first(world_size)
    if found is None:
        raise RopewalkError(search.refusal(world_size))

    def seconds(mesh: MeshShape) -> float:
        return estimate_step(replace(run, mesh=mesh), rows_per_step, cluster).seconds

    # min takes the first of equals: the one with the fewest replicas.
    hybrid = min(search.hybrids(found), key=seconds, default=found)
    return hybrid if seconds(hybrid) < (1 - WORTH) * seconds(found) else found


@dataclass(frozen=True)
class _Search:
    """Meshes for a run whose own mesh is not set yet."""

    run: ShardedRun
    rows_per_step: int
    cluster: Cluster

    def first(self, world_size: int) -> MeshShape | None:
        """Without replicas, of the least sequence degree."""
        return next(
            (mesh for mesh in self.meshes(world_size) if self.fits(mesh) and self.divides(mesh)), None
        )

    def meshes(self, world_size: int) -> Iterator[MeshShape]:
        """One for each number of ranks that a row can be cut over, ascending; one rank for recurrent layers."""
        most = min(world_size, self.run.row_length) if self.run.model.rows_divide else 1
        for degree in range(1, most + 1):
            if world_size % degree == 0:
                sequence = self.ulysses_degree(degree, world_size)
                yield MeshShape(shard=world_size // degree, ring=degree // sequence, sequence=sequence)

    def ulysses_degree(self, degree: int, world_size: int) -> int:
        """The most of a sequence degree that exchanges heads within a node."""
        # On several nodes a group that does not divide a node would straddle two.
        within = self.cluster.ranks_per_node if world_size > self.cluster.ranks_per_node else world_size
        return math.gcd(degree, self.run.model.heads, within)

    def hybrids(self, mesh: MeshShape) -> Iterator[MeshShape]:
        """Replicas of whole nodes that fit, the fewest first."""
        for replicate in range(2, mesh.shard + 1):
            if (
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

    def refusal(self, world_size: int) -> str:
        """Why there is none, and what would change that."""
        meshes = list(self.meshes(world_size))
        whole = (
            ""
            if self.run.model.rows_divide
            else ", and no rank can take a part of one: recurrent layers need it whole"
        )
        fitting = [mesh for mesh in meshes if self.fits(mesh)]
        if fitting:
            mesh = fitting[-1]
            each = mesh.data_degree * self.run.rows_per_batch
            return (
                f"rows_per_step {self.rows_per_step} divides over no mesh of {world_size} {_ranks(world_size)} that "
                f"rows of {self.run.row_length} tokens fit on{whole}; use a multiple of {each} for {mesh}"
            )
        mesh = min(meshes, key=self.bytes)
        memory = self.cluster.bytes_per_rank / 1e9
        return (
            f"rows of {self.run.row_length} tokens do not fit on {world_size} {_ranks(world_size)}: {mesh} needs an "
            f"estimated {self.bytes(mesh) / 1e9:.0f} GB a rank, where {USABLE * memory:.0f} of "
            f"{memory:.0f} may be used{whole}; {self.remedy(world_size)}"
        )

    def remedy(self, world_size: int) -> str:
        """What would do, with the least change first."""
        run = self.run
        changes = [(run, "")]
        if not run.checkpointing:
            changes.append((replace(run, checkpointing=True), "gradient checkpointing"))
        if not run.offload:
            changes.append((replace(run, checkpointing=True, offload=True), "offloaded layer inputs"))
        # As things are only more ranks can help, and they cost more than a change of settings.
        for changed, name in changes[1:]:
            if replace(self, run=changed).first(world_size) is not None:
                return f"{name} would do"
        ways: dict[int, str] = {}
        for changed, name in changes:
            ranks = replace(self, run=changed).least_ranks(world_size)
            if ranks is not None and all(ranks < other for other in ways):
                ways[ranks] = f"{ranks} ranks" + (f" with {name}" if name else "")
        return f"{' or '.join(ways.values())} would do" if ways else f"{MOST_RANKS} ranks would not do either"

    def least_ranks(self, world_size: int) -> int | None:
        """The least of twice, four times, ... as many that would do."""
        ranks = 2 * world_size
        while ranks <= MOST_RANKS:
            if self.first(ranks) is not None:
                return ranks
            ranks *= 2
        return None


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _fitted(shape: MeshShape, world_size: int) -> MeshShape:
    """A mesh like this one for another number of ranks: the shard degree gives way first, then replicas, then the
    sequence group."""
    for kept in (shape, replace(shape, replicate=1)):
        others = kept.replicate * kept.sequence_degree
        if world_size % others == 0:
            return replace(kept, shard=world_size // others)
    sequence = math.gcd(shape.sequence, world_size)
    return MeshShape(shard=world_size // sequence, sequence=sequence)
