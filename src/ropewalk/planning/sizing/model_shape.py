"""ModelShape: the numbers of a decoder that memory, communication and time follow from; and a run on a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ropewalk.errors import RopewalkError
from ropewalk.models.config import ModelConfig
from ropewalk.parallel.mesh import MeshShape

MASTER_BYTES = 4
"""Parameters, gradients and moments of a sharded run are float32."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

Sizes = tuple[tuple[int, ...], ...]
"""Sizes of the parameters of one FSDP unit."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with a gated MLP and two norms a layer, no biases: Llama, Mistral and their like.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads, kv_heads: query heads, and key/value heads.
        head_dim: dimensions of a head, of values too.
        vocab: rows of the embedding.
        tied: whether the head is the embedding.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RopewalkError(f"{name} of a model must be a whole number from 1 on, got {value!r}")

    @classmethod
    def from_config(cls, config: ModelConfig) -> ModelShape:
        """Read a config; biases and norms of heads, if there are any, are not counted.

        Args:
            config: the decoder's.

        Raises:
            RopewalkError: if a number is missing, or the model has experts.
        """
        values = config.values
        experts = next((name for name in EXPERTS if (values.get(name) or 1) > 1), None)
        if experts is not None:
            raise RopewalkError(
                f"memory and time are estimated for dense models alone, and this one has {experts} "
                f"{values[experts]}; give the degrees of parallel one by one"
            )
        keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in keys if values.get(key) is None]
        if missing:
            raise RopewalkError(
                f"the model's config has no {missing[0]}, which an estimate needs; give the degrees of parallel "
                "one by one"
            )
        layers, hidden, intermediate, heads, vocab = (values[key] for key in keys)
        return cls(
            layers,
            hidden,
            intermediate,
            heads,
            config.num_kv_heads or heads,
            config.head_dim,
            vocab,
            bool(values.get("tie_word_embeddings", False)),
        )

    @property
    def layer_sizes(self) -> Sizes:
        """Of one decoder layer: q, k, v, o; gate, up, down; two norms."""
        h, inner = self.hidden, self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        attention = ((inner, h), (kv, h), (kv, h), (h, inner))
        return (
            *attention,
            (self.intermediate, h),
            (self.intermediate, h),
            (h, self.intermediate),
            (h,),
            (h,),
        )

    @property
    def root_sizes(self) -> Sizes:
        """Of all that is no layer: embedding, last norm, and the head where it is not the embedding."""
        embedding = (self.vocab, self.hidden)
        return (embedding, (self.hidden,)) if self.tied else (embedding, (self.hidden,), embedding)

    @property
    def units(self) -> tuple[Sizes, ...]:
        """FSDP units: the root, then one a layer."""
        return (self.root_sizes, *(self.layer_sizes,) * self.layers)

    @property
    def layer_parameters(self) -> int:
        return numel(self.layer_sizes)

    @property
    def root_parameters(self) -> int:
        return numel(self.root_sizes)

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def head_parameters(self) -> int:
        """The output head, whether it is the embedding or not."""
        return self.vocab * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Parameters of all layers that a token is multiplied with: no norms."""
        return self.layers * (self.layer_parameters - 2 * self.hidden)


def numel(sizes: Sizes, ranks: int = 1) -> int:
    """Elements of one FSDP unit, with the padding that makes the first dimension a multiple of the ranks."""
    return sum(-(-size[0] // ranks) * ranks * math.prod(size[1:]) for size in sizes)


@dataclass(frozen=True)
class ShardedRun:
    """What one forward and backward pass of a run holds and does.

    Attributes:
        model: its shape.
        mesh: degrees of parallelism.
        row_length: tokens.
        rows_per_batch: rows of one pass.
        checkpointing: whether layers keep their inputs alone, and are computed again in the backward.
        offload: whether those inputs wait in the CPU's memory.
        dtype: of activations and gathered parameters: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        RopewalkError: for an impossible value.
    """

    model: ModelShape
    mesh: MeshShape
    row_length: int
    rows_per_batch: int = 1
    checkpointing: bool = True
    offload: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("row_length", "rows_per_batch"):
            if getattr(self, name) < 1:
                raise RopewalkError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise RopewalkError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")
        if self.offload and not self.checkpointing:
            raise RopewalkError(
                "offload moves what checkpointed layers keep, and checkpointing is off; set gradient_checkpointing"
            )

    @property
    def shard_length(self) -> int:
        """Places of one rank, padding included, where the row is cut as evenly as can be."""
        ring_length = -(-self.row_length // self.mesh.ring)
        return -(-ring_length // self.mesh.sequence)

    @property
    def places(self) -> int:
        """Places of one rank in one pass: rows times shard length."""
        return self.rows_per_batch * self.shard_length

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]
