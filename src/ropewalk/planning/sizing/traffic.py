"""Count the bytes that one rank sends to others.

Counts are exact, except for packed sequences on a context-parallel ring, where they are an upper bound. Reading a
rank's own part from memory is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropewalk.parallel.mesh import MeshShape
from ropewalk.parallel.ring.traffic import packed_ring_keys
from ropewalk.parallel.ulysses import check_heads, replicated_kv_heads
from ropewalk.planning.sizing.model_shape import MASTER_BYTES, ModelShape, ShardedRun, Sizes, numel


@dataclass(frozen=True)
class Communication:
    """Bytes that the busiest rank sends in a step.

    Attributes:
        fsdp: parameter all-gathers and gradient reduce-scatters over the shard ranks.
        replicas: gradient all-reduces over replicas (hybrid sharding).
        ulysses: queries, keys, values and outputs in the all-to-alls of Ulysses.
        ring: keys and values, and their gradients, between the ranks of a context-parallel ring.
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
    """Count the bytes that a rank sends in a step. Every micro-batch gathers and reduces again.

    Args:
        run: model, mesh and batch of one pass.
        micro_batches: passes per step.
        document_length: length in tokens of the documents packed into each sequence, for which the ring's bytes are an
            upper bound. None for one causal document per sequence.
    """
    shape, mesh = run.model, run.mesh
    places, width, again = run.places, run.compute_bytes, run.checkpointing
    if document_length is None:
        # The first and last rank are the extremes: bytes are linear in the rank.
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
    """Bytes that a rank sends for FSDP in one pass.

    Layers are gathered in the forward and again in the backward. The root stays gathered in between, so it is gathered
    once. Gradients are reduce-scattered in float32.

    Args:
        units: parameter sizes of each FSDP unit, the root first. FSDP2 pads first dimensions to a multiple of the
            ranks.
        mesh: parameters are sharded over its ``shard_degree`` ranks.
        dtype_bytes: bytes per element of gathered parameters.

    Returns:
        Bytes. In an all-gather, a rank sends its shard to every other rank; in a reduce-scatter, it sends every other
        rank that rank's part of the gradient.
    """
    ranks = mesh.shard_degree
    root, *layers = (numel(sizes, ranks) // ranks for sizes in units)
    gathered = root + 2 * sum(layers)
    return (ranks - 1) * (gathered * dtype_bytes + (root + sum(layers)) * MASTER_BYTES)


def replica_bytes(units: Sequence[Sizes], mesh: MeshShape) -> int:
    """Bytes that a rank sends in one pass to all-reduce its float32 gradient shard over R replicas.

    A bandwidth-optimal all-reduce sends 2 (R - 1)/R of the shard; the result is rounded up.
    """
    shard = sum(numel(sizes, mesh.shard_degree) for sizes in units) // mesh.shard_degree
    return -(-2 * (mesh.replicate - 1) * shard * MASTER_BYTES // mesh.replicate)


def ulysses_bytes(shape: ModelShape, degree: int, places: int, dtype_bytes: int, checkpointing: bool) -> int:
    """Bytes that a rank sends for Ulysses in one pass over all layers.

    One all-to-all carries q, k and v and another the output: in the forward, in the recomputation, and for the
    gradients in the backward. Each time they carry ``(P - 1)/P · places · (H + K')·(D + D')`` elements, with
    K' = lcm(K, P) key/value heads, D dimensions of keys and D' of values.

    Args:
        shape: dimensions of the model.
        degree: P, the Ulysses degree ``parallel.sequence``.
        places: tokens of one rank: sequences times padded shard length.
        dtype_bytes: bytes per element of activations.
        checkpointing: whether layers are recomputed in the backward.

    Raises:
        EngineError: if P does not divide the heads.
    """
    check_heads(shape.heads, degree)
    heads = shape.heads + replicated_kv_heads(shape.kv_heads, degree)
    once = places * heads // degree * (degree - 1) * (shape.head_dim + shape.value_dim) * dtype_bytes
    return shape.layers * once * (3 if checkpointing else 2)


def ring_pieces(ring: int, rank: int) -> tuple[int, int]:
    """Number of key chunks that a ring rank sends and receives in one pass over a causal document.

    In the zigzag layout, rank i holds chunks i and 2R - 1 - i of 2R. All other ranks attend to the first chunk. The
    ranks below i attend to the second one, because their second chunks come after it.

    Returns:
        Chunks sent, R - 1 + i, and chunks received, 2 (R - 1) - i.
    """
    return ring - 1 + rank, 2 * (ring - 1) - rank


def ring_bytes(
    shape: ModelShape, mesh: MeshShape, places: int, dtype_bytes: int, checkpointing: bool, ring_rank: int
) -> int:
    """Bytes that a ring rank sends in one pass over all layers, for one causal document per sequence.

    The layout is zigzag, which ``auto`` chooses for such documents. The count is exact if all chunks have equal size.
    Packed documents usually need less, because keys that no query attends to are not sent; a layout balanced by cost
    may need more. The maximum is reached if every key goes to every other rank: 6/5 of what the last rank sends here
    with checkpointing, and 4/3 without.

    Keys and values are sent in the forward and in the recomputation. In the backward, the gradients of received keys
    and values are returned in the same dtype. A chunk is half the tokens of a ring rank, and a ring rank has
    ``sequence`` times the tokens of a rank; each of the ``sequence`` ranks sends its K'/P heads.

    Args:
        shape: dimensions of the model.
        mesh: ring and Ulysses degrees.
        places: tokens of one rank: sequences times padded shard length.
        dtype_bytes: bytes per element of keys and values.
        checkpointing: whether layers are recomputed in the backward.
        ring_rank: rank within the ring, from 0.
    """
    if mesh.ring == 1:
        return 0
    # Ulysses replicates key/value heads until its ranks divide them.
    kv_heads = replicated_kv_heads(shape.kv_heads, mesh.sequence)
    # Of half the tokens, rounded up.
    piece = -(-places * kv_heads * (shape.head_dim + shape.value_dim) // 2)
    sent, received = ring_pieces(mesh.ring, ring_rank)
    times = 2 if checkpointing else 1
    return shape.layers * piece * (times * sent + received) * dtype_bytes


def packed_ring_bytes(run: ShardedRun, document_length: int) -> int:
    """Upper bound of the bytes that a ring rank sends in one pass over sequences packed with equal documents.

    The layout is the one that ``auto`` chooses for these documents. The bound ignores where documents start, so a
    document that happens to end at a chunk boundary counts like any other. Documents of unequal lengths may get
    another layout; :func:`ropewalk.parallel.ring.traffic.ring_bytes` counts the bytes of given sequences.

    Args:
        run: model, mesh and batch of one pass.
        document_length: tokens per document. A length above the sequence length means one document per sequence.
    """
    mesh, shape = run.mesh, run.model
    if mesh.ring == 1:
        return 0
    keys = packed_ring_keys(run.row_length, document_length, mesh.ring)
    times = 2 if run.checkpointing else 1
    # A step lasts as long as its busiest rank, and packed documents load ranks unevenly.
    most = max(times * sent + received for sent, received in keys)
    kv_heads = replicated_kv_heads(shape.kv_heads, mesh.sequence) // mesh.sequence
    key_bytes = (shape.head_dim + shape.value_dim) * run.compute_bytes
    return shape.layers * run.rows_per_batch * most * kv_heads * key_bytes
