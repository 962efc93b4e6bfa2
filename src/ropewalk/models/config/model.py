"""ModelConfig: a decoder's config, read once and in one place.

transformers states the attention of layers in many spellings: a list of layer types, a window for all layers, a switch
beside the window, a pattern, a first layer with a window, a list of layers without RoPE. Only this module reads
them, with the keys of :mod:`ropewalk.models.config.layers`.
A config comes from a ``config.json`` (:mod:`ropewalk.models.config.file`) or from a transformers config in memory
(:meth:`ModelConfig.of`), with the same result. Nothing here needs transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ropewalk.attention.choices import Limit
from ropewalk.attention.options import Locality, stacked_reach
from ropewalk.errors import RopewalkError
from ropewalk.models.config.documented import Documented, documented
from ropewalk.models.config.layers import (
    ATTENDING,
    BASES_OF_LAYERS,
    BLOCKS,
    CHUNKED,
    COMPRESSED,
    FULL,
    HEADS_OF_LAYERS,
    INDEXED,
    INDEXERS,
    INDEXERS_SINCE,
    MIXERS,
    NUMBERS_OF_EXPERTS,
    RECURRENT,
    ROPE_NAMES,
    SERVED,
    SLIDING,
    SPARSE,
    WIDTHS,
    WITH_SINKS,
    Mixer,
    check_layers,
    check_list_lengths,
    derived_kinds,
    dims_of,
    layer_values,
    layers_that_rotate,
    required_width,
    rope_entry,
    rope_name,
    shape_values,
    which_layers,
    width_of,
)
from ropewalk.models.support import loading_refusal, packing_refusal
from ropewalk.rope.config import OF_LAYERS, head_dim, layer_overrides, methods_from_config
from ropewalk.rope.methods import Yarn
from ropewalk.rope.methods.base import ORIGINAL, RopeMethod
from ropewalk.versions import older_transformers

DRAFTS = "drafts tokens from the hidden states and keys of another model; extend that model"
NO_DECODERS = {
    "blt": "has four RoPEs, and reads bytes in patches that a second model inside it chooses; ropewalk extends only "
    "models with one decoder that reads tokens",
    "diffusion_gemma": "generates blocks of tokens by diffusion, not token after token",
    "dory": "runs some of its layers several times for a token; ropewalk supports only models that run each layer once "
    "for a token",
    "gemma4_assistant": DRAFTS,
    "gemma4_unified_assistant": DRAFTS,
    "molmo2": "has two RoPEs, one of which it uses in the layers of rope_scaling_layers; ropewalk sets one for all "
    "layers",
    "shieldgemma2": "classifies images; extend a Gemma 3 model instead",
    "idefics": "attends to an image in every call; ropewalk trains and evaluates models on text alone",
}
"""Model types that cannot be extended by themselves, and why: predicates whose subject is the model."""
PER_TOKEN = ("mlp", "moe")
"""Layer types in which no token attends to another."""
CHANGES_ITS_MASK = ("doge",)
"""Model types whose attention adds its own scores to the mask, which no engine receives."""
BEYOND_ANY_CONTEXT = 2**30
"""A window in tokens that limits nothing, for classes that require one."""


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
        return self.kind in ATTENDING

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
        whole_type: model type of the whole model, which may have encoders beside the decoder; None if transformers has
            no class for it.
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
    whole_type: str | None = None
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
        return cls(
            values, text.model_type, {}, type(text).__name__, whole_type=config.model_type, source=config
        )

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
        found = self._reaching_name
        if found is None:
            known = ", ".join(map(str, self.methods))
            raise RopewalkError(
                f"the layer types with RoPE in this model's config ({known}) have no full attention, so there is "
                f"nothing to plan"
            )
        return found

    @property
    def _reaching_name(self) -> str | None:
        """The key of the methods of layers that reach all earlier tokens; None if all layers share a method."""
        names = (rope_name(self.model_type, kind) for kind in (FULL, *SPARSE))
        return next((name for name in names if name in self.methods), None)

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The attention of each layer, first to last.

        Raises:
            RopewalkError: for an invalid value of a layer, such as a window of 0 or of "x" tokens, and for values that
                contradict each other, such as a layer with a window in a config without one.
        """
        check_layers(self.values)
        check_list_lengths(self.values)
        kinds = self.values.get("layer_types") or derived_kinds(self.values)
        windows = {kind: width_of(self.values, kind, kinds) for kind in WIDTHS if kind in kinds}
        turned = layers_that_rotate(self.values, kinds)
        overrides = layer_overrides(self.values)
        dims = [dims_of({**self.values, **overrides.get(number, {})}) for number in range(len(kinds))]
        # The key None holds the RoPE that all layers share.
        ropes = [
            self.methods.get(rope_name(self.model_type, kind), self.methods.get(None)) if rotates else None
            for kind, rotates in zip(kinds, turned, strict=True)
        ]
        still = [rope is not None and not rope.rotates for rope in ropes]
        return tuple(
            LayerConfig(
                kind,
                windows.get(kind),
                rotates and not stands,
                None if stands else rope,
                self.has_sinks,
                self.softcap,
                *both,
            )
            for kind, rotates, stands, rope, both in zip(kinds, turned, still, ropes, dims, strict=True)
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
    def mixer(self) -> Mixer | None:
        """The mixer of the recurrent layers; None if unknown."""
        return MIXERS.get(self.model_type or "")

    @property
    def recurrent_layers(self) -> list[int]:
        """Numbers of the layers with a recurrent mixer, from 0."""
        return [number for number, layer in enumerate(self.layers) if layer.is_recurrent]

    @property
    def indexed_layers(self) -> list[int]:
        """Numbers of the layers whose tokens an indexer chooses, from 0; empty unless it can do so in packed rows."""
        known = self.model_type in INDEXERS and older_transformers(INDEXERS_SINCE) is None
        return [number for number, layer in enumerate(self.layers) if known and layer.kind == INDEXED]

    @property
    def indexer_note(self) -> str | None:
        """One sentence on training with indexers; None if the model has none."""
        if not self.indexed_layers:
            return None
        return (
            "indexers are not trained: no gradient reaches them, although a new RoPE also turns the queries and keys "
            "by which they choose tokens"
        )

    @property
    def shortest_window(self) -> int | None:
        """The shortest window of the layers in tokens; None if every layer sees all tokens."""
        return min((layer.window for layer in self.layers if layer.window is not None), default=None)

    @property
    def num_heads(self) -> int | None:
        return self.values.get("num_attention_heads")

    @property
    def heads_of_layers(self) -> tuple[int, ...]:
        """Number of query heads of each layer, first to last; 0 if the config does not state it."""
        listed, overrides = self.values.get(HEADS_OF_LAYERS), layer_overrides(self.values)
        own = listed or [self.num_heads or 0] * len(self.layers)
        return tuple(
            overrides.get(number, {}).get("num_attention_heads", heads) for number, heads in enumerate(own)
        )

    @property
    def common_heads(self) -> int | None:
        """The largest number that divides the query heads of every layer with attention: what ranks can share."""
        heads = [
            heads for heads, layer in zip(self.heads_of_layers, self.layers, strict=True) if layer.attends
        ]
        return math.gcd(*heads) if any(heads) else self.num_heads

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
        return dims_of({**self.values, OF_LAYERS: None, "head_dim": self.head_dim})[0]

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values in the layers of :attr:`head_dim`."""
        return dims_of({**self.values, OF_LAYERS: None, "head_dim": self.head_dim})[1]

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
    def vocab_size(self) -> int | None:
        """Rows of the embedding; None if neither the config nor its class states them."""
        return self.values.get("vocab_size")

    @property
    def max_position_embeddings(self) -> int | None:
        return self.values.get("max_position_embeddings")

    @property
    def trained_length(self) -> int:
        """Tokens that the checkpoint was trained for, as its publisher documents it, or otherwise as its config states.

        Some yarn configs state only the length before their factor.

        If the config leaves open whether its length is before or after the factor, the smaller of the two.

        Raises:
            RopewalkError: if neither the config nor the user states ``max_position_embeddings``.
        """
        if self.given_length is not None:
            return self.given_length
        length = self.max_position_embeddings
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise RopewalkError(f"the config must state max_position_embeddings in tokens, got {length!r}")
        if self.documented_length is not None:
            return self.documented_length
        if self.serves_longer is not None:
            return self.serves_longer.reaches
        kind = None if None in self.methods else self._reaching_name or FULL
        method = self.methods.get(kind)
        extended, original = None, self._stated_original(kind)
        # A longer max_position_embeddings is itself the extended length, even if the factor would reach further.
        if method is not None and original is not None and length <= original:
            extended = method.extended_length()
        return (self._dual_chunk_length or length) if extended is None else max(length, extended)

    @cached_property
    def documented(self) -> Documented | None:
        """What the publisher of a model with this config documents of its lengths; None if nothing is known."""
        method = self.methods.get(None, self.methods.get(FULL))
        # Dual chunk attention marks other models of the same shapes.
        return None if method is None or self.values.get(DUAL_CHUNK) else documented(self.values, method)

    @property
    def documented_length(self) -> int | None:
        """The trained length in tokens that the publisher documents, if it counts instead of the config's."""
        if self.documented is None or self.serves_longer is not None or self.given_length is not None:
            return None
        return self.documented.native

    @property
    def serves_longer(self) -> Documented | None:
        """The documented lengths, if the config has the publisher's yarn for longer texts; otherwise None."""
        scaled = any(isinstance(method, Yarn) for method in self.methods.values())
        return self.documented if scaled else None

    def _stated_original(self, layer_type: str | None) -> int | None:
        """``original_max_position_embeddings`` of a layer type, inside its RoPE parameters or beside them."""
        stated: int | None = rope_entry(self.values, layer_type).get(ORIGINAL)
        return self.values.get(ORIGINAL) if stated is None else stated

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
        return (
            self._kinds_with_windows == {SLIDING} and rope_name(self.model_type, SLIDING) not in self.methods
        )

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
                    f"the sliding windows of {self.model} cannot be removed, because its layers of type "
                    f"{', '.join(sorted(self._kinds_with_windows))} either attend in chunks or have their own RoPE"
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
                f"the sliding windows of {self.model} cannot be removed, because they determine which of its layers "
                "have RoPE"
            )
        return lifted

    # Warnings, notes for readers, and refusals.

    @property
    def config_warnings(self) -> list[str]:
        """Suspicious but not contradictory settings: sentences for a report, never an error."""
        length = self.max_position_embeddings
        warnings: list[str] = []
        for layer_type, method in self.methods.items():
            entry = rope_entry(self.values, layer_type)
            original = self._stated_original(layer_type)
            about = "" if layer_type is None else f"{layer_type}: "
            warnings += [about + sentence for sentence in method.config_warnings(entry, original, length)]
        warnings += [
            f"{key} is {self.values[key]}, but max_position_embeddings is {length}, which is used here"
            for key in OTHER_LENGTHS
            if isinstance(self.values.get(key), int) and self.values[key] != length
        ]
        warnings += self._length_notes()
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

    def _length_notes(self) -> list[str]:
        """What the publisher documents of the trained length, if the config states another."""
        longer = self.serves_longer
        if longer is not None:
            return [
                f"{longer.name}, whose shape this config has, is trained for {longer.native} tokens; its publisher "
                f"serves {longer.reaches} with this yarn, without training ({longer.source})"
            ]
        note = None if self.documented is None else self.documented.length_note()
        return [] if note is None or self.documented_length is None else [note]

    def _route_notes(self) -> list[str]:
        """What the publisher documents of longer texts without training."""
        note = None if self.documented is None or self.serves_longer else self.documented.route_note()
        return [] if note is None else [note]

    @property
    def documented_notes(self) -> list[str]:
        """What the publisher documents of the model's lengths, one sentence each."""
        return [*self._length_notes(), *self._route_notes()]

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
                f"{which_layers(recurrent, len(layers))} is recurrent and has no RoPE: training must teach it what to "
                "carry over a longer context, whatever the base"
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
            notes.append(f"{which_layers(windowed, len(layers))} sees only {sees}, whatever the base")
        for kind in SPARSE:
            sparse = [number for number, layer in enumerate(layers) if layer.kind == kind]
            if sparse:
                notes.append(f"{which_layers(sparse, len(layers))} {self._attends_to(kind)}")
        if still and len(still) == len(layers):
            notes.append("no layer has RoPE, so the base has no effect")
        elif still:
            notes.append(f"{which_layers(still, len(layers))} has no RoPE, so a new base does not change it")
        return notes

    def _attends_to(self, kind: str) -> str:
        """What a query of a sparse layer attends to: a predicate whose subject is the layer."""
        values = self.values
        if kind == INDEXED:
            some = "some" if values.get("index_topk") is None else f"{values['index_topk']:,}"
            return (
                f"attends to {some} earlier tokens, which an indexer chooses for each query at any distance"
            )
        if kind == BLOCKS:
            return (
                f"attends to {values['index_topk_blocks']} blocks of {values['index_block_size']} earlier tokens: to "
                "the nearest ones, and to those that an indexer chooses for each query at any distance"
            )
        entries = f"entries that stand for {values['compress_rates'][kind]} of them each"
        chosen = f", of which an indexer chooses {values['index_topk']}" if kind == COMPRESSED[0] else ""
        return f"attends to the last {values['sliding_window']} tokens, and to all earlier ones as {entries}{chosen}"

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
            notes.append(
                f"{which_layers(limiting, len(layers))} sees all earlier tokens and has RoPE: {what}"
            )
        if None not in self.methods:
            kinds = {name: kind for kind, name in ROPE_NAMES.get(self.model_type or "", {}).items()}
            others = ", ".join(
                f"{kinds[name]} ({name})" if name in kinds else str(name) for name in self.other_ropes
            )
            notes.append(f"layers of type {others} have their own RoPE, which is kept")
        elif some and any(layer.rotates for layer in layers if layer.window is not None):
            notes.append("layers with a window share that RoPE and get the new one too")
        if self.values.get("attn_temperature_tuning"):
            notes.append(
                "queries of layers without RoPE are scaled by their position (attn_temperature_tuning), within and "
                "beyond the trained length: leave that as it is"
            )
        notes += [self.indexer_note] if self.indexer_note else []
        notes += self._route_notes()
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

    def loading_refusals(self) -> list[str]:
        """Why ropewalk cannot load the model, as in :meth:`packing_refusals`; empty if it can."""
        refused = loading_refusal(self.whole_type)
        return [] if refused is None else [refused]

    def packing_refusals(self) -> list[str]:
        """Why packed rows cannot pass through the model: predicates whose subject is the model; empty if they can."""
        refused = []
        passable = (*SERVED, *PER_TOKEN, *(RECURRENT if self.mixer else ()))
        passable += (INDEXED,) if self.indexed_layers else ()
        # Reversed, so that the first layer of each kind is the one that a message names.
        other = {layer.kind: number for number, layer in reversed(list(enumerate(self.layers)))}
        unknown = [f"{kind} (first in layer {other[kind]})" for kind in sorted(set(other) - set(passable))]
        if unknown:
            refused.append(
                f"has layers of type {', '.join(unknown)}, through which packed documents would leak into each "
                "other; ropewalk supports full, sliding and chunked attention, the indexers of "
                f"{', '.join(INDEXERS)} (from transformers {INDEXERS_SINCE} on), and the recurrent layers of "
                f"{', '.join(MIXERS)}"
            )
        width = required_width(self.model_type)
        if width is not None and self.values.get(width) is None:
            refused.append(
                f"has {width} null in its config, but transformers runs models of type {self.model_type} only with a "
                f"number; in config.json, set {width} to a number of tokens, or to {BEYOND_ANY_CONTEXT} for no limit"
            )
        if self.model_type in CHANGES_ITS_MASK:
            refused.append("adds scores of its own to the attention mask, which no attention engine supports")
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
        refused = [*self.loading_refusals(), *self.packing_refusals()]
        # What only the code of a family shows, and not its config.
        shown = None if refused else packing_refusal(self.whole_type or self.model_type)
        if shown is not None:
            refused.append(f"does not support packed rows: {shown}")
        widest = self.widest_window
        if widest is not None and widest < context:
            layers = self.layers
            stacked = stacked_reach(self.localities, context)
            refused.append(
                f"has a sliding window of {widest:,} tokens in every layer, so with any RoPE a token attends to at "
                f"most {widest:,} tokens, and the windows of all {len(layers)} layers together reach {stacked:,}; "
                f"set lift: [windows] in the recipe to remove the windows, or lower the context from {context:,} to at "
                f"most {widest:,} tokens"
            )
        kinds = sorted({layer.kind for layer in self.layers})
        if FULL in self.methods and FULL not in kinds:
            refused.append(
                f"has no layer of type {FULL}, whose RoPE a longer context changes; its layers are of type "
                f"{' and '.join(kinds)}"
            )
        if self.rotates_in_windows_alone(context) and not keeps_rope:
            refused.append(
                "has RoPE only in layers with a sliding window, where distances do not grow with the context, so "
                "another RoPE would extend nothing; set rope: {method: default} in every stage to keep its RoPE"
            )
        if not any(layer.rotates for layer in self.layers) and not keeps_rope:
            refused.append(
                "has no layer with RoPE, so another RoPE would extend nothing; to train it as it is, set rope: "
                "{method: default} in every stage"
            )
        return refused

    @property
    def dropout_refusals(self) -> list[str]:
        """The :meth:`training_refusals` that an edit of the config removes."""
        dropout = self.values.get("attention_dropout")
        if not dropout:
            return []
        return [
            f"has attention dropout {dropout}, which no attention engine supports; set attention_dropout to 0 in "
            "config.json"
        ]


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
