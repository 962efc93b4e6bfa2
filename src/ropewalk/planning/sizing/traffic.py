"""Bytes that one rank sends to others: exact, but for packed rows around a ring, which have a bound.

Reading a rank's own part from memory is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.parallel.mesh import MeshShape
from ropewalk.parallel.ring.traffic import heads_of_an_exchange, packed_ring_keys
from ropewalk.parallel.ulysses import check_heads, replicated_kv_heads
from ropewalk.planning.sizing.model_shape import MASTER_BYTES, ModelShape, ShardedRun, Sizes, numel


@dataclass(frozen=True)
class Communication:
    """Bytes that the busiest rank sends in a step.

    Attributes:
        fsdp: parameters gathered and gradients reduced over the ranks that parameters are sharded over.
        replicas: gradients summed over replicas (hybrid sharding).
        ulysses: queries, keys, values and outputs between ranks that exchange heads.
        ring: keys and values, and their gradients, between the ranks of a ring.
    """

    fsdp: int
    replicas: int
    ulysses: int
    ring: int

    @property
    def total(self) -> int:
        return self.fsdp + self.replicas + self.ulysses + self.ring


def step_communication(
    run: ShardedRun, micro_batches: int = 1, document_length: int | None = None
) -> Communication:
    """All that a rank sends in a step of so many passes; each of them gathers and reduces anew.

    Args:
        run: what one pass does.
        micro_batches: passes of a step.
        document_length: rows are packed with documents of this length, for which the ring's bytes are a bound. None
            for one causal document a row.
    """
    shape, mesh = run.model, run.mesh
    places, width, again = run.places, run.compute_bytes, run.checkpointing
    if document_length is None:
        ring = max(ring_bytes(shape, mesh, places, width, again, rank) for rank in {0, mesh.ring - 1})
    else:
        ring = packed_ring_bytes(run, document_length)
    return Communication(
        micro_batches * fsdp_bytes(shape.units, mesh, width),
        micro_batches * replica_bytes(shape.units, mesh),
        micro_batches * ulysses_bytes(shape, mesh.sequence, places, width, again),
        micro_batches * ring,
    )


def fsdp_bytes(units: Sequence[Sizes], mesh: MeshShape, dtype_bytes: int) -> int:
    """Sent by a rank in one pass: every layer is gathered in the forward and again in the backward, the root, which
    is kept in between, once; every gradient is reduced and scattered in float32.

    Args:
        units: sizes of each FSDP unit's parameters, the root first; FSDP2 pads first dimensions to a multiple of the
            ranks.
        mesh: parameters are sharded over its ``shard_degree`` ranks.
        dtype_bytes: of gathered parameters.

    Returns:
        Bytes. A rank sends its shard to each of the others (all-gather), and each of the others its part of the
        gradient (reduce-scatter).
    """
    ranks = mesh.shard_degree
    root, *layers = (numel(sizes, ranks) // ranks for sizes in units)
    gathered = root + 2 * sum(layers)
    return (ranks - 1) * (gathered * dtype_bytes + (root + sum(layers)) * MASTER_BYTES)


def replica_bytes(units: Sequence[Sizes], mesh: MeshShape) -> int:
    """Sent by a rank in one pass to sum a shard's float32 gradient over replicas: 2 (R - 1)/R of it, as every
    all-reduce that moves least, rounded up."""
    shard = sum(numel(sizes, mesh.shard_degree) for sizes in units) // mesh.shard_degree
    return -(-2 * (mesh.replicate - 1) * shard * MASTER_BYTES // mesh.replicate)


def ulysses_bytes(shape: ModelShape, degree: int, places: int, dtype_bytes: int, checkpointing: bool) -> int:
    """Sent by a rank in one pass over all layers: q, k and v in one all-to-all, the output in another, in the forward,
    in the recomputation, and their gradients in the backward.

    ``(P - 1)/P · places · (2·H·D + 2·K'·D)`` elements each time, with K' = lcm(K, P) key/value heads.

    Args:
        shape: the model's.
        degree: P, ``parallel.sequence``.
        places: of one rank, rows times padded shard length.
        dtype_bytes: of activations.
        checkpointing: whether the forward of a layer is computed again.

    Raises:
        EngineError: if P does not divide the heads.
    """
    check_heads(shape.heads, degree)
    heads = 2 * shape.heads + 2 * replicated_kv_heads(shape.kv_heads, degree)
    once = places * heads // degree * (degree - 1) * shape.head_dim * dtype_bytes
    return shape.layers * once * (3 if checkpointing else 2)


def ring_pieces(ring: int, rank: int) -> tuple[int, int]:
    """Pieces of keys that a ring rank sends and receives in one pass over a causal document.

    The zigzag cut: rank i holds pieces i and 2R - 1 - i of 2R. The first is seen by all others, the second by the
    ranks below i, whose second pieces stand behind it.

    Returns:
        Pieces sent: R - 1 + i; received: 2 (R - 1) - i.
    """
    return ring - 1 + rank, 2 * (ring - 1) - rank


def ring_bytes(
    shape: ModelShape, mesh: MeshShape, places: int, dtype_bytes: int, checkpointing: bool, ring_rank: int
) -> int:
    """Sent by a ring rank in one pass over all layers, for one causal document a row in the zigzag cut, which
    ``auto`` takes for it: exact where pieces are equal.

    Other documents mostly need less, since keys that no query sees are not sent, but not always: a cut by cost may
    send more. At most every key goes to every other rank, which is 6/5 of what the last rank sends here with
    checkpointing, and 4/3 without.

    Keys and values go out in the forward and in the recomputation; in the backward the gradients of those received go
    back, in the same dtype. A piece is half the places of a ring rank, which are ``sequence`` times those of a rank;
    each of the ``sequence`` ranks sends its K'/P heads of them.

    Args:
        shape: the model's.
        mesh: ring and sequence degrees.
        places: of one rank, rows times padded shard length.
        dtype_bytes: of keys and values.
        checkpointing: whether the forward of a layer is computed again.
        ring_rank: from 0.
    """
    if mesh.ring == 1:
        return 0
    kv_heads = replicated_kv_heads(shape.kv_heads, mesh.sequence)
    piece = -(-places * kv_heads * 2 * shape.head_dim // 2)
    sent, received = ring_pieces(mesh.ring, ring_rank)
    times = 2 if checkpointing else 1
    return shape.layers * piece * (times * sent + received) * dtype_bytes


def ring_exchanges(run: ShardedRun) -> int:
    """Messages in which a ring rank gets the keys and values of one layer, some heads in each."""
    shape, sequence = run.model, run.mesh.sequence
    kv_heads = replicated_kv_heads(shape.kv_heads, sequence) // sequence
    key_bytes = 2 * shape.head_dim * run.compute_bytes
    return -(-kv_heads // heads_of_an_exchange(run.rows_per_batch * run.row_length, kv_heads, key_bytes))


def packed_ring_bytes(run: ShardedRun, document_length: int) -> int:
    """The most that a ring rank sends in one pass over rows of equal documents that do not see each other.

    The cut is the one that ``auto`` takes for these documents; where in the row they start is not used, so that
    documents which happen to end where a piece does send no less than others. Documents of various lengths may need
    another cut: :func:`ropewalk.parallel.ring.traffic.ring_bytes` has the bytes of rows that are there.

    Args:
        run: what one pass does.
        document_length: tokens; one document a row if that is longer than a row.
    """
    mesh, shape = run.mesh, run.model
    if mesh.ring == 1:
        return 0
    keys = packed_ring_keys(run.row_length, document_length, mesh.ring)
    times = 2 if run.checkpointing else 1
    most = max(times * sent + received for sent, received in keys)
    kv_heads = replicated_kv_heads(shape.kv_heads, mesh.sequence) // mesh.sequence
    return shape.layers * run.rows_per_batch * most * kv_heads * 2 * shape.head_dim * run.compute_bytes
