"""Check that a mesh fits the ranks, attention heads and sequences."""

from __future__ import annotations

import math
from dataclasses import replace

from ropewalk.errors import RopewalkError
from ropewalk.parallel.mesh import MeshShape
from ropewalk.parallel.ulysses import check_heads


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
