"""ModelConfig: a decoder's config, read once and in one place.

transformers states the attention of layers in many spellings: a list of layer types, a window for all layers, a switch
beside the window, a pattern, a first layer with a window, a list of layers without RoPE. Only this module reads them.
A config comes from a ``config.json`` (:mod:`ropewalk.models.config_file`) or from a transformers config in memory
(:meth:`ModelConfig.of`), with the same result. Nothing here needs transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from ropewalk.attention.choices import Limit
from ropewalk.attention.options import Locality, stacked_reach
from ropewalk.errors import RopewalkError
from ropewalk.models.support import packing_refusal
from ropewalk.rope.config import OF_LAYERS, head_dim, layer_overrides, methods_from_config
from ropewalk.rope.methods.base import ORIGINAL, RopeMethod
from ropewalk.versions import older_transformers

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SERVED = (FULL, SLIDING, CHUNKED)
"""Layer types of attention that packed rows can pass through."""
INDEXED = "indexed_attention"
"""Layer type whose queries attend to the ``index_topk`` earlier tokens that an indexer chooses for each."""
HYBRID = "hybrid"
"""Layer type with full attention beside a recurrent mixer."""
RECURRENT = ("linear_attention", "conv", HYBRID)
"""Layer types whose mixer carries a state from token to token, or reads earlier tokens through a convolution."""
MIXERS = {
    "bamba": "mamba",
    "falcon_h1": "mamba",
    "granitemoehybrid": "mamba",
    "kimi_linear": "self_attn",
    "lfm2": "conv",
    "lfm2_moe": "conv",
    "lfm3": "conv",
    "minimax": "self_attn",
    "nemotron_h": "mixer",
    "olmo_hybrid": "linear_attn",
    "qwen3_5_moe_text": "linear_attn",
    "qwen3_5_text": "linear_attn",
    "qwen3_next": "linear_attn",
}
"""Model types whose recurrent layers restart at each document, with the attribute of a layer that is its mixer."""
DRAFTS = "drafts tokens from the hidden states and keys of another model; extend that model"
NO_DECODERS = {
    "blt": "reads bytes in patches that another model of it chooses, and has four RoPEs; ropewalk extends models of "
    "one decoder that reads tokens",
    "dory": "runs some of its layers several times for a token; ropewalk trains, plans and checks models that run each "
    "layer once",
    "gemma4_assistant": DRAFTS,
    "gemma4_unified_assistant": DRAFTS,
}
"""Model types that cannot be extended by themselves, and why: predicates whose subject is the model."""
PER_TOKEN = ("mlp", "moe")
"""Layer types in which no token attends to another."""
WITHOUT_ROPE = ("kimi_linear", "nemotron_h")
"""Model types in which no layer has RoPE, whatever their configs state."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config keys for the number of experts that a layer's router chooses from."""
ROTATE_IN_WINDOWS_ALONE = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")
"""Model types whose full-attention layers have no RoPE if other layers have a window."""
WITH_SINKS = (
    "flint",
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "hy_v4_vl_text",
    "openai_privacy_filter",
)
"""Model types with a learned attention sink in every layer."""
CHANGES_ITS_MASK = ("doge",)
"""Model types whose attention adds its own scores to the mask, which no engine receives."""
MASK_EVERY_KIND = {
    "afmoe": "sliding_window",
    "cohere2": "sliding_window",
    "cohere2_moe": "sliding_window",
    "gemma2": "sliding_window",
    "gemma3_text": "sliding_window",
    "gpt_oss": "sliding_window",
    "granite_swa": "sliding_window",
    "granitemoe_swa": "sliding_window",
    "kolibri1": "sliding_window",
    "llama4_text": "attention_chunk_size",
    "ministral": "sliding_window",
    "modernbert-decoder": "sliding_window",
    "olmo3": "sliding_window",
    "vaultgemma": "sliding_window",
}
"""Model types for which transformers builds the mask of windows or chunks even if no layer has one, and fails if the
config has no width for it; with the key of that width."""
ASKS_THE_LAYERS_SINCE = {"llama4_text": "5.24"}
"""Those of them for which a later transformers builds no such mask if no layer needs it, with its version."""
WIDTHS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""The key that limits how far back layers of a type see."""
BEYOND_ANY_CONTEXT = 2**30
"""A window in tokens that limits nothing, for classes that require one."""


READ_OF_EACH_LAYER = ("head_dim", "num_key_value_heads")
"""Values in which layers may differ."""
OTHER_KINDS = ("mlp_layer_types", "layers_block_type")
"""Lists with an entry for each layer that classes do not check against the number of layers."""
LISTS_OF_LAYERS = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers")
"""Lists of the numbers of layers with attention (Bamba, LFM2); classes take any number."""
HEADS_OF_LAYERS = "num_attention_heads_per_layer"
"""A number of query heads for each layer (Laguna)."""
BASES_OF_LAYERS = "layer_rope_theta"
"""A base for each layer, 0 for one without RoPE (Granite with windows); the layers do not use ``rope_theta``."""
DUAL_CHUNK = "dual_chunk_attention_config"

OTHER_LENGTHS = ("model_max_length", "max_sequence_length", "max_seq_len", "seq_length")
"""Further places where configs state a context."""


@dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer.

    Attributes:
        kind: type as transformers names it: ``full_attention``, ``sliding_attention``, ``linear_attention`` and so on.
        window: number of tokens that a query sees, including itself; None if it sees all earlier tokens.
        rotates: whether its queries and keys are rotated by position.
        rope: its RoPE method; None for a layer without RoPE.
        sinks: whether it has learned attention sinks.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None for none.
        key_dim, value_dim: dimensions of a head's queries and keys, and of its values.
    """

    kind: str
    window: int | None
    rotates: bool
    rope: RopeMethod | None
    sinks: bool
    softcap: float | None
    key_dim: int
    value_dim: int

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a mixer that carries a state from token to token, alone or beside attention."""
        return self.kind in RECURRENT

    @property
    def attends(self) -> bool:
        """Whether it has attention, alone or beside a mixer."""
        return self.kind in (*SERVED, HYBRID, INDEXED)

    @property
    def locality(self) -> Locality:
        """Window or chunk of the layer, in the form that attention engines take."""
        return Locality(chunk=self.window) if self.kind == CHUNKED else Locality(self.window)


@dataclass(frozen=True)
class ModelConfig:
    """The config of a decoder, and the properties derived from it.

    Properties are computed on access, so that a config with one wrong value can still answer questions about the
    others.

    Attributes:
        values: the decoder's config as a mapping. ``layer_types`` takes precedence over all other spellings;
            configs that a class of transformers has completed always have it.
        model: the checkpoint as the user named it, or the model's class, for messages.
        defaults: the values that ``config.json`` leaves out and the config class supplies. A key of one layer type
            has the type as prefix: ``full_attention.rope_theta``. Empty for a config in memory, where it is unknown.
        config_class: transformers' class for the decoder; None if it has none and only the file is known.
        given_length: the trained length in tokens, if the user overrides the config.
        source: the transformers config, of the whole model, that this was read from; None for a ``config.json``.

    Example:
        >>> config = ModelConfig({"head_dim": 64, "rope_theta": 1e4, "num_hidden_layers": 2, "sliding_window": 512})
        >>> [layer.window for layer in config.layers]
        [512, 512]
    """

    values: Mapping[str, Any]
    model: str = "the model"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    config_class: str | None = None
    given_length: int | None = None
    source: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, config: Any) -> ModelConfig:
        """Read a transformers config, of the whole model or of its language model.

        Raises:
            RopewalkError: if it describes no decoder that reads tokens.
        """
        refuse_no_decoder(type(config).__name__, config.model_type)
        text = config.get_text_config()
        values = text.to_dict()
        # A class may use other names for them: n_embd, kv_channels.
        shape = {key: value for key, value in shape_values(text).items() if values.get(key) is None}
        dtype = {} if values.get("dtype") or config.dtype is None else {"dtype": str(config.dtype)}
        values = {**values, **shape, **dtype, **layer_values(text)}
        return cls(values, text.model_type, {}, type(text).__name__, source=config)

    # The transformers config behind it.

    @property
    def decoder_values(self) -> dict[str, Any]:
        """The decoder's part of the transformers config, as its class writes it to a file."""
        key = decoder_key(self.source)
        values: dict[str, Any] = self.source.to_dict()
        return values if key is None else values[key]

    def with_decoder_values(self, values: Mapping[str, Any]) -> ModelConfig:
        """The config of the same model with different values for its decoder; its encoders are unchanged.

        Args:
            values: replacement for :attr:`decoder_values`.
        """
        key = decoder_key(self.source)
        whole = dict(values) if key is None else {**self.source.to_dict(), key: dict(values)}
        return ModelConfig.of(type(self.source).from_dict(whole))

    # Properties of the decoder.

    @property
    def model_type(self) -> str | None:
        return self.values.get("model_type")

    @cached_property
    def methods(self) -> dict[str | None, RopeMethod]:
        """RoPE method of each layer type; the key is None if all layers share one.

        Raises:
            RopewalkError: as for :func:`ropewalk.rope.methods_from_config`.
        """
        return methods_from_config(self.values)

    @property
    def full_attention_rope(self) -> RopeMethod:
        """The RoPE method of the layers that limit the context: all layers, or those with full attention.

        Raises:
            RopewalkError: if no layer type has full attention.
        """
        return self.methods[self.limiting_kind]

    @property
    def other_ropes(self) -> dict[str, RopeMethod]:
        """The method of each layer type that does not limit the context; empty if all layers share one.

        Raises:
            RopewalkError: if no layer type has full attention.
        """
        limiting = self.limiting_kind
        return {
            kind: method for kind, method in self.methods.items() if kind is not None and kind != limiting
        }

    def methods_with(
        self, method: RopeMethod, others: Mapping[str, RopeMethod] | None = None
    ) -> dict[str | None, RopeMethod]:
        """The method of each layer type after changing that of the layers that limit the context.

        Args:
            method: new method for these layers.
            others: methods for other layer types that have their own. A type that is left out keeps its method, since
                in a layer with a window no distance grows.

        Raises:
            RopewalkError: if no layer type has full attention.
        """
        changed = dict(self.methods)
        for kind, other in (others or {}).items():
            changed[kind] = other
        return {**changed, self.limiting_kind: method}

    @property
    def limiting_kind(self) -> str | None:
        """The layer type whose RoPE limits the context; None if all layers share one.

        Raises:
            RopewalkError: if layer types have their own methods, and none of them has full attention.
        """
        if None in self.methods:
            return None
        found = next((kind for kind in (FULL, INDEXED) if kind in self.methods), None)
        if found is None:
            known = ", ".join(map(str, self.methods))
            raise RopewalkError(
                f"none of this model's layer types has full attention ({known}); nothing to plan"
            )
        return found

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The attention of each layer, first to last.

        Raises:
            RopewalkError: for an invalid value of a layer, such as a window of 0 or of "x" tokens, and for values that
                contradict each other, such as a layer with a window in a config without one.
        """
        check_layers(self.values)
        check_list_lengths(self.values)
        kinds = self.values.get("layer_types") or _derived_kinds(self.values)
        windows = {kind: _width(self.values, kind, kinds) for kind in WIDTHS if kind in kinds}
        turned = _layers_that_rotate(self.values, kinds)
        overrides = layer_overrides(self.values)
        dims = [_dims({**self.values, **overrides.get(number, {})}) for number in range(len(kinds))]
        return tuple(
            LayerConfig(
                kind,
                windows.get(kind),
                rotates,
                # The key None holds the RoPE that all layers share.
                self.methods.get(kind, self.methods.get(None)) if rotates else None,
                self.has_sinks,
                self.softcap,
                *both,
            )
            for kind, rotates, both in zip(kinds, turned, dims, strict=True)
        )

    @property
    def localities(self) -> tuple[Locality, ...]:
        """Window or chunk of each layer, first to last."""
        return tuple(layer.locality for layer in self.layers)

    @property
    def widest_window(self) -> int | None:
        """The widest window of the layers in tokens; None if some layer sees or carries more than a window."""
        widths = [layer.window for layer in self.layers]
        return None if None in widths else max(width for width in widths if width is not None)

    def context_layers(self, length: int) -> list[int]:
        """Numbers of the layers whose RoPE limits the context: they have RoPE, and a query sees all earlier tokens.

        Args:
            length: tokens of the longest text; a window of at least this length does not count as one.
        """
        return [
            number
            for number, layer in enumerate(self.layers)
            if layer.rotates and (layer.window is None or layer.window >= length)
        ]

    def rotates_in_windows_alone(self, length: int) -> bool:
        """Whether only layers with a window have RoPE, and layers without one do not: no base limits the context.

        Args:
            length: tokens of the longest text, as in :meth:`context_layers`.
        """
        rotating = any(layer.rotates for layer in self.layers)
        return rotating and self.widest_window is None and not self.context_layers(length)

    @property
    def mixer_name(self) -> str | None:
        """The attribute of a recurrent layer that is its mixer; None if unknown."""
        return MIXERS.get(self.model_type or "")

    @property
    def recurrent_layers(self) -> list[int]:
        """Numbers of the layers with a recurrent mixer, from 0."""
        return [number for number, layer in enumerate(self.layers) if layer.is_recurrent]

    @property
    def shortest_window(self) -> int | None:
        """The shortest window of the layers in tokens; None if every layer sees all tokens."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def num_heads(self) -> int | None:
        return self.values.get("num_attention_heads")

    @property
    def num_kv_heads(self) -> int | None:
        return self.values.get("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of a head that RoPE may rotate; see :func:`ropewalk.rope.head_dim`.

        If layers differ, those of layers with full attention, which limit the context.
        """
        return head_dim(self.values, FULL)

    @property
    def key_dim(self) -> int:
        """Dimensions of a head's queries and keys in the layers of :attr:`head_dim`."""
        return _dims({**self.values, OF_LAYERS: None, "head_dim": self.head_dim})[0]

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values in the layers of :attr:`head_dim`."""
        return _dims({**self.values, OF_LAYERS: None, "head_dim": self.head_dim})[1]

    @property
    def widest_dims(self) -> tuple[int, int]:
        """Dimensions of a head's queries and keys, and of its values, in the layer with the widest heads."""
        return max((layer.key_dim, layer.value_dim) for layer in self.layers)

    @property
    def softcap(self) -> float | None:
        """Soft cap: scores become ``softcap * tanh(scores / softcap)``; None for none."""
        return self.values.get("attn_logit_softcapping")

    @property
    def has_sinks(self) -> bool:
        """Whether the model type has learned attention sinks."""
        return self.model_type in WITH_SINKS

    @property
    def dtype(self) -> str | None:
        """Dtype of the checkpoint's weights; None if the config does not state it."""
        dtype = self.values.get("dtype") or self.values.get("torch_dtype")
        return None if dtype is None else str(dtype).removeprefix("torch.")

    @property
    def max_position_embeddings(self) -> int | None:
        return self.values.get("max_position_embeddings")

    @property
    def trained_length(self) -> int:
        """Tokens that the checkpoint was trained for; some yarn configs state only the length before their factor.

        Raises:
            RopewalkError: if neither the config nor the user states ``max_position_embeddings``.
        """
        if self.given_length is not None:
            return self.given_length
        length = self.max_position_embeddings
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise RopewalkError(f"the config must state max_position_embeddings in tokens, got {length!r}")
        method = self.methods.get(None, self.methods.get(FULL))
        extended = None if method is None else method.extended_length()
        # Other yarn configs state the extended length, which must not become shorter.
        return (self._dual_chunk_length or length) if extended is None else max(length, extended)

    @property
    def _dual_chunk_length(self) -> int | None:
        """The trained length in tokens of a checkpoint with dual chunk attention (Qwen2.5-1M); None without it.

        Its ``max_position_embeddings`` is the length that this attention reaches by reusing shorter distances.

        Raises:
            RopewalkError: if the config states anything but a whole number.
        """
        chunks = self.values.get(DUAL_CHUNK)
        length = chunks.get(ORIGINAL) if isinstance(chunks, Mapping) else None
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise RopewalkError(
                "dual_chunk_attention_config must state original_max_position_embeddings in tokens, got "
                f"{length!r}"
            )
        return length

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits that :meth:`lifted` could remove from this config."""
        windows: tuple[Limit, ...] = ("windows",) if self.shortest_window is not None else ()
        return (*windows, "dual_chunk_attention") if self.values.get(DUAL_CHUNK) else windows

    @property
    def _kinds_with_windows(self) -> set[str]:
        return {layer.kind for layer in self.layers if layer.window is not None}

    @property
    def can_lift_windows(self) -> bool:
        """Whether :meth:`lifted` can remove the windows: they slide, and their layers share the RoPE of all layers."""
        return self._kinds_with_windows == {SLIDING} and SLIDING not in self.methods

    def lifted(self, limits: Iterable[Limit]) -> ModelConfig:
        """A config without the given limits; limits that it does not have are ignored.

        Args:
            limits: ``windows`` gives every layer with a sliding window full attention;
                ``dual_chunk_attention`` drops the config of Qwen2.5-1M's attention, which reaches further than its
                training by reusing shorter distances.

        Raises:
            RopewalkError: if layers with a window are chunked, or have their own RoPE, which full attention would use
                at distances that it has never seen; or if removing the windows would give other layers RoPE.
        """
        wanted = [limit for limit in self.limits if limit in set(limits)]
        if not wanted:
            return self
        values = self.decoder_values
        if "dual_chunk_attention" in wanted:
            values.pop(DUAL_CHUNK, None)
        if "windows" in wanted:
            if not self.can_lift_windows:
                raise RopewalkError(
                    f"the sliding windows of {self.model} cannot be removed: its layers of type "
                    f"{', '.join(sorted(self._kinds_with_windows))} are "
                    "chunked or have their own RoPE"
                )
            values["sliding_window"] = None
            if values.get("layer_types"):
                # Classes with layer types build the mask of windows even if no layer has one.
                values["sliding_window"] = BEYOND_ANY_CONTEXT
                values["layer_types"] = [FULL if kind == SLIDING else kind for kind in values["layer_types"]]
            values.pop("use_sliding_window", None)
        lifted = self.with_decoder_values(values)
        if [layer.rotates for layer in lifted.layers] != [layer.rotates for layer in self.layers]:
            raise RopewalkError(
                f"the sliding windows of {self.model} cannot be removed: they determine which of its layers have RoPE"
            )
        return lifted

    # Warnings, notes for readers, and refusals.

    @property
    def config_warnings(self) -> list[str]:
        """Suspicious but not contradictory settings: sentences for a report, never an error."""
        length = self.max_position_embeddings
        warnings: list[str] = []
        for layer_type, method in self.methods.items():
            entry = _rope_entry(self.values, layer_type)
            stated = entry.get(ORIGINAL)
            original = self.values.get(ORIGINAL) if stated is None else stated
            about = "" if layer_type is None else f"{layer_type}: "
            warnings += [about + sentence for sentence in method.config_warnings(entry, original, length)]
        warnings += [
            f"{key} is {self.values[key]}, but max_position_embeddings is {length}, which is used here"
            for key in OTHER_LENGTHS
            if isinstance(self.values.get(key), int) and self.values[key] != length
        ]
        widest = self.widest_window
        if widest is not None and length is not None and widest < length:
            warnings.append(
                f"every layer sees only the last {widest} tokens (sliding_window), fewer than "
                f"max_position_embeddings {length}"
            )
        bases = sorted({base for base in self.values.get(BASES_OF_LAYERS) or () if base})
        if bases and bases != sorted({method.rope_theta for method in self.methods.values()}):
            stated = ", ".join(f"{base:g}" for base in bases)
            warnings.append(
                f"{BASES_OF_LAYERS} states the bases {stated}, which the layers use; "
                "statements here about rope_theta do not apply to them"
            )
        trained = self._dual_chunk_length
        if trained is not None and trained != length:
            warnings.append(
                f"dual_chunk_attention_config states an original length of {trained} tokens, and "
                f"max_position_embeddings is {length}: the model is taken as trained for {trained}, because longer "
                "contexts need dual chunk attention, which neither transformers nor ropewalk runs; "
                "a recipe drops it with lift: [dual_chunk_attention]"
            )
        return warnings

    @property
    def layer_notes(self) -> list[str]:
        """One sentence each on layers that are recurrent, have a window or have no RoPE, if not all layers do."""
        layers = self.layers
        windowed = [number for number, layer in enumerate(layers) if layer.window is not None]
        still = [number for number, layer in enumerate(layers) if layer.attends and not layer.rotates]
        notes = []
        recurrent = [number for number in self.recurrent_layers if not layers[number].attends]
        if recurrent:
            notes.append(
                f"{_which(recurrent, len(layers))} is recurrent and has no RoPE: training must teach it what to carry "
                "over a longer context, whatever the base"
            )
        if windowed and len(windowed) < len(layers):
            widths = " or ".join(
                f"{width:,}" for width in sorted({layers[number].window or 0 for number in windowed})
            )
            chunked = {layers[number].kind for number in windowed} == {CHUNKED}
            sees = (
                f"its own chunk of {widths} tokens (attention_chunk_size)"
                if chunked
                else f"the last {widths} tokens (sliding_window)"
            )
            notes.append(f"{_which(windowed, len(layers))} sees only {sees}, whatever the base")
        indexed = [number for number, layer in enumerate(layers) if layer.kind == INDEXED]
        if indexed:
            chosen = self.values.get("index_topk")
            some = "some" if chosen is None else f"{chosen:,}"
            notes.append(
                f"{_which(indexed, len(layers))} attends to {some} earlier tokens, which an indexer chooses for each "
                "query at any distance"
            )
        if still and len(still) == len(layers):
            notes.append("no layer has RoPE, so the base has no effect")
        elif still:
            notes.append(f"{_which(still, len(layers))} has no RoPE, so a new base does not change it")
        return notes

    @property
    def planning_notes(self) -> list[str]:
        """Facts about the checkpoint that matter for a plan to a longer context, one sentence each."""
        notes = self.layer_notes
        method = self.full_attention_rope
        limiting, layers = self.context_layers(self.trained_length), self.layers
        some = 0 < len(limiting) < len(layers)
        if some:
            what = (
                "it limits the context, and its RoPE is the one to change"
                if len(limiting) == 1
                else "these layers limit the context, and theirs is the RoPE to change"
            )
            notes.append(f"{_which(limiting, len(layers))} sees all earlier tokens and has RoPE: {what}")
        if None not in self.methods:
            others = ", ".join(str(kind) for kind in self.methods if kind != self.limiting_kind)
            notes.append(f"layers of type {others} have their own RoPE, which is kept")
        elif some and any(layer.rotates for layer in layers if layer.window is not None):
            notes.append("layers with a window share that RoPE and get the new one too")
        if self.values.get("attn_temperature_tuning"):
            notes.append(
                "queries of layers without RoPE are scaled by their position (attn_temperature_tuning), within and "
                "beyond the trained length: leave that as it is"
            )
        if not method.trainable:
            notes.append(
                f"{method.name} is for inference only: the plan assumes that the model was trained unscaled"
            )
        if method.rotary_dim < self.key_dim:
            notes.append(
                f"{method.rotary_dim} of {self.key_dim} dimensions of a head are rotated; the others compare tokens "
                "alike at every distance, so the context bound, which counts only rotated ones, is too low here"
            )
        return notes

    # Mixtures of experts.

    @property
    def num_experts(self) -> int:
        """Number of experts that a token may be routed to in one layer; 0 for a dense model.

        If the config states a number for each layer, the largest.
        """
        stated = next((self.values[key] for key in NUMBERS_OF_EXPERTS if self.values.get(key)), None)
        # DBRX states it in the config of its feed-forward blocks.
        if stated is None:
            stated = (self.values.get("ffn_config") or {}).get("moe_num_experts") or 0
        found = max(stated) if isinstance(stated, list | tuple) else stated
        # With one expert there is nothing to route.
        return found if found > 1 else 0

    @property
    def router_aux_loss_coef(self) -> float | None:
        """Factor of the load-balancing loss in the config; None if it states none."""
        keys = ("router_aux_loss_coef", "aux_loss_coef")
        return next((float(self.values[key]) for key in keys if self.values.get(key) is not None), None)

    @property
    def router_aux_loss(self) -> float:
        """Factor of the load-balancing loss in transformers' training: 0 unless ``output_router_logits`` is true."""
        return (self.router_aux_loss_coef or 0.0) if self.values.get("output_router_logits") else 0.0

    def packing_refusals(self) -> list[str]:
        """Why packed rows cannot pass through the model: predicates whose subject is the model; empty if they can."""
        refused = []
        passable = (*SERVED, *PER_TOKEN, *(RECURRENT if self.mixer_name else ()))
        # Reversed, so that the first layer of each kind is the one that a message names.
        other = {layer.kind: number for number, layer in reversed(list(enumerate(self.layers)))}
        unknown = [f"{kind} (layer {other[kind]})" for kind in sorted(set(other) - set(passable))]
        if unknown:
            refused.append(
                f"has layers of type {', '.join(unknown)}, through which packed documents would leak; ropewalk "
                f"supports full and sliding attention, and recurrent layers of {', '.join(MIXERS)}"
            )
        width = MASK_EVERY_KIND.get(self.model_type or "")
        since = ASKS_THE_LAYERS_SINCE.get(self.model_type or "")
        if since is not None and older_transformers(since) is None:
            width = None
        if width is not None and self.values.get(width) is None:
            refused.append(
                f"has {width} null in its config, with which transformers runs no {self.model_type}, whatever its "
                f"layers are; set it in tokens, to {BEYOND_ANY_CONTEXT} if no layer should be limited"
            )
        if self.model_type in CHANGES_ITS_MASK:
            refused.append("adds its own scores to the mask of its attention, which no engine supports")
        if not self.values.get("is_causal", True):
            refused.append("attends in both directions; packed rows need a causal decoder")
        return refused

    def training_refusals(self, context: int, keeps_rope: bool = False) -> list[str]:
        """Why ``ropewalk extend`` cannot train the model at a context, as in :meth:`packing_refusals`; empty if it can.

        Args:
            context: tokens of the longest stage.
            keeps_rope: whether every stage keeps the checkpoint's RoPE (method ``default``).
        """
        return [*self.reach_refusals(context, keeps_rope), *self.dropout_refusals]

    def reach_refusals(self, context: int, keeps_rope: bool = False) -> list[str]:
        """Those :meth:`training_refusals` that no edit of the config removes; with the same arguments."""
        refused = self.packing_refusals()
        # What only the code of a family shows, and not its config.
        shown = None if refused else packing_refusal(self.model_type)
        if shown is not None:
            refused.append(f"does not support packed rows: {shown}")
        widest = self.widest_window
        if widest is not None and widest < context:
            layers = self.layers
            stacked = stacked_reach(self.localities, context)
            refused.append(
                f"has a window of {widest:,} tokens in every layer, so no query attends further with any RoPE, and "
                f"training at {context:,} tokens extends nothing (through all {len(layers)} layers, a query receives "
                f"information from at most {stacked:,} tokens, and little of it from distant ones); set lift: "
                "[windows] in a recipe to let every layer attend to its whole document, which the model must then "
                f"learn in training, or stay within {widest:,} tokens"
            )
        kinds = sorted({layer.kind for layer in self.layers})
        if FULL in self.methods and FULL not in kinds:
            refused.append(
                f"has no layer of type {FULL}, whose RoPE a longer context changes; its layers are of type "
                f"{' and '.join(kinds)}"
            )
        if self.rotates_in_windows_alone(context) and not keeps_rope:
            refused.append(
                "has RoPE only in layers with a window, where no distance grows with the context: another RoPE "
                "extends nothing, and layers with full attention have none; rope: {method: default} in every stage "
                "keeps it"
            )
        if not any(layer.rotates for layer in self.layers):
            refused.append("has no layer with RoPE, so there is nothing to extend")
        return refused

    @property
    def dropout_refusals(self) -> list[str]:
        """The :meth:`training_refusals` that an edit of the config removes."""
        dropout = self.values.get("attention_dropout")
        if not dropout:
            return []
        return [f"has attention dropout {dropout}, which no engine supports; set it to 0 in config.json"]


def refuse_no_decoder(model: str, model_type: object) -> None:
    """Raise for a model type that cannot be extended by itself.

    Args:
        model: the checkpoint as the user named it, or the class of its config.
        model_type: as ``config.json`` states it.
    """
    if isinstance(model_type, str) and model_type in NO_DECODERS:
        raise RopewalkError(f"{model} ({model_type}) {NO_DECODERS[model_type]}")


def decoder_key(config: Any) -> str | None:
    """The key of the decoder's config in that of the whole model; None if it is the whole config.

    Raises:
        RopewalkError: if the decoder's config is not found.
    """
    text = config.get_text_config()
    if text is config:
        return None
    for name in type(config).sub_configs:
        if getattr(config, name, None) is text:
            return str(name)
    raise RopewalkError(
        f"ropewalk cannot find the decoder's config, a {type(text).__name__}, in {type(config).__name__}; "
        "give a file that contains only the decoder's config"
    )


SHAPE_KEYS = (
    "hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "num_key_value_heads",
    "head_dim",
)


def shape_values(text: Any) -> dict[str, int]:
    """Dimensions and counts in a transformers config, under the names that are read.

    A value in which layers differ is the one that :func:`layer_values` replaces for some of them.
    """
    # Reading such a value from the config raises an error, but its mapping has it.
    apart = getattr(text, "per_layer_attributes", None) or ()
    stated = text.to_dict() if apart else {}
    found = {key: stated.get(key) if key in apart else getattr(text, key, None) for key in SHAPE_KEYS}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def layer_values(text: Any) -> dict[str, Any]:
    """The values of all keys about layers, as a transformers config class completes them.

    Args:
        text: the config of the language model (``config.get_text_config()``).

    Raises:
        RopewalkError: if layers differ in a value that ropewalk reads once for all of them.
    """
    apart = set(getattr(text, "per_layer_attributes", None) or ())
    unread = sorted(apart - set(READ_OF_EACH_LAYER))
    if unread:
        raise RopewalkError(
            f"the layers of {text.model_type} differ in {', '.join(unread)} ({OF_LAYERS}); ropewalk supports layers "
            f"that differ in {' and '.join(READ_OF_EACH_LAYER)}"
        )
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        # The same order in which transformers selects the mask of all layers.
        kind = FULL
        if getattr(text, "sliding_window", None) is not None:
            kind = SLIDING
        elif getattr(text, "attention_chunk_size", None) is not None:
            kind = CHUNKED
        kinds = [kind] * (getattr(text, "num_hidden_layers", None) or 1)
    layers = {"layer_types": list(kinds), "is_causal": getattr(text, "is_causal", True)}
    off = not getattr(text, "use_sliding_window", True)
    width = getattr(text, "sliding_window", None)
    if off and (width == 0 or (width is None and SLIDING in kinds)):
        # The switch decides, whatever width a file states; Qwen2-MoE's class writes 0 for no window.
        layers["sliding_window"] = None
    if width is not None and "sliding_window" in getattr(text, "attribute_map", {}):
        # RecurrentGemma's file calls it attention_window_size.
        layers["sliding_window"] = width
    if apart:
        layers[OF_LAYERS] = text.to_dict()[OF_LAYERS]
    rotating = getattr(text, "no_rope_layers", None)
    return {**layers, "no_rope_layers": list(rotating)} if rotating else layers


RECURRENT_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
"""Keys for the heads of gated DeltaNet; each key head serves the same number of value heads."""
COUNTS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads"),
    *("head_dim", "v_head_dim", "kv_lora_rank", "decoder_sparse_step"),
    *("linear_conv_kernel_dim", "mamba_d_conv", "conv_L_cache"),
    *(*RECURRENT_HEADS, "linear_key_head_dim", "linear_value_head_dim"),
)
"""Keys whose whole numbers must be at least 1."""
ABOVE_0 = (
    *("attn_logit_softcapping", "query_pre_attn_scalar", "floor_scale"),
    *("attention_multiplier", "key_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale"),
)
"""Keys of numbers that scores, positions, embeddings or logits are multiplied or divided by."""


def check_layers(config: Mapping[str, Any]) -> None:
    """Raise for an invalid value of a key about layers; the message names the key and, for a list, the layer."""
    # Qwen2-MoE's class writes 0 for a window that its switch turns off; a list of layers makes an interval unused.
    least = {
        "num_hidden_layers": 1,
        "sliding_window": 0 if _switched_off(config) else 1,
        "attention_chunk_size": 1,
        "max_window_layers": 0,
        "first_k_dense_replace": 0,
        "qk_nope_head_dim": 0,
        "no_rope_layer_interval": 0 if config.get("no_rope_layers") else 1,
        "full_attention_interval": 0 if config.get("layer_types") else 1,
    }
    stated = config.get("layer_types")
    # A value that is no list is refused below.
    kinds = list(stated) if isinstance(stated, list | tuple) else []
    of_kinds = {key: kind for kind, key in WIDTHS.items()}
    for key, smallest in least.items():
        value = config.get(key)
        # isinstance would accept true, which is an int in Python.
        if value is not None and (type(value) is not int or value < smallest):
            kind = of_kinds.get(key)
            # Without a list of types, those that the config would have with a width in this place.
            named = kinds if stated else _kinds_with(config, key)
            where = f" for layer {list(named).index(kind)}" if kind in named else ""
            raise RopewalkError(
                f"{key} is {value!r} in the config{where}, but must be a whole number of at least {smallest}"
            )
    for key in COUNTS:
        value = config.get(key)
        # Other types than whole numbers are for the class to refuse or to read: a few have a list of layers here.
        if type(value) is int and value < 1:
            raise RopewalkError(f"{key} is {value} in the config, but must be at least 1")
    for key in ABOVE_0:
        value = config.get(key)
        if isinstance(value, int | float) and not value > 0:
            raise RopewalkError(f"{key} is {value} in the config, but must be above 0")
    chosen = config.get("num_experts_per_tok")
    for key in NUMBERS_OF_EXPERTS:
        experts = config.get(key)
        if type(chosen) is int and type(experts) is int and experts > 0 and not 1 <= chosen <= experts:
            raise RopewalkError(
                f"num_experts_per_tok is {chosen} in the config, but must be from 1 to {experts} ({key})"
            )
    switch = config.get("use_sliding_window")
    if switch is not None and not isinstance(switch, bool):
        raise RopewalkError(f"use_sliding_window is {switch!r} in the config, but must be true or false")
    pattern = config.get("sliding_window_pattern")
    # Beside a list of types a pattern is unused, so it may be 0.
    idle = pattern is None or (pattern == 0 and config.get("layer_types"))
    if isinstance(pattern, bool) or not (idle or (pattern and isinstance(pattern, str | int))):
        raise RopewalkError(
            f"sliding_window_pattern is {pattern!r} in the config, but must be a whole number of at least 1, or letters"
        )
    check_recurrent_heads(config, kinds)
    _check_heads_of_layers(config)
    _check_list(config, "layer_types", str, "the name of a type")
    _check_list(config, "no_rope_layers", int, "1 for a layer with RoPE and 0 for one without")


def _kinds_with(config: Mapping[str, Any], key: str) -> Sequence[str]:
    """Layer types of a config without a list of them, if it stated a width under this key; empty if unreadable."""
    layers = config.get("num_hidden_layers")
    known = type(layers) is int and layers > 0 and key in WIDTHS.values()
    pattern = config.get("sliding_window_pattern")
    readable = pattern is None or (isinstance(pattern, str | int) and bool(pattern))
    return _derived_kinds({**config, key: 1}) if known and readable else ()


def check_recurrent_heads(config: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Raise if the key heads of gated DeltaNet cannot share its value heads evenly.

    Args:
        config: values of the decoder.
        kinds: its layer types, to name the first layer concerned.
    """
    keys, values = (config.get(key) for key in RECURRENT_HEADS)
    if type(keys) is int and type(values) is int and values % keys:
        where = f" for layer {kinds.index('linear_attention')}" if "linear_attention" in kinds else ""
        raise RopewalkError(
            f"linear_num_value_heads is {values} in the config{where}, but must be a multiple of linear_num_key_heads, "
            f"{keys}"
        )


def _check_heads_of_layers(config: Mapping[str, Any]) -> None:
    listed, kv_heads = config.get(HEADS_OF_LAYERS), config.get("num_key_value_heads")
    multiple = kv_heads if type(kv_heads) is int and kv_heads > 0 else 1
    for number, heads in enumerate(listed if isinstance(listed, list | tuple) else ()):
        if type(heads) is not int or heads < 1 or heads % multiple:
            raise RopewalkError(
                f"{HEADS_OF_LAYERS} is {heads!r} in the config for layer {number}, but must be a positive multiple of "
                f"num_key_value_heads, {multiple}"
            )


def _check_list(config: Mapping[str, Any], key: str, kind: type, entry: str) -> None:
    value = config.get(key)
    if value is None:
        return
    if not isinstance(value, list | tuple):
        raise RopewalkError(
            f"{key} is {value!r} in the config, but must be a list with an entry for each layer"
        )
    for number, each in enumerate(value):
        if not isinstance(each, kind) or (kind is int and each not in (0, 1)):
            raise RopewalkError(f"{key} is {each!r} in the config for layer {number}, but must be {entry}")


def check_list_lengths(config: Mapping[str, Any]) -> None:
    """Raise for a list without an entry for each layer, or one that names a layer which the model does not have."""
    stated = config.get("num_hidden_layers") or len(config.get("layer_types") or ())
    for key in LISTS_OF_LAYERS:
        named = config.get(key) or ()
        if not isinstance(named, list | tuple):
            raise RopewalkError(f"{key} is {named!r} in the config, but must be a list of layers")
        for number in named:
            # Without a stated count, a class has one of its own.
            if type(number) is not int or number < 0 or 0 < stated <= number:
                there = (
                    f"the model has {stated} layers, 0 to {stated - 1}" if stated else "layers count from 0"
                )
                raise RopewalkError(f"{key} names layer {number!r}, but {there}")
    count = stated or 1
    for key in ("layer_types", "no_rope_layers", HEADS_OF_LAYERS, BASES_OF_LAYERS, *OTHER_KINDS):
        listed = len(config.get(key) or ())
        # 0 stands for a list that the config does not have.
        if listed in (0, count):
            continue
        wrong = f"layer {listed} has no entry" if listed < count else f"there is no layer {count}"
        raise RopewalkError(f"{key} lists {listed} layers, but the model has {count}: {wrong}")


def _dims(values: Mapping[str, Any]) -> tuple[int, int]:
    """Dimensions of a head's queries and keys, and of its values; in latent attention head_dim is their rotated part.

    Args:
        values: values of one layer.
    """
    latent = values.get("qk_head_dim")
    if latent is None and values.get("qk_rope_head_dim") is not None:
        latent = values["qk_rope_head_dim"] + (values.get("qk_nope_head_dim") or 0)
    key_dim = head_dim({**values, OF_LAYERS: None}) if latent is None else int(latent)
    return key_dim, values.get("v_head_dim") or key_dim


def _switched_off(config: Mapping[str, Any]) -> bool:
    """Whether a window is off: Qwen writes a window together with a switch, and null turns it off too."""
    return "use_sliding_window" in config and not config["use_sliding_window"]


def _width(config: Mapping[str, Any], kind: str, kinds: Sequence[str]) -> int:
    """Tokens that a query sees in layers of a type that the model has."""
    key = WIDTHS[kind]
    width = config.get(key)
    if width is None:
        off = kind == SLIDING and config.get("use_sliding_window") is False
        full = "" if config.get("model_type") in MASK_EVERY_KIND else f", or make it {FULL}"
        raise RopewalkError(
            f"layer {list(kinds).index(kind)} is of type {kind} in the config, and "
            f"{'use_sliding_window is false' if off else f'{key} is null'}; state its width in tokens{full}"
        )
    return int(width)


def _derived_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Layer types of a config without a list of them."""
    layers = config.get("num_hidden_layers") or 1
    if config.get("sliding_window") is None or _switched_off(config):
        chunked = config.get("attention_chunk_size") is not None
        return (CHUNKED if chunked else FULL,) * layers
    pattern = config.get("sliding_window_pattern")
    # EXAONE 4 writes the pattern in letters: L for a local layer, G for a global one.
    if isinstance(pattern, str):
        return [SLIDING if pattern[number % len(pattern)] == "L" else FULL for number in range(layers)]
    # A number p, as Gemma 3 states it: each p-th layer, counted from 1, has full attention.
    if pattern:
        return [SLIDING if (number + 1) % pattern else FULL for number in range(layers)]
    # In Qwen's configs the layers before max_window_layers have full attention.
    first = config.get("max_window_layers") if config.get("use_sliding_window") else None
    return [SLIDING if number >= (first or 0) else FULL for number in range(layers)]


def _layers_that_rotate(config: Mapping[str, Any], kinds: Sequence[str]) -> Iterable[bool]:
    # Granite 4 states in words whether it has RoPE.
    rope_stated = (
        config.get("position_embedding_type", "rope") == "rope"
        or config.get("model_type") != "granitemoehybrid"
    )
    if config.get("model_type") in WITHOUT_ROPE or not rope_stated:
        return [False] * len(kinds)
    return [
        turned and kind in (*SERVED, HYBRID, INDEXED)
        for turned, kind in zip(_attention_that_rotates(config, kinds), kinds, strict=True)
    ]


def _attention_that_rotates(config: Mapping[str, Any], kinds: Sequence[str]) -> Iterable[bool]:
    bases = config.get(BASES_OF_LAYERS)
    if bases:
        return [bool(base) for base in bases]
    stated = config.get("no_rope_layers")
    if stated:
        # Despite the name no_rope_layers, 1 means a layer with RoPE.
        return [bool(rotates) for rotates in stated]
    every = config.get("no_rope_layer_interval")
    if every:
        return [(number + 1) % every != 0 for number in range(len(kinds))]
    windows_alone = (
        config.get("model_type") in ROTATE_IN_WINDOWS_ALONE and config.get("sliding_window") is not None
    )
    # An entry of null means that the layers of this type have no RoPE.
    nested = config.get("rope_parameters") or {}
    return [
        not (windows_alone and kind == FULL) and not (kind in nested and nested[kind] is None)
        for kind in kinds
    ]


def _which(numbers: Sequence[int], layers: int) -> str:
    """``every layer``, ``each of layers 3, 7 and 11 (of 36, counted from 0)``."""
    if len(numbers) == layers:
        return "every layer"
    if len(numbers) == 1:
        return f"layer {numbers[0]} (of {layers}, counted from 0)"
    # In a run of consecutive numbers, the number minus its position stays the same.
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    # Patterns such as every sixth layer are common, and easier to read than a list of numbers.
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        which = f"every {_ordinal(steps.pop())} layer, from {numbers[0]} to {numbers[-1]}"
        return f"{which} (of {layers}, counted from 0)"
    if len(runs) > 4:
        return f"each of {len(numbers)} layers (of {layers})"
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"each of layers {', '.join(spans)} (of {layers}, counted from 0)"


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


def _rope_entry(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """The RoPE parameters of a layer type in either spelling of the config; empty if it has none."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    if layer_type is None:
        return parameters or config.get("rope_scaling") or {}
    if parameters:
        return parameters[layer_type]  # type: ignore[no-any-return]
    # In the older spelling rope_scaling applies only to the full layers.
    return (config.get("rope_scaling") or {}) if layer_type == "full_attention" else {}
