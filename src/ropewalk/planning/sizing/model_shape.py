"""Describe a decoder's dimensions (ModelShape) and a sharded run of it (ShardedRun), to count operations and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.models.config.layers import HEADS_OF_LAYERS, RECURRENT
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel.mesh import MeshShape, sharded_dimension
from ropewalk.rope.config import OF_LAYERS

MASTER_BYTES = 4
"""Bytes per element of the parameters, gradients and optimizer moments of a sharded run, which are float32."""
STATE_BYTES = 4 * MASTER_BYTES
"""Bytes per trained parameter throughout training: itself, its gradient and AdamW's two moments."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "llama4_text",
    "mellum",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""Model types whose experts and attention are as :class:`ModelShape` counts them; a test builds each."""

Sizes = tuple[tuple[int, ...], ...]
"""Sizes of the parameters of one FSDP unit."""


@dataclass(frozen=True)
class Experts:
    """A mixture of gated MLPs in place of a layer's one: Mixtral, Qwen3-MoE, gpt-oss and their like.

    Attributes:
        number: experts that the router chooses from.
        per_token: experts that a token goes to.
        intermediate: width of one expert.
        layers: decoder layers that have it; the others have the MLP of a dense model.
        shared: width of the MLP that every token passes beside its experts; 0 for none.
        shared_gate: whether the hidden state says how much of it counts (Qwen2-MoE).
        every_token: whether each expert multiplies every token, and the router's zeros drop most results (Llama 4).
    """

    number: int
    per_token: int
    intermediate: int
    layers: int
    shared: int = 0
    shared_gate: bool = False
    every_token: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig) -> Experts | None:
        """Read a config; None of a dense model.

        Raises:
            RopewalkError: for a mixture of another kind.
        """
        number, values = config.num_experts, config.values
        if not number:
            return None
        if config.model_type not in MIXTURES:
            raise RopewalkError(
                f"operations are not counted for the {number} experts of this {config.model_type} model, but only for "
                f"dense models and for the mixtures of experts {', '.join(MIXTURES)}"
            )
        # Each model type has its own key for these widths; Mixtral has no key for experts alone.
        width = values.get("moe_intermediate_size") or values["intermediate_size"]
        shared = values.get("shared_expert_intermediate_size") or values.get("shared_intermediate_size") or 0
        llama4 = config.model_type == "llama4_text"
        return cls(
            number,
            values["num_experts_per_tok"],
            width,
            sum(_with_experts(values)),
            shared or width * (1 if llama4 else values.get("n_shared_experts") or 0),
            shared_gate="shared_expert_intermediate_size" in values,
            every_token=llama4,
        )

    def sizes(self, hidden: int) -> Sizes:
        """Sizes of the parameters of the router, the experts, and the shared experts."""
        experts = (self.number, 2 * self.intermediate, hidden), (self.number, hidden, self.intermediate)
        beside = _mlp_sizes(hidden, self.shared) if self.shared else ()
        gate = ((1, hidden),) if self.shared_gate else ()
        return ((self.number, hidden), *experts, *beside, *gate)

    @property
    def copies(self) -> int:
        """Copies of a token that experts multiply."""
        return self.number if self.every_token else self.per_token

    def matrices(self, hidden: int) -> int:
        """Parameters that one token is multiplied with."""
        return hidden * (
            self.number + 3 * (self.copies * self.intermediate + self.shared) + int(self.shared_gate)
        )


def _with_experts(values: Mapping[str, Any]) -> list[bool]:
    """For each layer, whether it has experts."""
    layers = range(values["num_hidden_layers"])
    if (kinds := values.get("mlp_layer_types")) is not None:
        return [kinds[layer] == "sparse" for layer in layers]
    if (sparse := values.get("moe_layers")) is not None:
        return [layer in sparse for layer in layers]
    dense, first = values.get("mlp_only_layers") or (), values.get("first_k_dense_replace") or 0
    # decoder_sparse_step counts layers from 1.
    step = values.get("decoder_sparse_step") or 1
    return [layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in layers]


def _mlp_sizes(hidden: int, intermediate: int) -> Sizes:
    """Gate, up and down."""
    return (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek): queries, and keys with values, pass a narrow vector each, which has a norm.

    Attributes:
        kv: width of the vector from which the keys and values of all heads are made.
        rotated: dimensions of a key that RoPE rotates; all heads share them, and they bypass the vector.
        query: width of the queries' vector; None if queries are made of the hidden state.
    """

    kv: int
    rotated: int
    query: int | None = None

    @classmethod
    def from_config(cls, config: ModelConfig) -> Latent | None:
        """Read a config; None of a model whose keys and values have weights of their own."""
        values = config.values
        if values.get("kv_lora_rank") is None:
            return None
        return cls(values["kv_lora_rank"], values["qk_rope_head_dim"], values.get("q_lora_rank"))

    @property
    def width(self) -> int:
        """Of both vectors."""
        return self.kv + (self.query or 0)

    def sizes(self, hidden: int, heads: int, head_dim: int, value_dim: int) -> Sizes:
        """Sizes of the parameters that make queries, keys and values."""
        query = heads * head_dim
        # The rotated part of a key is shared by all heads and needs no up-projection.
        made = heads * (head_dim - self.rotated + value_dim)
        first: Sizes = ((query, hidden),)
        if self.query is not None:
            first = ((self.query, hidden), (self.query,), (query, self.query))
        return (*first, (self.kv + self.rotated, hidden), (self.kv,), (made, self.kv))


@dataclass(frozen=True)
class ModelShape:
    """A decoder with a gated MLP or experts, and two norms a layer, no biases: Llama, Mistral, Mixtral and their like.

    Attributes:
        layers: number of decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the MLP in layers without experts.
        heads, kv_heads: numbers of query heads and of key/value heads.
        head_dim: dimensions of a query or key head, and of a value head unless ``value_dim`` says otherwise.
        vocab: vocabulary size.
        tied: whether the output head shares the embedding's weights.
        experts: the experts of mixture-of-experts layers. None for a dense model.
        latent: the narrow vectors of latent attention. None for Llama's attention.
        value_dim: dimensions of a value head; 0 for ``head_dim``.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    value_dim: int = 0

    def __post_init__(self) -> None:
        # The dataclass is frozen, so a plain assignment would raise.
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RopewalkError(
                    f"{name!r} of the model must be a whole number of 1 or more, got {value!r}"
                )

    @classmethod
    def from_config(cls, config: ModelConfig) -> ModelShape:
        """Read the dimensions from a config. Biases and per-head norms are not counted.

        Args:
            config: the decoder's config.

        Raises:
            RopewalkError: if a dimension is missing, layers differ in shape or are recurrent, or the model has experts
                of a kind that :class:`Experts` does not describe.
        """
        values = config.values
        # First, because such configs often lack a key of the others. A mixer's tensors are not those of attention:
        # counted as such, LFM2 would come out a third too large and Bamba a fifth too small.
        recurrent = [kind in RECURRENT for kind in values.get("layer_types") or ()]
        if any(recurrent):
            raise RopewalkError(
                f"operations are not counted for recurrent layers, and {sum(recurrent)} of {len(recurrent)} layers of "
                f"this {config.model_type} model are recurrent"
            )
        keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in keys if values.get(key) is None]
        if missing:
            raise RopewalkError(f"counting operations needs {missing[0]}, which the model's config lacks")
        apart = next(
            (key for key in (OF_LAYERS, HEADS_OF_LAYERS, "hidden_size_per_layer_input") if values.get(key)),
            None,
        )
        if apart is not None:
            raise RopewalkError(
                f"operations are not counted for models with {apart} in their config, because the layers of such "
                "models differ in shape or have embeddings of their own"
            )
        layers, hidden, intermediate, heads, vocab = (values[key] for key in keys)
        experts, latent = Experts.from_config(config), Latent.from_config(config)
        return cls(
            layers,
            hidden,
            # Llama 4 has another width for layers without experts.
            values.get("intermediate_size_mlp") or intermediate,
            heads,
            # Latent attention makes keys and values for every head.
            (None if latent else config.num_kv_heads) or heads,
            config.key_dim,
            vocab,
            bool(values.get("tie_word_embeddings", False)),
            experts,
            latent,
            config.value_dim,
        )

    @property
    def layer_sizes(self) -> Sizes:
        """Parameter sizes of a decoder layer, with experts if the model has any: q, k, v, o; MLP or experts; norms."""
        return self._layer_sizes(self.experts is not None)

    def _layer_sizes(self, with_experts: bool) -> Sizes:
        h = self.hidden
        if self.latent is None:
            keys, values = self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
            attention: Sizes = ((self.heads * self.head_dim, h), (keys, h), (values, h))
        else:
            attention = self.latent.sizes(h, self.heads, self.head_dim, self.value_dim)
        output = (h, self.heads * self.value_dim)
        dense = _mlp_sizes(h, self.intermediate)
        mlp = self.experts.sizes(h) if with_experts and self.experts is not None else dense
        return (*attention, output, *mlp, (h,), (h,))

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers - (0 if self.experts is None else self.experts.layers)

    @property
    def root_sizes(self) -> Sizes:
        """Parameter sizes outside the layers: embedding, final norm, and the output head unless it is tied."""
        embedding = (self.vocab, self.hidden)
        return (embedding, (self.hidden,)) if self.tied else (embedding, (self.hidden,), embedding)

    @property
    def units(self) -> tuple[Sizes, ...]:
        """Parameter sizes of the FSDP units: the root, then one unit per layer."""
        dense = self.dense_layers
        layers = (self._layer_sizes(False),) * dense + (self.layer_sizes,) * (self.layers - dense)
        return (self.root_sizes, *layers)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers."""
        return sum(numel(sizes) for sizes in self.units[1:])

    @property
    def root_parameters(self) -> int:
        return numel(self.root_sizes)

    @property
    def parameters(self) -> int:
        """Number of all parameters. Tied parameters count once."""
        return self.layer_parameters + self.root_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, tied or not."""
        return self.vocab * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Parameters of the weight matrices that a token passes in all layers: no norms, and only its own experts."""
        dense = sum(math.prod(size) for size in self._layer_sizes(False) if len(size) > 1)
        if self.experts is None:
            return self.layers * dense
        # A router and experts take the place of the dense MLP.
        other = self.experts.matrices(self.hidden) - numel(_mlp_sizes(self.hidden, self.intermediate))
        return self.layers * dense + self.experts.layers * other

    @property
    def active_parameters(self) -> int:
        """Number of parameters active per token: all except those of experts that the token is not sent to."""
        if self.experts is None:
            return self.parameters
        idle = self.experts.number - self.experts.per_token
        return self.parameters - self.experts.layers * idle * 3 * self.hidden * self.experts.intermediate


def numel(sizes: Sizes, ranks: int = 1) -> int:
    """Number of elements of one FSDP unit, including the padding of sharded first dimensions to a multiple of ranks."""
    return sum(
        math.prod(size)
        if sharded_dimension(size, ranks)
        else -(-size[0] // ranks) * ranks * math.prod(size[1:])
        for size in sizes
    )


@dataclass(frozen=True)
class ShardedRun:
    """Model, mesh and batch of one forward and backward pass.

    Attributes:
        model: dimensions of the model.
        mesh: degrees of parallelism.
        row_length: sequence length in tokens.
        rows_per_batch: sequences per pass.
        checkpointing: whether layers save only their inputs and are recomputed in the backward.
        dtype: dtype of activations and gathered parameters: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        RopewalkError: if a value is out of range.
    """

    model: ModelShape
    mesh: MeshShape
    row_length: int
    rows_per_batch: int = 1
    checkpointing: bool = True
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("row_length", "rows_per_batch"):
            if getattr(self, name) < 1:
                raise RopewalkError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise RopewalkError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPE_BYTES)}")

    @property
    def shard_length(self) -> int:
        """Tokens of one sequence on one rank, padding included. The sequence is cut as evenly as possible."""
        # Two roundings: a sequence is cut over the ring first, and each part over Ulysses ranks.
        ring_length = -(-self.row_length // self.mesh.ring)
        return -(-ring_length // self.mesh.sequence)

    @property
    def places(self) -> int:
        """Tokens of one rank in one pass: sequences times shard length."""
        return self.rows_per_batch * self.shard_length

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]
