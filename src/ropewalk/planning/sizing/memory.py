"""Memory of one rank by part: what is always there, what one pass keeps, and the moments at which most is held.

Each formula counts the tensors that autograd and FSDP2 hold at that moment in transformers' Llama or Mixtral layer with
the ``varlen`` engine; what the allocator loses and what kernels borrow is left to the margin of the mesh chooser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ropewalk.parallel.mesh import sharded_dimension
from ropewalk.parallel.ring.traffic import heads_of_an_exchange
from ropewalk.parallel.ulysses import replicated_kv_heads
from ropewalk.planning.sizing.model_shape import MASTER_BYTES, ModelShape, ShardedRun, numel

COPY_BYTES = 4 * 8 + 2 * MASTER_BYTES
"""Of one copy of a token for an expert: four indices, and its weight before and after the copies are put in order."""
LOGITS_BYTES = 256 * 2**20
"""Float32 logits held at once by the chunked loss; a test holds it equal to the loss's own."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: this rank's float32 shard.
        gradients: float32, of the same size.
        moments: AdamW's two, float32.
        root: embedding, last norm and head, gathered from the forward to the end of the backward, with the gradient
            of the head.
        gathered: the layers that FSDP holds whole, with one gradient and one message of gradients.
        activations: what the layers keep for the backward; their inputs alone under checkpointing.
        layer: one layer's own tensors and gradients in its backward, exchanges of heads included.
        ring: keys and values that one layer has received from a ring, with gradients and copies of those of one
            exchange.
        loss: logits of one chunk with their gradient, and the last hidden states.
        root_reduction: the root's whole gradient, and its message in float32, at the end of a backward.
        host: in the CPU's memory: offloaded layer inputs.
    """

    parameters: int
    gradients: int
    moments: int
    root: int
    gathered: int
    activations: int
    layer: int
    ring: int
    loss: int
    root_reduction: int
    host: int

    @property
    def states(self) -> int:
        """What is there at every moment."""
        return self.parameters + self.gradients + self.moments

    @property
    def moments_of_most(self) -> dict[str, int]:
        """Bytes at each moment that may be the peak."""
        return {
            "a layer's backward": self.states
            + self.root
            + self.gathered
            + self.activations
            + self.layer
            + self.ring,
            "the loss": self.states + self.root + self.activations + self.loss,
            "the root's reduction": self.states + self.root + self.root_reduction,
            # AdamW's update over lists of tensors makes one temporary for each.
            "the update": self.states + self.parameters,
        }

    @property
    def peak(self) -> int:
        """The most at any moment, on the device."""
        return max(self.moments_of_most.values())


def estimate_memory(run: ShardedRun) -> Memory:
    """Estimate one rank's memory by part.

    Args:
        run: model, mesh, row length and what is kept.

    Returns:
        Bytes; parts do not all peak at once, see :attr:`Memory.moments_of_most`.
    """
    shape, ranks, width = run.model, run.mesh.shard_degree, run.compute_bytes
    shard = sum(numel(sizes, ranks) for sizes in shape.units) // ranks * MASTER_BYTES
    root, gathered, reduction = _gathered(run)
    inputs = run.places * shape.hidden * width
    received, exchange = _ring_bytes(run)
    if not run.checkpointing:
        kept = shape.layers * run.places * (_saved(shape, run.mesh.sequence, width) + shape.hidden * width)
        kept += shape.layers * received
    else:
        # Offloaded: the one in use, and the one on its way.
        kept = inputs * (min(2, shape.layers) if run.offload else shape.layers)
    return Memory(
        parameters=shard,
        gradients=shard,
        moments=2 * shard,
        root=root,
        gathered=gathered,
        activations=kept,
        layer=run.places * _layer_bytes(run),
        ring=exchange + (received if run.checkpointing else 0),
        loss=_loss_bytes(run),
        root_reduction=reduction,
        host=shape.layers * inputs if run.offload else 0,
    )


def _gathered(run: ShardedRun) -> tuple[int, int, int]:
    """Bytes of the root, of layers, and of the root's reduction at the end.

    Three layers in compute dtype: one in use, the next one's message, and the parameters it is copied into; one
    gradient in compute dtype, and the float32 messages of two, of which one is on its way.
    """
    shape, ranks, width = run.model, run.mesh.shard_degree, run.compute_bytes
    if run.mesh.world_size == 1:
        # Nothing is gathered; parameters in a narrower dtype than their masters are a whole copy, as are gradients.
        return 0, (2 * width * shape.parameters if width < MASTER_BYTES else 0), 0
    layer, root = numel(shape.layer_sizes, ranks), numel(shape.root_sizes, ranks)
    messages = 2 * MASTER_BYTES * layer
    # What is not cut in its first dimension is put in order once more, and so is its gradient.
    messages += (
        2 * width * sum(math.prod(size) for size in shape.layer_sizes if sharded_dimension(size, ranks))
    )
    return (root + shape.head_parameters) * width, 4 * width * layer + messages, root * (width + MASTER_BYTES)


def _saved(shape: ModelShape, sequence: int, width: int) -> int:
    """Bytes a token that autograd saves of one layer, its input left out."""
    query, kv = _head_widths(shape, sequence)
    return (
        2 * _norm_bytes(shape, width)
        # Queries, keys and values as exchanged, and gathered into runs; outputs of the kernel and of the exchange.
        + (2 * (query + 2 * kv) + 2 * query) * width
        # The log-sum-exp of each head, float32.
        + 4 * shape.heads
        + _saved_by_mlp(shape, width)
    )


def _saved_by_mlp(shape: ModelShape, width: int) -> int:
    """Bytes a token of a layer's MLP, or of its experts if they save more.

    Experts come as transformers' grouped products: a token goes to ``top_k`` of them, as a copy each.
    """
    # Gate, its activation, up, and their product.
    dense = 4 * shape.intermediate * width if shape.dense_layers else 0
    experts = shape.experts
    if experts is None:
        return dense
    # The same of each copy, its hidden state, and what it becomes; the order of copies and back, experts and weights.
    copies = experts.per_token * ((4 * experts.intermediate + 2 * shape.hidden) * width + COPY_BYTES)
    # Beside them the shared MLP, with its result where that is weighted; probabilities in float32.
    shared = (4 * experts.shared + shape.hidden * int(experts.shared_gate)) * width
    return max(dense, copies + shared + experts.number * MASTER_BYTES)


def _backward_of_mlp(shape: ModelShape, width: int) -> int:
    """Bytes a token in the middle of the backward of a layer's MLP or experts, beyond what is saved."""
    # The product's gradient, and those of the activation and of up; the saved product is free by then.
    dense = 2 * shape.intermediate * width if shape.dense_layers else 0
    experts = shape.experts
    if experts is None:
        return dense
    # Gradients of all copies, weighted in float32, in both orders, and without the weights.
    copies = experts.per_token * shape.hidden * (2 * MASTER_BYTES + width)
    return max(dense, copies, 2 * (experts.per_token * experts.intermediate + experts.shared) * width)


def _layer_bytes(run: ShardedRun) -> int:
    """Bytes a token of one layer's backward: of what is saved, too, where it has just been computed again."""
    shape, sequence, width = run.model, run.mesh.sequence, run.compute_bytes
    query, kv = _head_widths(shape, sequence)
    mlp, free = _backward_of_mlp(shape, width), _saved_by_mlp(shape, width)
    # Gradients of q, k and v: from the kernel, out of runs, and through the exchange; of the output, before and after.
    exchanges = 3 if sequence > 1 else 2
    attention = (exchanges * (query + 2 * kv) + 2 * query) * width - free
    # In the kernel: gradients of the output before and after the exchange, and those that it gives.
    kernel = (2 * query + query + 2 * kv) * width - free + _flash_bytes(shape, sequence, width)
    stream = 2 * shape.hidden * width
    return (
        stream + max(mlp, attention, kernel, 0) + (_saved(shape, sequence, width) if run.checkpointing else 0)
    )


def _flash_bytes(shape: ModelShape, sequence: int, width: int) -> int:
    """Bytes a token that FlashAttention 2 allocates in its backward beside its results; it takes 16 bits alone.

    Float32 sums of the queries' gradients, in rows of whole multiples of 32 or 64, and one float32 a head, both with
    128 rows more for each document; documents are taken for that long on average at least. Keys' and values' gradients
    of every query head, where heads share them.

    Source: torch's flash_api.cpp, ``mha_varlen_bwd``: ``dq_accum``, ``softmax_d``, ``dk_expanded``, ``dv_expanded``.
    """
    if width == MASTER_BYTES:
        return 0
    query, kv = _head_widths(shape, sequence)
    multiple = 32 if shape.head_dim <= 128 else 64
    rounded = -(-shape.head_dim // multiple) * multiple
    sums = 2 * shape.heads * (rounded + 1) * MASTER_BYTES
    return sums + (2 * query * width if kv < query else 0)


def _ring_bytes(run: ShardedRun) -> tuple[int, int]:
    """Bytes of the keys and values that autograd keeps of a layer, and the most that one exchange's backward needs.

    For one causal document a row in the zigzag cut: a rank's last piece sees up to the whole row, and its first piece
    has its own copy of what it sees; together that is never more than a row and one piece. Packed documents mostly
    need less; a long one that is dealt out by cost among short ones may need up to about twice as much.
    """
    if run.mesh.ring == 1:
        return 0, 0
    shape, sequence, width = run.model, run.mesh.sequence, run.compute_bytes
    kv_heads = replicated_kv_heads(shape.kv_heads, sequence) // sequence
    tokens = run.rows_per_batch * run.row_length
    # A piece is half of the places of a ring rank.
    slots = tokens + -(-run.places * sequence // 2)
    key = 2 * shape.head_dim * width
    heads = heads_of_an_exchange(tokens, kv_heads, key)
    # Their gradients, and in 16 bits FlashAttention's of every query head, where heads share keys. Behind it gradients
    # of keys and values side by side, those to be sent, and for up to half of the keys the copies and their sums.
    per_key = shape.heads // (kv_heads * sequence)
    kernel = 1 + (per_key if per_key > 1 and width < MASTER_BYTES else 0)
    return slots * kv_heads * key, slots * heads * key * max(kernel, 4)


def _loss_bytes(run: ShardedRun) -> int:
    """Logits, log-probabilities and gradient of a chunk in float32, and logits with gradient in compute dtype; one
    more gradient of the head; the last norm with the gradients around it."""
    shape, width = run.model, run.compute_bytes
    chunk = min(run.places, max(1, LOGITS_BYTES // (MASTER_BYTES * shape.vocab)))
    narrow = 2 * width if width < MASTER_BYTES else 0
    logits = chunk * shape.vocab * (3 * MASTER_BYTES + narrow)
    hidden = run.places * (_norm_bytes(shape, width) + 2 * shape.hidden * width)
    return logits + shape.head_parameters * width + hidden


def _norm_bytes(shape: ModelShape, width: int) -> int:
    """Bytes a token that RMSNorm saves: the float32 input, the narrow normalised one, and its output."""
    return shape.hidden * ((MASTER_BYTES if width < MASTER_BYTES else 0) + 2 * width)


def _head_widths(shape: ModelShape, sequence: int) -> tuple[int, int]:
    """Elements a token of all queries, and of all keys, as often as Ulysses repeats them."""
    return shape.heads * shape.head_dim, replicated_kv_heads(shape.kv_heads, sequence) * shape.head_dim
