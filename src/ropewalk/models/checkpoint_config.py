"""RoPE of a checkpoint from its bare ``config.json``: what it says, what its class adds, what a load holds.

A ``config.json`` need not be complete. Where it leaves a value out, transformers' config class for its
``model_type`` supplies one: Llama 2's theta, GLM's partial rotation, both thetas of Gemma 3. Those values are
taken from the class and named, never assumed. What the file itself says always wins, and where the class would
make something else of it, the file is refused: a load would not compute what the file says.

No weights are read and no code of the checkpoint is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.models.config_class import build, class_of, one_line
from ropewalk.models.config_defaults import ALIASES, SHAPE_KEYS, completed, states, under_known_names
from ropewalk.models.config_file import read_config_file
from ropewalk.rope import ROPE_KEYS, RopeMethod, methods_from_config
from ropewalk.rope.methods.base import ORIGINAL

ROPE_WORD = re.compile(r"(^|_)(rope|rotary|ntk)(_|$)")


UNDERSTOOD = {*ROPE_KEYS, *ALIASES, "rotary_dim"}


WITHOUT_ROPE = (None, "absolute", "alibi", "nope", "relative_key", "relative_key_query")
"""Values of ``position_embedding_type``; GraniteMoeHybrid says null where it has no RoPE."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The config of a checkpoint's decoder, complete as far as RoPE goes.

    Attributes:
        model: the checkpoint as the user named it.
        values: what ``config.json`` says, or its ``text_config``, with ``defaults`` added, and with what follows
            from the file itself under the name that :func:`ropewalk.rope.methods_from_config` reads
            (``rotary_pct``, ``layer_types``, the whole model's dtype).
        defaults: the values that the file leaves out and the config class supplies. A key of one layer type
            has its name in front: ``full_attention.rope_theta``.
        config_class: transformers' class for the decoder; None where it knows none and the file stands alone.
    """

    model: str
    values: dict[str, Any]
    defaults: dict[str, Any]
    config_class: str | None


def read_checkpoint_config(model: str, at: str | os.PathLike[str] | None = None) -> CheckpointConfig:
    """The config of a folder, of a JSON file, or of a model on the Hugging Face Hub.

    Args:
        model: folder, path of the file itself, or hub id.
        at: where it lies, if ``model`` is a name that only the caller knows (``embedded``).

    Returns:
        A config from which :func:`ropewalk.rope.methods_from_config` reads what transformers computes with.

    Raises:
        RopewalkError: if there is no such config, it has no RoPE or contradicts itself, or transformers would
            make another RoPE of it than it says.
    """
    raw = read_config_file(model, at)
    config_class = class_of(raw.get("model_type"))
    decoder = raw["text_config"] if isinstance(raw.get("text_config"), Mapping) else raw
    _refuse_two_places(raw, decoder, config_class)
    if config_class is None:
        stated = under_known_names(decoder)
        _check_rotary_dim(stated, methods_from_config(stated))
        _refuse_unknown_keys(decoder, None)
        return CheckpointConfig(model, stated, {}, None)
    _check_stated(decoder, config_class)
    outer = build(model, config_class, raw)
    text, name = _decoder_of(model, outer)
    if name is not None:
        decoder = raw.get(name) or {}
    _refuse_without_rope(model, text)
    _refuse_unknown_keys(decoder, type(text))
    values, defaults = completed(decoder, text)
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and not (values.get("dtype") or values.get("torch_dtype")):
        values["dtype"] = dtype
    methods = methods_from_config(values)
    _check_rotary_dim(values, methods)
    _refuse_disagreement(model, methods, text)
    return CheckpointConfig(model, values, defaults, type(text).__name__)


def _decoder_of(model: str, outer: Any) -> tuple[Any, str | None]:
    """The config of the decoder, and the key that it has in the whole model's; None where it is the whole."""
    try:
        text = outer.get_text_config()
    except ValueError as error:
        raise RopewalkError(f"{model} has no one decoder: {one_line(error)}") from error
    if getattr(text, "is_heterogeneous", False):
        raise RopewalkError(
            f"{model} has layers of different shapes ({type(text).__name__}), which is not supported"
        )
    if text is outer:
        return text, None
    for name in type(outer).sub_configs:
        if getattr(outer, name, None) is text:
            return text, str(name)
    raise RopewalkError(
        f"{type(outer).__name__} has its decoder's config, a {type(text).__name__}, where ropewalk cannot find "
        "it; give a file that holds the decoder's config alone"
    )


def _refuse_two_places(raw: Mapping[str, Any], decoder: Mapping[str, Any], config_class: Any) -> None:
    # What the outer class has a field for is its own: MusicFlamingo turns its audio too.
    own = set() if config_class is None else {field.name for field in fields(config_class)}
    for key in (*ROPE_KEYS, "max_position_embeddings", "head_dim"):
        outside, inside = raw.get(key), decoder.get(key)
        if key in own or outside is None or decoder is raw or outside == inside:
            continue
        if inside is not None:
            raise RopewalkError(
                f"{key} is {outside!r} in the config but {inside!r} in its text_config; remove the wrong one"
            )
        raise RopewalkError(
            f"{key} {outside!r} stands outside text_config, where transformers does not look for it; move it inside"
        )


def _check_stated(decoder: Mapping[str, Any], config_class: Any) -> None:
    """Refuse what the file says wrong by itself, before a class can hide it or complain of something else."""
    stated = under_known_names(decoder)
    if not states(stated, "rope_theta"):
        return
    for key in ("head_dim", *SHAPE_KEYS):
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
            f"{model} has no RoPE that a config can say: model type {text.model_type!r} ({name}) has no RoPE "
            "parameters"
        )


def _refuse_unknown_keys(decoder: Mapping[str, Any], config_class: Any) -> None:
    known = UNDERSTOOD | (set() if config_class is None else {field.name for field in fields(config_class)})
    for key, value in decoder.items():
        if value and key not in known and ROPE_WORD.search(key):
            raise RopewalkError(
                f"{key} {value!r} in the config is not understood and could change the frequencies; remove it if "
                "it does not"
            )


def _check_rotary_dim(values: Mapping[str, Any], methods: Mapping[str | None, RopeMethod]) -> None:
    stated = values.get("rotary_dim")
    for method in methods.values():
        if stated is not None and stated != method.rotary_dim:
            raise RopewalkError(
                f"rotary_dim is {stated!r}, but the rest of the config says {method.rotary_dim}"
            )


def _refuse_disagreement(model: str, said: Mapping[str | None, RopeMethod], text: Any) -> None:
    # transformers computes with rope_parameters alone; what else of RoPE a file says is kept, and not looked at.
    kept = {
        k: v for k, v in text.to_dict().items() if k not in ROPE_KEYS or k in ("rope_parameters", ORIGINAL)
    }
    # Some classes have the width of a head under another name: kv_channels.
    head_dim = getattr(text, "head_dim", None)
    computed = methods_from_config(kept if head_dim is None else {**kept, "head_dim": head_dim})
    if dict(said) != computed:
        raise RopewalkError(
            f"the config of {model} says {_difference(said, computed)} to transformers' {type(text).__name__}; "
            "correct the file, or a load computes something else than it says"
        )


def _difference(said: Mapping[str | None, RopeMethod], computed: Mapping[str | None, RopeMethod]) -> str:
    """``rotary_dim 32, which is 128``: the first field in which two readings differ."""
    if set(said) != set(computed):
        return f"one RoPE for {_kinds(said)}, which is one for {_kinds(computed)}"
    kind = next(kind for kind in said if said[kind] != computed[kind])
    ours, theirs = said[kind], computed[kind]
    if type(ours) is not type(theirs):
        return f"RoPE method {ours.name}, which is {theirs.name}"
    name = next(f.name for f in fields(ours) if getattr(ours, f.name) != getattr(theirs, f.name))
    return f"{name} {getattr(ours, name)}, which is {getattr(theirs, name)}"


def _kinds(methods: Mapping[str | None, RopeMethod]) -> str:
    return ", ".join("all layers" if kind is None else kind for kind in methods)
