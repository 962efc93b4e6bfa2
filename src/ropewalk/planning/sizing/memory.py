"""Estimate the memory of one rank by part: parameters and optimizer state, activations, and the peaks of a pass.

Each formula counts the tensors that autograd and FSDP2 hold at that moment in transformers' Llama or Mixtral layer with
the ``varlen`` engine. Allocator fragmentation and kernel workspaces are left to the margin in ``mesh_choice``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ropewalk.parallel.mesh import sharded_dimension
from ropewalk.parallel.ring.traffic import heads_of_an_exchange
from ropewalk.parallel.ulysses import replicated_kv_heads
from ropewalk.planning.sizing.model_shape import MASTER_BYTES, ModelShape, ShardedRun, numel

COPY_BYTES = 4 * 8 + 2 * MASTER_BYTES
"""Bytes per token sent to an expert, besides hidden states: four int64 indices, two float32 copies of its weight."""
LOGITS_BYTES = 256 * 2**20
"""Bytes of float32 logits that the chunked loss holds at once. A test compares it with the loss's own constant."""


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in bytes.

    Attributes:
        parameters: this rank's float32 shard of the parameters; with an adapter, frozen ones in the compute dtype. A
            single rank also keeps trained ones in a narrower compute dtype.
        gradients: float32 gradients of the trained part of that shard.
        moments: AdamW's two float32 moments of that part.
        root: embedding, final norm and output head, gathered from the forward to the end of the backward, with the
            gradient of the head.
        gathered: layers that FSDP has gathered, with one gradient and the buffers of its reduction; on a single rank
            all gradients in a narrower compute dtype.
        activations: tensors that layers save for the backward; only their inputs under checkpointing.
        layer: tensors and gradients of one layer in its backward, including Ulysses exchanges.
        ring: keys and values that one layer received from the context-parallel ring, and what the gradients and copies
            of one exchange need beyond ``layer``.
        loss: logits of one chunk with their gradient, and the last hidden states.
        root_reduction: full gradient of the root and its float32 buffer, at the end of a backward.
        host: offloaded layer inputs in CPU memory.
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
        """Bytes held throughout training: parameters, gradients and moments."""
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
            # AdamW's foreach update makes one temporary per parameter.
            "the update": self.states + self.gradients,
        }

    @property
    def peak(self) -> int:
        """Largest number of bytes on the device at any moment."""
        return max(self.moments_of_most.values())


def estimate_memory(run: ShardedRun) -> Memory:
    """Estimate one rank's memory by part.

    Args:
        run: model, mesh, sequence length, checkpointing and offload.

    Returns:
        Bytes by part. The parts do not all peak at once, see :attr:`Memory.moments_of_most`.
    """
    shape, ranks, width = run.model, run.mesh.shard_degree, run.compute_bytes
    elements = sum(numel(sizes, ranks) for sizes in shape.units) // ranks
    # Under an adapter the model's own weights need no float32 master copy, gradient or moments.
    frozen = 0 if run.trained is None else elements * width
    trained_elements = elements if run.trained is None else -(-run.trained // ranks)
    trained = MASTER_BYTES * trained_elements
    # Several ranks gather such copies from their float32 shards instead.
    narrowed = width * trained_elements if run.mesh.world_size == 1 and width < MASTER_BYTES else 0
    on_host = 4 * trained if run.offload_optimizer else 0
    if run.offload_optimizer:
        # A single rank computes with weights of its own, several gather theirs from CPU memory.
        narrowed, trained = (width * trained_elements if run.mesh.world_size == 1 else 0), 0
    root, gathered, reduction = _gathered(run)
    inputs = run.places * shape.hidden * width
    received, exchange = _ring_bytes(run)
    held, of_mlp, of_attention = _layer_bytes(run)
    layer = held + max(of_mlp, of_attention, 0)
    # The exchange is part of attention's backward, when the MLP's is over.
    exchanging = held + max(of_mlp, of_attention + exchange, 0)
    if not run.checkpointing:
        # Every layer saves its activations, its input and the keys and values it received.
        kept = (
            shape.layers
            * run.places
            * (_saved(shape, run.mesh.sequence, width, run.tile is not None) + shape.hidden * width)
        )
        kept += shape.layers * received
    else:
        # With offload, the device holds the input in use and the one being copied.
        kept = inputs * (min(2, shape.layers) if run.offload else shape.layers)
    return Memory(
        parameters=frozen + trained + narrowed,
        gradients=trained,
        moments=2 * trained,
        root=root,
        gathered=gathered,
        activations=kept,
        layer=layer,
        ring=exchanging - layer + (received if run.checkpointing else 0),
        loss=_loss_bytes(run),
        root_reduction=reduction,
        host=(shape.layers * inputs if run.offload else 0) + on_host,
    )


def _gathered(run: ShardedRun) -> tuple[int, int, int]:
    """Bytes of the gathered root, of the gathered layers, and of the root's reduction at the end of the backward.

    Layers count three times in the compute dtype (the layer in use, the next layer's communication buffer, and the
    parameters it is copied into), plus one gradient in the compute dtype and two float32 reduction buffers, one of
    which is in flight.
    """
    shape, ranks, width = run.model, run.mesh.shard_degree, run.compute_bytes
    if run.mesh.world_size == 1:
        # One rank gathers nothing, but mixed precision makes all gradients in the low precision first.
        trained = shape.parameters if run.trained is None else run.trained
        if run.offload_optimizer:
            # Each gradient leaves as soon as it is made, and the copy of the one before is still on its way.
            return 0, 2 * width * max(map(math.prod, (*shape.layer_sizes, *shape.root_sizes))), 0
        return 0, (width * trained if width < MASTER_BYTES else 0), 0
    layer, root = numel(shape.layer_sizes, ranks), numel(shape.root_sizes, ranks)
    messages = 2 * MASTER_BYTES * layer
    # FSDP2 gathers along the first dimension; tensors sharded along another one are copied into order after the gather,
    # and their gradients before the reduction.
    messages += (
        2 * width * sum(math.prod(size) for size in shape.layer_sizes if sharded_dimension(size, ranks))
    )
    return (root + shape.head_parameters) * width, 4 * width * layer + messages, root * (width + MASTER_BYTES)


def _saved(shape: ModelShape, sequence: int, width: int, tiled: bool = False) -> int:
    """Bytes per token that autograd saves for one layer, without the layer's input."""
    query, kv, output = _head_widths(shape, sequence)
    narrow = 0 if shape.latent is None else shape.latent.width
    return (
        _norm_bytes(2 * shape.hidden + narrow, width)
        # Queries, keys and values after the exchange and after packing; outputs of the kernel and of the exchange.
        + (2 * (query + kv) + 2 * output) * width
        # Float32 log-sum-exp of each head.
        + 4 * shape.heads
        # An MLP in tiles saves its input alone, which is the output of the norm before.
        + (0 if tiled else _saved_by_mlp(shape, width))
    )


def _saved_by_mlp(shape: ModelShape, width: int) -> int:
    """Bytes per token that autograd saves for a layer's MLP, or for its experts if those need more.

    Experts run as transformers' grouped matrix products, which copy each token once per expert that it is sent to.
    """
    # SwiGLU: gate, its activation, up, and their product.
    dense = 4 * shape.intermediate * width if shape.dense_layers else 0
    experts = shape.experts
    if experts is None:
        return dense
    # Per copy: the SwiGLU tensors, the hidden states before and after the expert, and COPY_BYTES.
    copies = experts.copies * ((4 * experts.intermediate + 2 * shape.hidden) * width + COPY_BYTES)
    # The shared experts, whose output is saved only if a gate multiplies it; router probabilities in float32.
    shared = (4 * experts.shared + shape.hidden * int(experts.shared_gate)) * width
    return max(dense, copies + shared + experts.number * MASTER_BYTES)


def _backward_of_mlp(shape: ModelShape, width: int) -> int:
    """Bytes per token at the peak of the backward of a layer's MLP or experts, besides the saved tensors."""
    # The product's gradient, and those of the activation and of up; the saved product is free by then.
    dense = 2 * shape.intermediate * width if shape.dense_layers else 0
    experts = shape.experts
    if experts is None:
        return dense
    # Gradients of all copies: float32 in token order and in expert order, and in the compute dtype without the weights.
    copies = experts.copies * shape.hidden * (2 * MASTER_BYTES + width)
    return max(dense, copies, 2 * (experts.copies * experts.intermediate + experts.shared) * width)


def _layer_bytes(run: ShardedRun) -> tuple[int, int, int]:
    """Bytes of one layer in its backward: throughout, more in the MLP's, and more in attention's.

    Recomputed activations stay throughout. Attention's part is less by what the MLP has freed, and may be negative.
    """
    shape, sequence, width = run.model, run.mesh.sequence, run.compute_bytes
    query, kv, output = _head_widths(shape, sequence)
    mlp, free = run.places * _backward_of_mlp(shape, width), _saved_by_mlp(shape, width)
    if run.tile is not None:
        of_tile = min(run.tile, run.places) * (_saved_by_mlp(shape, width) + _backward_of_mlp(shape, width))
        # The gradient of the input, and the float32 sums of the parameters' gradients with what is passed on.
        sums = numel(shape.layer_sizes, 1) * (MASTER_BYTES + width)
        mlp, free = of_tile + run.places * shape.hidden * width + sums, 0
    # Gradients of q, k and v from the kernel, after unpacking and after the exchange; of the output before and after.
    exchanges = 3 if sequence > 1 else 2
    attention = (exchanges * (query + kv) + 2 * output) * width - free
    # Inside the kernel: gradients of the output before and after the exchange, and the gradients it returns.
    kernel = (2 * output + query + kv) * width - free + _flash_bytes(shape, sequence, width)
    stream = 2 * shape.hidden * width
    held = stream + (_saved(shape, sequence, width, run.tile is not None) if run.checkpointing else 0)
    return run.places * held, mlp, run.places * max(attention, kernel)


def _flash_bytes(shape: ModelShape, sequence: int, width: int) -> int:
    """Bytes per token that FlashAttention 2 allocates in its backward besides its results.

    It allocates float32 accumulators of the query gradients, with head_dim rounded up to a multiple of 32 or 64, and
    one float32 per head. Both have 128 more rows per document; the estimate assumes documents of at least 128 tokens
    on average. With grouped-query attention, it also allocates key and value gradients for every query head.

    Source: torch's flash_api.cpp, ``mha_varlen_bwd``: ``dq_accum``, ``softmax_d``, ``dk_expanded``, ``dv_expanded``.
    """
    # FlashAttention has no kernel for float32 nor for values of another width, so these never reach it.
    if width == MASTER_BYTES or shape.value_dim != shape.head_dim:
        return 0
    query, kv, _ = _head_widths(shape, sequence)
    multiple = 32 if shape.head_dim <= 128 else 64
    rounded = -(-shape.head_dim // multiple) * multiple
    sums = 2 * shape.heads * (rounded + 1) * MASTER_BYTES
    return sums + (2 * query * width if kv < 2 * query else 0)


def _ring_bytes(run: ShardedRun) -> tuple[int, int]:
    """Bytes of keys and values that autograd saves for a layer, and the peak of one exchange's backward.

    The formula is for one causal document per sequence in the zigzag layout: a rank's last chunk attends to up to the
    whole sequence, and its first chunk has its own copy of its keys, so both need at most a sequence and one chunk.
    Packed documents usually need less. A long document balanced by cost among short ones may need about twice as much.
    """
    if run.mesh.ring == 1:
        return 0, 0
    shape, sequence, width = run.model, run.mesh.sequence, run.compute_bytes
    kv_heads = replicated_kv_heads(shape.kv_heads, sequence) // sequence
    tokens = run.rows_per_batch * run.row_length
    # A chunk is half of the tokens of a ring rank.
    slots = tokens + -(-run.places * sequence // 2)
    key = (shape.head_dim + shape.value_dim) * width
    heads = heads_of_an_exchange(tokens, kv_heads, key)
    # Key and value gradients; in 16 bits with grouped-query attention also FlashAttention's for every query head.
    # After the kernel: concatenated gradients, send buffers, and for up to half of the keys copies and their sums.
    per_key = shape.heads // (kv_heads * sequence)
    kernel = 1 + (per_key if per_key > 1 and width < MASTER_BYTES else 0)
    return slots * kv_heads * key, slots * heads * key * max(kernel, 4)


def _loss_bytes(run: ShardedRun) -> int:
    """Bytes of the loss: one chunk's logits, log-probabilities and gradient, the head's gradient, and the final norm.

    The chunk's tensors exist in float32; in mixed precision, the logits and their gradient also in the compute dtype.
    """
    shape, width = run.model, run.compute_bytes
    # As models.losses cuts them: a fixed number of bytes of float32 logits, whatever the vocabulary.
    chunk = min(run.places, max(1, LOGITS_BYTES // (MASTER_BYTES * shape.vocab)))
    narrow = 2 * width if width < MASTER_BYTES else 0
    logits = chunk * shape.vocab * (3 * MASTER_BYTES + narrow)
    hidden = run.places * (_norm_bytes(shape.hidden, width) + 2 * shape.hidden * width)
    # The gradient of the head, in float32 while it is summed over chunks, and that of a chunk.
    gradient = shape.head_parameters * (width + (MASTER_BYTES if chunk < run.places else 0))
    return logits + gradient + hidden


def _norm_bytes(elements: int, width: int) -> int:
    """Bytes that RMSNorm saves: the float32 input, the low-precision normalised input, and the output."""
    return elements * ((MASTER_BYTES if width < MASTER_BYTES else 0) + 2 * width)


def _head_widths(shape: ModelShape, sequence: int) -> tuple[int, int, int]:
    """Elements per token of all query heads; of all keys and values, with those that Ulysses replicates; of outputs."""
    kv_heads = replicated_kv_heads(shape.kv_heads, sequence)
    return (
        shape.heads * shape.head_dim,
        kv_heads * (shape.head_dim + shape.value_dim),
        shape.heads * shape.value_dim,
    )
