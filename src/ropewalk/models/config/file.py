"""A bare ``config.json``: find it, read it strictly, and complete it with transformers' class for its model type.

A ``config.json`` may be incomplete. For a value that it leaves out, transformers' config class for its ``model_type``
supplies a default: Llama 2's theta, GLM's partial rotation, both thetas of Gemma 3. These values are taken from the
class and reported, never assumed. Values in the file always take precedence; if the class would change one of them, the
file is rejected, because a load would not compute what the file says.

Reading a config reads no weights and runs no code of the checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ropewalk.errors import RopewalkError
from ropewalk.io.files import check_model_place, json_fault, not_found
from ropewalk.models.config.layers import (
    COMPRESSED_BASE,
    FULL,
    HYBRID,
    NUMBERS_OF_EXPERTS,
    RECURRENT,
    SERVED,
    SLIDING,
    check_layers,
    check_list_lengths,
    check_recurrent_heads,
    layer_values,
    rope_name,
    shape_values,
)
from ropewalk.models.config.model import ModelConfig, decoder_key, refuse_no_decoder
from ropewalk.rope import ROPE_KEYS, RopeMethod, methods_from_config
from ropewalk.rope.config import OF_LAYERS, SECTIONS, head_dim, layer_overrides, rotates_a_share
from ropewalk.rope.methods.base import ORIGINAL, PARTIAL, methods_by_type
from ropewalk.versions import older_transformers

CONFIG_ERRORS = (
    StrictDataclassError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that transformers raises for a config that it cannot use."""
MOST_CHARACTERS = 300


ALIASES = {
    "rotary_pct": "partial_rotary_factor",
    "rope_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "swa_rope_theta": "rope_local_base_freq",
}
"""Names of these keys in configs of GPT-NeoX (Pythia), the first StableLM, the first Qwen, and MiMo-V2-Flash."""
ATTENTION_KEYS = (
    *("attn_logit_softcapping", "attention_dropout", "qk_head_dim", "v_head_dim"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "attn_temperature_tuning"),
    *("index_topk", "index_topk_blocks", "index_block_size", "compress_rates"),
)
NAMED_SHAPE_KEYS = ("hidden_size", "num_attention_heads", "max_position_embeddings")

OLD_LAYER_TYPES = ("attention", "mamba")
"""Names of layer types in older configs of hybrid models."""
PATTERNS_IN_LETTERS = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
"""Keys of Nemotron-H that state a type for each layer, in letters."""
LETTERS = {"M": "Mamba-2", "E": "experts", "*": "attention", "-": "MLP"}
"""Letters of these patterns, with what a layer is."""
ROPE_WORD = re.compile(r"(^|_)(rope|rotary|ntk)(_|$)")
ROTARY_DIM_SINCE = {"minimax_m2": "5.18"}
"""Model types whose class reads ``rotary_dim`` only from this transformers on."""
UNDERSTOOD = {*ROPE_KEYS, *ALIASES, *ATTENTION_KEYS, "rotary_dim"}
READ_FLAT = {
    "fuyu": "persimmon",
    "paddleocr_vl": "paddleocr_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
}
"""Model types in whose published configs the decoder's values stand at the top level, with the type of the decoder."""
WITHOUT_ROPE = (None, "absolute", "alibi", "nope", "relative_key", "relative_key_query")
"""Values of ``position_embedding_type``; GraniteMoeHybrid writes null if it has no RoPE."""
MAY_BE_DENSE = (
    *("doge", "flint", "gemma4_text", "granitemoehybrid", "longcat_flash"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next"),
)
"""Model types that take 0 experts for a decoder without any."""


def read_model_config(model: str, at: str | os.PathLike[str] | None = None) -> ModelConfig:
    """The config of a folder, of a JSON file, or of a model on the Hugging Face Hub.

    Args:
        model: folder, path of the file itself, or hub id.
        at: path of the config, if ``model`` is a name that only the caller can resolve (``embedded``).

    Raises:
        RopewalkError: if there is no such config, it has no RoPE or contradicts itself, or transformers would
            read a different RoPE from it.
    """
    return config_from_json(read_config_file(model, at), model)


def config_from_json(raw: Mapping[str, Any], model: str = "the model") -> ModelConfig:
    """The decoder's config in the contents of a ``config.json``, complete with regard to RoPE and layers.

    ``values`` are those of the file, or of its ``text_config``, with ``defaults`` added. Values that the file states
    under other names are also added under the name that is read (``rotary_pct``, ``layer_types``, the whole model's
    dtype).

    Args:
        raw: the parsed file.
        model: the checkpoint as the user named it, for messages.

    Raises:
        RopewalkError: as for :func:`read_model_config`.
    """
    refuse_no_decoder(model, raw.get("model_type"))
    config_class = class_of(raw.get("model_type"))
    decoder, flat = raw, False
    if isinstance(raw.get("text_config"), Mapping):
        decoder = raw["text_config"]
    elif raw.get("model_type") in READ_FLAT:
        decoder, flat = {**raw, "model_type": READ_FLAT[raw["model_type"]]}, True
    if decoder.get("qk_rope_head_dim") == 0:
        raise RopewalkError(
            f"{model} has no RoPE: qk_rope_head_dim, the part of a head that is rotated, is 0"
        )
    _refuse_two_places(raw, decoder, config_class, "text_config")
    # Without a class there are no defaults, so the file must state everything that is read.
    if config_class is None:
        stated = under_known_names(decoder)
        _check_rotary_dim(stated, methods_from_config(stated))
        _refuse_unknown_keys(decoder, None)
        return ModelConfig(stated, model)
    _check_stated(decoder, config_class)
    # Stated values are checked before the class is built: it fills in defaults that would hide what a file lacks.
    outer = build(model, config_class, raw)
    text, name = _decoder_of(model, outer)
    if name is not None and not flat:
        decoder = raw.get(name) or {}
        _refuse_two_places(raw, decoder, config_class, name)
        if name != "text_config":
            _check_stated(decoder, type(text))
    _refuse_without_rope(model, text)
    _refuse_unknown_keys(decoder, type(text))
    _refuse_other_layers(model, decoder, text)
    _refuse_without_attention(model, text)
    check_recurrent_heads(text.to_dict(), layer_values(text)["layer_types"])
    _refuse_idle_rope(model, decoder, text)
    _refuse_missing_rope(model, text)
    values, defaults = completed(decoder, text)
    # The file of a whole model may state the dtype outside the decoder's part.
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and not (values.get("dtype") or values.get("torch_dtype")):
        values["dtype"] = dtype
    methods = methods_from_config(values)
    _check_rotary_dim(values, methods)
    _check_axes(values, methods)
    _refuse_unread_length(decoder, text)
    _refuse_disagreement(model, methods, text)
    _refuse_base_of_attention(decoder, methods)
    return ModelConfig(values, model, defaults, type(text).__name__, whole_type=raw["model_type"])


def read_config_file(model: str, at: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The JSON object of a ``config.json``: in a folder, given as a file, or of a model on the Hugging Face Hub.

    Args:
        model: folder, path of the file itself, or hub id.
        at: path of the config, if ``model`` is a name that only the caller can resolve.

    Raises:
        RopewalkError: if it does not exist, is not a JSON object, or contains a key twice.
    """
    return _read_json(_find(model, at))


def _find(model: str, at: str | os.PathLike[str] | None) -> Path:
    path = Path(model if at is None else at).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise RopewalkError(f"{model} has no config.json")
    elif not path.is_file():
        check_model_place(model)
        path = _from_hub(model)
    if _is_gguf(path):
        raise RopewalkError(
            f"{model} is a GGUF file, which has no config.json; give the folder of the model that it was converted "
            "from (with `ropewalk export FOLDER --gguf FILE --out NEW`, a copy of the file gets the model's RoPE)"
        )
    return path


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        # Reading it as JSON says what is wrong.
        return False


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise not_found(model, "config.json", error) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise RopewalkError(f"cannot read {path} as JSON: {json_fault(error)}") from error
    if not isinstance(config, dict):
        raise RopewalkError(f"{path} must contain a JSON object, got {type(config).__name__}")
    return config


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """A JSON object without repeated keys, of which Python would silently keep the last value."""
    # transformers writes values that JSON lacks, such as infinity, in this form.
    if len(pairs) == 1 and pairs[0][0] == "__float__":
        return float(pairs[0][1])
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:
            raise RopewalkError(
                f"the config has {key} twice, {values[key]!r} and {value!r}; remove the wrong one"
            )
        values[key] = value
    return values


def _decoder_of(model: str, outer: Any) -> tuple[Any, str | None]:
    """The decoder's config, and its key in the config of the whole model; None if it is the whole config."""
    try:
        text = outer.get_text_config()
    except ValueError as error:
        raise RopewalkError(f"{model} has no single decoder: {one_line(error)}") from error
    return text, decoder_key(outer)


def _refuse_two_places(
    raw: Mapping[str, Any], decoder: Mapping[str, Any], config_class: Any, part: str
) -> None:
    # Fields of the outer class are its own: MusicFlamingo uses RoPE for audio too.
    own = set() if config_class is None else {field.name for field in fields(config_class)}
    for key in (*ROPE_KEYS, "max_position_embeddings", "head_dim"):
        outside, inside = raw.get(key), decoder.get(key)
        if key in own or outside is None or decoder is raw or outside == inside:
            continue
        if inside is not None:
            raise RopewalkError(
                f"{key} is {outside!r} at the top level of the config but {inside!r} in {part}; remove the "
                f"wrong one"
            )
        raise RopewalkError(
            f"transformers reads {key} only in {part}, but the config has {key} {outside!r} at the top level; "
            f"move the key into {part}"
        )


def _check_stated(decoder: Mapping[str, Any], config_class: Any) -> None:
    """Raise for values that are wrong on their own, before a class hides them or reports a different problem."""
    stated = under_known_names(decoder)
    check_layers(stated)
    _refuse_no_experts(stated, config_class)
    heads, kv_heads = stated.get("num_attention_heads"), stated.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        raise RopewalkError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads} in the config; "
            "correct one of them"
        )
    # Without a stated base the methods can be read only after the class has supplied one.
    if not states(stated, "rope_theta"):
        return
    # Dimensions that the file leaves out are those of the class.
    for key in ("head_dim", *NAMED_SHAPE_KEYS):
        default = getattr(config_class, key, None)
        if stated.get(key) is None and isinstance(default, int):
            stated[key] = default
    if stated.get("head_dim") is not None or (
        stated.get("hidden_size") is not None and stated.get("num_attention_heads") is not None
    ):
        methods_from_config(stated)


def _refuse_without_rope(model: str, text: Any) -> None:
    name = type(text).__name__
    if getattr(text, "alibi", False):
        raise RopewalkError(f"{model} has ALiBi positions and no RoPE ({name})")
    if getattr(text, "position_embedding_type", "rope") in WITHOUT_ROPE:
        raise RopewalkError(
            f"{model} has no RoPE: position_embedding_type is {text.position_embedding_type!r} ({name})"
        )
    if not getattr(text, "rope_parameters", None):
        raise RopewalkError(
            f"{model} has no RoPE that a config can describe: model type {text.model_type!r} ({name}) has no RoPE "
            "parameters"
        )


def _refuse_unknown_keys(decoder: Mapping[str, Any], config_class: Any) -> None:
    known = UNDERSTOOD | (set() if config_class is None else {field.name for field in fields(config_class)})
    for key, value in decoder.items():
        if value and key not in known and ROPE_WORD.search(key):
            raise RopewalkError(
                f"{key} {value!r} in the config is unknown to ropewalk and could change the RoPE frequencies; "
                f"remove {key} if it does not change them"
            )


def _check_rotary_dim(values: Mapping[str, Any], methods: Mapping[str | None, RopeMethod]) -> None:
    stated, since = values.get("rotary_dim"), ROTARY_DIM_SINCE.get(values.get("model_type") or "")
    for method in methods.values():
        if stated is not None and stated != method.rotary_dim:
            refusal = f"rotary_dim is {stated!r}, but the rest of the config gives {method.rotary_dim}"
            if since is not None and (installed := older_transformers(since)) is not None:
                refusal += f", as transformers {installed} would compute; use transformers {since} or later"
            else:
                refusal += "; correct rotary_dim, or the other keys"
            raise RopewalkError(refusal)


def _check_axes(values: Mapping[str, Any], methods: Mapping[str | None, RopeMethod]) -> None:
    """Raise if the axes of images do not share all pairs of a head."""
    for key in ("rope_parameters", "rope_scaling"):
        entry = values.get(key) or {}
        entries: list[tuple[str | None, Any]] = [(None, entry), *_nested(entry).items()]
        for kind, each in entries:
            sections, method = each.get(SECTIONS), methods.get(kind)
            if sections is None or method is None:
                continue
            given, rotated = sum(sections), method.rotary_dim // 2
            if given != rotated:
                raise RopewalkError(
                    f"{SECTIONS} {list(sections)} gives positions in images to {given} pairs of dimensions, but a head "
                    f"rotates {rotated}; correct {SECTIONS}, or the dimensions of a head"
                )


def _refuse_unread_length(decoder: Mapping[str, Any], text: Any) -> None:
    """Raise for an original length that stands only at the top level, if the class of the model does not read it."""
    stated = decoder.get(ORIGINAL)
    places = [key for key in ("rope_parameters", "rope_scaling") if decoder.get(key)]
    entries = [text.rope_parameters, *_nested(text.rope_parameters).values()]
    taken = next((entry[ORIGINAL] for entry in entries if entry.get(ORIGINAL) not in (None, stated)), None)
    inside = any(
        ORIGINAL in entry for key in places for entry in (decoder[key], *_nested(decoder[key]).values())
    )
    if stated is not None and taken is not None and not inside:
        raise RopewalkError(
            f"{ORIGINAL} {stated} stands at the top level of the config, where transformers does not read it for "
            f"model type {text.model_type!r}: it would take {taken} instead; move {ORIGINAL} into "
            f"{' and '.join(places) or 'rope_parameters'}"
        )


def _refuse_disagreement(model: str, stated: Mapping[str | None, RopeMethod], text: Any) -> None:
    # transformers uses only rope_parameters; other RoPE keys of a file are kept but ignored.
    kept = {
        k: v for k, v in text.to_dict().items() if k not in ROPE_KEYS or k in ("rope_parameters", ORIGINAL)
    }
    # Some classes have other names for dimensions: kv_channels, and those of DBRX.
    computed = methods_from_config({**kept, **shape_values(text)})
    if dict(stated) != computed:
        raise RopewalkError(
            f"the config of {model} states {_difference(stated, computed, type(text).__name__)}; correct the file, so "
            "that a loaded model computes what the file states"
        )


def _refuse_other_layers(model: str, decoder: Mapping[str, Any], text: Any) -> None:
    """Raise for a layer whose type the class replaces, as Gemma 4's does with the last one."""
    stated, held = decoder.get("layer_types"), getattr(text, "layer_types", None)
    if not isinstance(stated, list) or not isinstance(held, list) or len(stated) != len(held):
        return
    for number, (kind, other) in enumerate(zip(stated, held, strict=True)):
        if kind != other and kind not in OLD_LAYER_TYPES:
            raise RopewalkError(
                f"layer {number} of {model} is {kind!r} in layer_types, but transformers' {type(text).__name__} makes "
                f"it {other!r}; correct layer_types, so that a loaded model computes what its config states"
            )


def _refuse_no_experts(stated: Mapping[str, Any], config_class: Any) -> None:
    """Raise for 0 experts where a token has to choose from them."""
    routes = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    if config_class.model_type in MAY_BE_DENSE:
        return
    for key in NUMBERS_OF_EXPERTS:
        experts = stated.get(key)
        if key in routes and type(experts) is int and experts < 1:
            raise RopewalkError(
                f"{key} is {experts} in the config, but must be at least 1: layers of {config_class.model_type} route "
                "tokens to experts"
            )


def _refuse_without_attention(model: str, text: Any) -> None:
    """Raise for a hybrid model all of whose layers are recurrent."""
    kinds = layer_values(text)["layer_types"]
    if set(kinds) <= set(RECURRENT) - {HYBRID}:
        raise RopewalkError(
            f"{model} has no attention and so no RoPE: layer_types is {' or '.join(sorted(set(kinds)))} for each of "
            f"its {len(kinds)} layers, 0 to {len(kinds) - 1}"
        )


def _refuse_idle_rope(model: str, decoder: Mapping[str, Any], text: Any) -> None:
    """Raise for the RoPE of a layer type that no layer has.

    What the class supplies by itself is accepted: every written config of Gemma 3 has it, whatever its layers are.
    """
    kinds = layer_values(text)["layer_types"]
    used = {rope_name(text.model_type, kind) for kind in kinds}
    idle = [name for name in _nested(decoder.get("rope_parameters")) if name not in used]
    if not idle:
        return
    own = build(model, type(text), {key: value for key, value in decoder.items() if key not in ROPE_KEYS})
    supplied, held = (
        {kind: {"rope_type": "default", **entry} for kind, entry in _nested(each.rope_parameters).items()}
        for each in (own, text)
    )
    for kind in idle:
        if kind not in supplied or held.get(kind) != supplied[kind]:
            raise RopewalkError(
                f"rope_parameters has {dict(decoder['rope_parameters'][kind])} for layers of type {kind}, which "
                f"{model} does not have: its layers are of type {' and '.join(sorted(set(kinds)))}; remove the entry, "
                "or correct layer_types"
            )


def _refuse_missing_rope(model: str, text: Any) -> None:
    """Raise for attention of a type without an entry in RoPE parameters by type; null states that it has no RoPE."""
    if not _nested(text.rope_parameters):
        return
    for number, kind in enumerate(layer_values(text)["layer_types"]):
        if kind in SERVED and rope_name(text.model_type, kind) not in text.rope_parameters:
            raise RopewalkError(
                f"rope_parameters of {model} has no entry for layers of type {kind} (layer {number}); add the entry, "
                "or write null if these layers have no RoPE"
            )


def _refuse_base_of_attention(decoder: Mapping[str, Any], methods: Mapping[str | None, RopeMethod]) -> None:
    """Raise for DBRX's base in ``attn_config``, where transformers 5 ignores it and uses a different one."""
    attention = decoder.get("attn_config")
    stated = attention.get("rope_theta") if isinstance(attention, Mapping) else None
    if stated is not None and all(method.rope_theta != stated for method in methods.values()):
        there = ", ".join(f"{method.rope_theta:g}" for method in methods.values())
        raise RopewalkError(
            f"rope_theta is {stated} in attn_config, where transformers does not read it, so a loaded model computes "
            f"with {there}; write rope_theta: {stated} beside attn_config"
        )


def _difference(
    stated: Mapping[str | None, RopeMethod], computed: Mapping[str | None, RopeMethod], reader: str
) -> str:
    """``rotary_dim 32, but transformers' DbrxConfig reads 128``: the first field in which two readings differ."""
    reads = f"but transformers' {reader} reads"
    if set(stated) != set(computed):
        return f"one RoPE for {_kinds(stated)}, {reads} one for {_kinds(computed)}"
    kind = next(kind for kind in stated if stated[kind] != computed[kind])
    ours, theirs = stated[kind], computed[kind]
    if type(ours) is not type(theirs):
        return f"RoPE method {ours.name}, {reads} {theirs.name}"
    name = next(f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name))
    return f"{name} {getattr(ours, name)}, {reads} {getattr(theirs, name)}"


def _kinds(methods: Mapping[str | None, RopeMethod]) -> str:
    return ", ".join("all layers" if kind is None else kind for kind in methods)


def completed(decoder: Mapping[str, Any], text: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decoder's values completed with the defaults of its class, and these defaults."""
    values = under_known_names(decoder)
    defaults: dict[str, Any] = {}
    _complete_shape(values, defaults, text)
    _complete_window(values, defaults, text)
    _complete_rope(values, defaults, text)
    values |= layer_values(text)
    # Gemma 4's class gives layers with full attention a head_dim of their own.
    if layer_overrides(values) and decoder.keys().isdisjoint((OF_LAYERS, "global_head_dim")):
        defaults[f"{FULL}.head_dim"] = head_dim(values, FULL)
    for key in (*ATTENTION_KEYS, "vocab_size"):
        # These keys do not affect RoPE, so they are not reported as defaults.
        if key not in values and getattr(text, key, None) is not None:
            values[key] = getattr(text, key)
    values.setdefault("model_type", text.model_type)
    return values, defaults


def _complete_shape(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    shape = shape_values(text)
    for key in NAMED_SHAPE_KEYS:
        if values.get(key) is None and key in shape:
            # A class may use another name for it in the file: n_embd.
            if values.get(type(text).attribute_map.get(key, key)) is None:
                defaults[key] = shape[key]
            values[key] = shape[key]
    if values.get("num_key_value_heads") is None and "num_key_value_heads" in shape:
        # It does not affect RoPE, so it is shown but not reported as a default.
        values["num_key_value_heads"] = shape["num_key_value_heads"]
    heads = values.get("num_attention_heads")
    derived = heads and values.get("hidden_size") and values["hidden_size"] / heads
    # A head_dim that follows from the other two values is no default to report.
    if values.get("head_dim") is None and shape.get("head_dim", derived) != derived:
        values["head_dim"] = defaults["head_dim"] = shape["head_dim"]


def _complete_window(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    """Complete the window; a window that the file sets to null stays off, although Mistral's class would add one."""
    window = getattr(text, "sliding_window", None)
    if "sliding_window" not in values and isinstance(window, int):
        values["sliding_window"] = defaults["sliding_window"] = window
    if values.get("sliding_window") is None:
        return
    switch = getattr(text, "use_sliding_window", None)
    if "use_sliding_window" not in values and isinstance(switch, bool):
        values["use_sliding_window"] = defaults["use_sliding_window"] = switch


def _complete_rope(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    by_layer = _nested(text.rope_parameters)
    if not by_layer:
        _complete_flat(values, defaults, text)
    elif _nested(values.get("rope_parameters")):
        _complete_entries(values, defaults, by_layer)
    elif set(by_layer) == {FULL, SLIDING} and (values.get("rope_scaling") or _two_bases(by_layer)):
        _complete_two_thetas(values, defaults, by_layer)
    else:
        # The older spelling cannot express these entries, so only the class can interpret its keys.
        keys = (*ROPE_KEYS, COMPRESSED_BASE)
        stated = {value for key in keys if isinstance(value := values.get(key), int | float)}
        stated.add(_share_of_head(values))
        for key in ROPE_KEYS:
            values.pop(key, None)
        values["rope_parameters"] = {kind: dict(entry) for kind, entry in by_layer.items()}
        for kind, entry in by_layer.items():
            for key in ("rope_theta", "partial_rotary_factor"):
                if key in entry and entry[key] not in stated:
                    defaults[f"{kind}.{key}"] = entry[key]


def _two_bases(by_layer: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the entries differ in their bases alone."""
    plain = all(entry.get("rope_type", "default") == "default" for entry in by_layer.values())
    return plain and len({entry.get(PARTIAL, 1) for entry in by_layer.values()}) == 1


def _complete_flat(values: dict[str, Any], defaults: dict[str, Any], text: Any) -> None:
    parameters = text.rope_parameters
    silent = values.keys().isdisjoint(("rope_scaling", "rope_parameters"))
    if silent and parameters.get("rope_type", "default") != "default":
        apart = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in parameters.items() if key not in apart}
        values["rope_scaling"] = defaults["rope_scaling"] = scaling
    if not states(values, "rope_theta"):
        values["rope_theta"] = defaults["rope_theta"] = parameters.get("rope_theta")
    partial = parameters.get("partial_rotary_factor")
    # 1 rotates all dimensions, as a file without the key does.
    if not states(values, "partial_rotary_factor") and partial not in (None, 1):
        values["partial_rotary_factor"] = partial
        if partial != _share_of_head(values):
            defaults["partial_rotary_factor"] = partial
    original = parameters.get(ORIGINAL)
    # Without an earlier length transformers writes the present one, which is not a default of the class.
    if not states(values, ORIGINAL) and original not in (None, values.get("max_position_embeddings")):
        values[ORIGINAL] = defaults[ORIGINAL] = original


def _share_of_head(values: Mapping[str, Any]) -> float:
    """The ``partial_rotary_factor`` that a config states as ``qk_rope_head_dim``; 1 if it does not."""
    rotated, whole = values.get("qk_rope_head_dim"), values.get("head_dim")
    return rotated / whole if rotates_a_share(values) and rotated and whole else 1.0


def _complete_entries(
    values: dict[str, Any], defaults: dict[str, Any], by_layer: Mapping[str, Mapping[str, Any]]
) -> None:
    nested = values["rope_parameters"]
    for kind, entry in by_layer.items():
        # null means that these layers have no position embedding.
        if kind in nested and nested[kind] is None:
            continue
        stated = nested.setdefault(kind, {})
        for key in ("rope_theta", "partial_rotary_factor"):
            if stated.get(key) is None and entry.get(key) is not None:
                stated[key] = defaults[f"{kind}.{key}"] = entry[key]


def _complete_two_thetas(
    values: dict[str, Any], defaults: dict[str, Any], by_layer: Mapping[str, Mapping[str, Any]]
) -> None:
    """Complete Gemma 3's spelling: ``rope_theta`` and ``rope_scaling`` for full layers, another theta for sliding."""
    theta, local = (by_layer[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention"))
    if values.get("rope_theta") is None:
        values["rope_theta"] = defaults["rope_theta"] = theta
    if values.get("rope_local_base_freq") is None:
        values["rope_local_base_freq"] = local
        # Olmo 3 has one theta for both, which the file may state.
        if "rope_theta" in defaults or local != theta:
            defaults["rope_local_base_freq"] = local
    partial = by_layer[FULL].get(PARTIAL)
    if not states(values, PARTIAL) and partial not in (None, 1):
        values[PARTIAL] = defaults[PARTIAL] = partial


def under_known_names(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which values under old names also appear under the names that are read."""
    values: dict[str, Any] = deepcopy(dict(decoder))
    for alias, key in ALIASES.items():
        old = values.get(alias)
        if old is None:
            continue
        if values.get(key) is not None and values[key] != old:
            raise RopewalkError(f"{alias} is {old!r} but {key} is {values[key]!r}; remove the wrong one")
        if not states(values, key):
            values[key] = old
    return values


def states(values: Mapping[str, Any], key: str) -> bool:
    places = (values, values.get("rope_parameters"), values.get("rope_scaling"))
    return any(isinstance(place, Mapping) and place.get(key) is not None for place in places) or any(
        key in entry and entry[key] is not None for entry in _nested(values.get("rope_parameters")).values()
    )


def _nested(parameters: Any) -> dict[str, Mapping[str, Any]]:
    """The entries of RoPE parameters by layer type; None if they are flat."""
    if not isinstance(parameters, Mapping):
        return {}
    return {key: entry for key, entry in parameters.items() if isinstance(entry, Mapping)}


def class_of(model_type: object) -> Any:
    """transformers' config class for a model type; None if there is none."""
    from transformers import CONFIG_MAPPING

    return (
        CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
    )


def build(model: str, config_class: Any, values: Mapping[str, Any]) -> Any:
    try:
        with quiet():
            return config_class.from_dict(_with_present_types(values))
    except CONFIG_ERRORS as error:
        _name_the_layer(values)
        # The text of a KeyError is the key alone.
        why = f"KeyError: {one_line(error)}" if isinstance(error, KeyError) else one_line(error)
        raise RopewalkError(
            f"transformers' {config_class.__name__} rejects the config of {model}: {why}"
        ) from error


def rebuilt(config: ModelConfig) -> Any | None:
    """A config of transformers' class for the decoder, with its values; None if transformers does not know the type.

    Raises:
        RopewalkError: if the class rejects the values.
    """
    config_class = class_of(config.model_type) if config.config_class else None
    if config_class is None:
        return None
    # Remote code is never run, and there are no weights to quantise.
    left_out = ["auto_map", "quantization_config"]
    # Bamba and Falcon-H1 derive the list that we read as layer_types from other keys, and take none.
    attribute = config_class.attribute_map.get("layer_types", "layer_types")
    if isinstance(getattr(config_class, attribute, None), property):
        left_out.append("layer_types")
    return build(config.model, config_class, {k: v for k, v in config.values.items() if k not in left_out})


def _name_the_layer(values: Mapping[str, Any]) -> None:
    """Raise for a layer that explains why a class rejects a config; the class's own message names no layer."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    decoder = values["text_config"] if isinstance(values.get("text_config"), Mapping) else values
    for number, kind in enumerate(decoder.get("layer_types") or ()):
        if kind not in (*ALLOWED_LAYER_TYPES, *OLD_LAYER_TYPES):
            raise RopewalkError(
                f"layer_types is {kind!r} in the config for layer {number}, a type unknown to transformers; "
                f"ropewalk supports {', '.join(SERVED)}, and for recurrent layers {', '.join(RECURRENT)}"
            )
    for key in PATTERNS_IN_LETTERS if decoder.get("model_type") == "nemotron_h" else ():
        pattern = decoder.get(key)
        for number, letter in enumerate(pattern if isinstance(pattern, str) else ()):
            if letter not in LETTERS:
                known = ", ".join(f"{each} ({kind})" for each, kind in LETTERS.items())
                raise RopewalkError(
                    f"{key} is {pattern!r} in the config, with the unknown letter {letter!r} for layer {number}; the "
                    f"known ones are {known}"
                )
    check_list_lengths(decoder)


def _with_present_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with current names of RoPE types; a copy because from_dict writes into its argument.

    transformers 5 maps su to longrope, but looks for its original length before that.
    """
    copy = deepcopy(dict(values))
    today = {name: method.name for name, method in methods_by_type().items()}
    for place in (copy, copy.get("text_config")):
        scaling = place.get("rope_scaling") if isinstance(place, dict) else None
        if isinstance(scaling, dict):
            for key in ("type", "rope_type"):
                if isinstance(scaling.get(key), str):
                    scaling[key] = today.get(scaling[key], scaling[key])
    return copy


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log about oddities of a config; those that matter are raised or reported here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def one_line(error: BaseException) -> str:
    """The first sentence of an error; in the second, transformers lists every class it has."""
    text = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return (text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…") or type(error).__name__
