"""RopeMethod from and to the keys of a transformers config, both as plain mappings.

Two spellings exist. transformers 5 writes ``rope_parameters`` (theta inside; one mapping, or one for each
layer type). transformers 4 writes ``rope_theta`` beside ``rope_scaling``, and ``rope_local_base_freq`` for
the sliding layers of Gemma 3. Both are read, with their older names: ``type`` for ``rope_type`` and ``su``
for ``longrope``.

What the keys mean, as transformers computes with them:

- ``factor`` divides frequencies. For linear, ntk and yarn it is target over original length; for llama3 it is
  a chosen number (8 for 8192 to 131072 tokens); for longrope it only gives the attention factor.
- The original length of yarn, llama3 and longrope is ``original_max_position_embeddings``, inside or (Phi-3)
  at the top level, else ``max_position_embeddings``. That of dynamic is always ``max_position_embeddings``.
- Where yarn or longrope has no ``factor``, it is ``max_position_embeddings`` over the original length.
- The original length of llama3 and longrope, and of yarn without ``factor``, cannot be more than
  ``max_position_embeddings``: it is what came before an extension.
- ``finetuned`` in the YaRN authors' checkpoints is for information; theirs of type yarn are all static.

A key that could change the frequencies and is not understood is refused by name, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import is_number
from ropewalk.rope.methods import (
    Default,
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    RopeMethod,
    Yarn,
    longrope_attention_factor,
)

Spelling = Literal["5.x", "4.x"]
Config = Mapping[str, Any]

TYPE_ALIASES = {"su": "longrope"}
ORIGINAL = "original_max_position_embeddings"
MSCALES = ("short_mscale", "long_mscale")  # how vLLM is told the attention factor of longrope

# Keys besides rope_type, rope_theta and partial_rotary_factor that each type may have. The original length
# has no effect on default and linear, where some checkpoints state it for information.
KEYS: dict[str, tuple[str, ...]] = {
    "default": (ORIGINAL,),
    "linear": ("factor", ORIGINAL),
    "dynamic": ("factor", ORIGINAL),
    "yarn": (
        "factor",
        ORIGINAL,
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", *MSCALES, ORIGINAL),
}

ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    ORIGINAL,
)
"""Every top-level config key that says something about RoPE; :func:`replace_methods` clears them."""


def head_dim(config: Config) -> int:
    """Dimensions of one attention head: ``head_dim``, else ``hidden_size // num_attention_heads``.

    Raises:
        RopewalkError: if the config says neither, its hidden size is no multiple of its heads, or it has
            multi-head latent attention.
    """
    if config.get("qk_rope_head_dim") is not None:
        raise RopewalkError(
            f"multi-head latent attention (qk_rope_head_dim {config['qk_rope_head_dim']}) is not supported"
        )
    stated = _count(config, "head_dim")
    if stated is not None:
        return stated
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    if not hidden or not heads:
        raise RopewalkError(
            f"the config must have head_dim, or hidden_size and num_attention_heads; got hidden_size "
            f"{hidden} and num_attention_heads {heads}"
        )
    if hidden % heads:
        raise RopewalkError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and the config has no head_dim"
        )
    return hidden // heads


def _count(config: Config, key: str) -> int | None:
    """A number of tokens, heads or dimensions; None where the config has none."""
    value = config.get(key)
    if value is None:
        return None
    if not is_number(value) or value != int(value) or value < 1:
        raise RopewalkError(f"{key} must be a whole number, at least 1, got {value!r}")
    return int(value)


def method_from_config(config: Config, layer_type: str | None = None) -> RopeMethod:
    """The one RoPE method of a config, or that of one layer type.

    Args:
        config: a ``config.json`` as a mapping, or ``model.config.to_dict()``.
        layer_type: for configs with a method for each layer type, which one.

    Raises:
        RopewalkError: as :func:`methods_from_config`; or if ``layer_type`` is missing or unknown.
    """
    methods = methods_from_config(config)
    if layer_type in methods:
        return methods[layer_type]
    known = ", ".join(sorted(str(name) for name in methods if name is not None))
    if layer_type is None:
        raise RopewalkError(f"this config has a RoPE method for each layer type; choose one of {known}")
    raise RopewalkError(
        f"this config has no RoPE method for layer type {layer_type!r}; "
        + (f"choose one of {known}" if known else "it has one method for all layers")
    )


def methods_from_config(config: Config) -> dict[str | None, RopeMethod]:
    """The RoPE methods of a config by layer type; the key is None where all layers share one.

    A layer type whose entry is null has no position embedding and is left out.

    Args:
        config: a ``config.json`` as a mapping, or ``model.config.to_dict()``. The second also holds what the
            model's class states by default, which the file may leave out.

    Raises:
        RopewalkError: if the config says no ``rope_theta`` (none is ever assumed), contradicts itself, or
            holds a rope type or key that is not known.
    """
    if isinstance(config.get("text_config"), Mapping) and not any(
        config.get(key) for key in ("rope_parameters", "rope_theta")
    ):
        raise RopewalkError("this config holds the language model's under text_config; pass that one")
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value and not isinstance(value, Mapping):
            raise RopewalkError(f"{key} must be a mapping, got {value!r}")
    local_theta = config.get("rope_local_base_freq")
    if parameters and all(entry is None or isinstance(entry, Mapping) for entry in parameters.values()):
        return _nested_methods(config, parameters)
    if local_theta is None:
        return {None: _plain_method(config)}
    if parameters:
        raise RopewalkError(
            f"rope_local_base_freq {local_theta} says that layer types differ, rope_parameters that they do "
            "not; remove the one that is wrong"
        )
    return {
        "full_attention": _method(config, _with_theta(config, scaling or {})),
        "sliding_attention": _method(config, {"rope_theta": local_theta}),
    }


def _nested_methods(config: Config, parameters: Config) -> dict[str | None, RopeMethod]:
    if config.get("rope_scaling"):
        raise RopewalkError(
            f"rope_scaling {dict(config['rope_scaling'])} stands beside rope_parameters with layer types; "
            "keep one of them"
        )
    methods: dict[str | None, RopeMethod] = {}
    for layer_type, entry in parameters.items():
        if entry is not None:
            if entry.get("rope_theta") is None:
                raise RopewalkError(f"no rope_theta for layer type {layer_type!r} in rope_parameters")
            methods[layer_type] = _method(config, entry)
    for key in ("rope_theta", "rope_local_base_freq"):
        stated = config.get(key)
        if stated is not None and all(method.rope_theta != stated for method in methods.values()):
            raise RopewalkError(
                f"{key} is {stated}, but no layer type in rope_parameters has it; remove the wrong one"
            )
    return methods


def _plain_method(config: Config) -> RopeMethod:
    """One method from whichever of the two spellings is there, or from both where they agree."""
    spellings = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    found = {key: _method(config, _with_theta(config, entry)) for key, entry in spellings.items()}
    if not found:
        return _method(config, _with_theta(config, {}))
    if len(set(found.values())) > 1:
        said = " but ".join(f"{key} says {method}" for key, method in found.items())
        raise RopewalkError(f"the config contradicts itself: {said}; remove the one that is wrong")
    return next(iter(found.values()))


def _with_theta(config: Config, entry: Config) -> dict[str, Any]:
    """The entry with the config's one ``rope_theta``, wherever the config says it."""
    stated = {
        key: value["rope_theta"]
        for key, value in (
            ("the config", config),
            ("rope_parameters", config.get("rope_parameters") or {}),
            ("rope_scaling", config.get("rope_scaling") or {}),
        )
        if value.get("rope_theta") is not None
    }
    if not stated:
        raise RopewalkError(
            "no rope_theta: this checkpoint does not use RoPE or its config does not say; write rope_theta "
            "into config.json, or load it with transformers and use model.config.to_dict(), which holds what "
            "the model's class states"
        )
    theta = next(iter(stated.values()))
    if any(value != theta for value in stated.values()):
        said = ", ".join(f"{value} in {key}" for key, value in stated.items())
        raise RopewalkError(f"rope_theta has two values: {said}; remove the one that is wrong")
    return {**entry, "rope_theta": theta}


def _method(config: Config, entry: Config) -> RopeMethod:
    """The method that one flat mapping of RoPE parameters describes; ``rope_theta`` is in it."""
    kind = _rope_type(entry)
    values = {key: value for key, value in entry.items() if value is not None}
    values.pop("rope_type", None)
    values.pop("type", None)
    theta = values.pop("rope_theta")
    dim = _rotary_dim(config, values.pop("partial_rotary_factor", None))
    if kind == "default" and values.get("factor") == 1:
        del values["factor"]
    unknown = sorted(set(values) - set(KEYS[kind]))
    if unknown:
        raise RopewalkError(
            f"rope type {kind!r} with unknown {', '.join(unknown)}; known are {', '.join(KEYS[kind])}"
        )

    def need(key: str) -> Any:
        if key not in values:
            raise RopewalkError(f"rope type {kind!r} needs {key}, and the config has none")
        return values[key]

    if kind == "default":
        return Default(dim, theta)
    if kind == "linear":
        return Linear(dim, theta, need("factor"))
    if kind == "dynamic":
        length = _max_length(config)
        if values.get(ORIGINAL, length) != length:
            raise RopewalkError(
                f"rope type 'dynamic' starts from max_position_embeddings {length}, but the config also has "
                f"{ORIGINAL} {values[ORIGINAL]}; make them equal"
            )
        return DynamicNtk(dim, theta, need("factor"), length)
    original = _original_length(config, values.pop(ORIGINAL, None))
    # A factor says all that yarn needs: a checkpoint cut to a shorter context stays what it was.
    if kind != "yarn" or "factor" not in values:
        _check_extended(config, original)
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        return Llama3(dim, theta, need("factor"), low, high, original)
    factor = values.pop("factor", None)
    if kind == "yarn":
        _check_finetuned(values.pop("finetuned", False))
        factor = _max_length(config) / original if factor is None else factor
        # transformers reads a 0 here as "not given".
        or_default = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        optional = {key: value for key, value in values.items() if value or key not in or_default}
        return Yarn(dim, theta, factor, original, **optional)
    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        factor = _max_length(config) / original if factor is None else factor
        attention_factor = longrope_attention_factor(factor, original)
    for key in MSCALES:
        if values.get(key, attention_factor) != attention_factor:
            raise RopewalkError(
                f"{key} {values[key]} and the attention factor {attention_factor} of longrope are read by different "
                "loaders; make them equal"
            )
    return LongRope(dim, theta, need("short_factor"), need("long_factor"), attention_factor, original)


def _rope_type(entry: Config) -> str:
    kinds = {TYPE_ALIASES.get(entry[key], entry[key]) for key in ("rope_type", "type") if entry.get(key)}
    if len(kinds) > 1:
        raise RopewalkError(f"rope_type is {entry['rope_type']!r} but type is {entry['type']!r}; keep one")
    kind = kinds.pop() if kinds else "default"
    if kind not in KEYS:
        known = ", ".join([*KEYS, *TYPE_ALIASES])
        raise RopewalkError(f"unknown rope type {kind!r}; known are {known}")
    return str(kind)


def _rotary_dim(config: Config, inside: float | None) -> int:
    outside = config.get("partial_rotary_factor")
    if inside is not None and outside is not None and inside != outside:
        raise RopewalkError(
            f"partial_rotary_factor is {outside} in the config but {inside} in its RoPE parameters"
        )
    partial = next((value for value in (inside, outside) if value is not None), 1.0)
    if not is_number(partial) or not 0 < partial <= 1:
        raise RopewalkError(f"partial_rotary_factor must be above 0 and at most 1, got {partial!r}")
    return int(head_dim(config) * partial)


def _check_finetuned(value: object) -> None:
    if not isinstance(value, bool):
        raise RopewalkError(f"finetuned must be true or false, got {value!r}")


def _max_length(config: Config) -> int:
    length = _count(config, "max_position_embeddings")
    if length is None:
        raise RopewalkError("the config has no max_position_embeddings, which its RoPE parameters refer to")
    return length


def _original_length(config: Config, inside: int | None) -> int:
    outside = config.get(ORIGINAL)
    if inside is not None and outside is not None and inside != outside:
        raise RopewalkError(f"{ORIGINAL} is {outside} in the config but {inside} in its RoPE parameters")
    original = _count({ORIGINAL: outside if inside is None else inside}, ORIGINAL)
    return _max_length(config) if original is None else original


def _check_extended(config: Config, original: int) -> None:
    length = _count(config, "max_position_embeddings")
    if length is not None and original > length:
        raise RopewalkError(
            f"{ORIGINAL} {original} is more than max_position_embeddings {length}, though it is the length "
            "before the extension; correct the wrong one"
        )


def config_entries(
    methods: RopeMethod | Mapping[str | None, RopeMethod], head_dim: int, *, spelling: Spelling = "5.x"
) -> dict[str, Any]:
    """The top-level keys that make a config say these methods.

    The keys of :data:`ROPE_KEYS` that a config already has must go first, or the two may contradict each
    other; :func:`replace_methods` does both.

    Args:
        methods: one method, or one for each layer type; the key None means all layers.
        head_dim: dimensions of one head; where ``rotary_dim`` is less, ``partial_rotary_factor`` is written.
        spelling: ``5.x``: ``rope_parameters``; ``4.x``: ``rope_theta`` and ``rope_scaling`` (default: None).

    Returns:
        JSON values. Longrope also gets ``original_max_position_embeddings`` at the top level, which Phi-3's
        config prefers to the one inside, and dynamic ``max_position_embeddings``, its original length.

    Raises:
        RopewalkError: if a config cannot say it: start tokens, or layer types in the 4.x spelling other than
            Gemma 3's (``full_attention``, and ``sliding_attention`` of type default).
    """
    if spelling not in ("5.x", "4.x"):
        raise RopewalkError(f"unknown spelling {spelling!r}; choose one of 5.x, 4.x")
    by_layer: dict[str | None, RopeMethod] = (
        {None: methods} if isinstance(methods, RopeMethod) else dict(methods)
    )
    written = {layer_type: _parameters(method, head_dim) for layer_type, method in by_layer.items()}
    if not written or (None in written and len(written) > 1):
        raise RopewalkError("give one method for all layers, or one for each layer type")
    entries = _beside(by_layer)
    if spelling == "5.x":
        return {"rope_parameters": written.get(None, written), **entries}
    if None not in written:
        local = by_layer.get("sliding_attention")
        if set(written) != {"full_attention", "sliding_attention"} or not isinstance(local, Default):
            raise RopewalkError(
                "the 4.x spelling knows only full_attention, and sliding_attention of type default; got "
                f"{', '.join(f'{key} {method.name}' for key, method in by_layer.items())}; write 5.x"
            )
        entries["rope_local_base_freq"] = local.rope_theta
    scaling = dict(written[None] if None in written else written["full_attention"])
    entries["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        entries["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    entries["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return entries


def replace_methods(
    config: Config, methods: RopeMethod | Mapping[str | None, RopeMethod], *, spelling: Spelling = "5.x"
) -> dict[str, Any]:
    """A copy of the config that says these methods and nothing else about RoPE.

    ``max_position_embeddings`` stays as it is, except for dynamic: how long the model now reads is the
    caller's to say.
    """
    kept = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    return kept | config_entries(methods, head_dim(config), spelling=spelling)


def _parameters(method: RopeMethod, head_dim: int) -> dict[str, Any]:
    """One flat mapping of the 5.x spelling, without the fields that are None."""
    if isinstance(method, Ntk):
        method = method.as_default()
    if isinstance(method, LongRope) and method.start_tokens:
        raise RopewalkError(
            f"a config cannot say longrope with start_tokens {method.start_tokens}; set start_tokens to 0, "
            "or run the model through ropewalk's rotary module"
        )
    fields = {key: value for key, value in asdict(method).items() if value is not None}
    rotary_dim = fields.pop("rotary_dim")
    fields.pop("start_tokens", None)
    if isinstance(method, DynamicNtk):
        del fields[ORIGINAL]
    for key in ("short_factor", "long_factor"):
        if key in fields:
            fields[key] = list(fields[key])
    if rotary_dim != head_dim:
        fields["partial_rotary_factor"] = _partial_rotary_factor(rotary_dim, head_dim)
    return {"rope_type": method.name, **fields}


def _beside(by_layer: Mapping[str | None, RopeMethod]) -> dict[str, Any]:
    """Lengths that stand at the top level of a config, which has room for one of each."""
    entries: dict[str, Any] = {}
    for method in by_layer.values():
        if isinstance(method, DynamicNtk | LongRope):
            key = "max_position_embeddings" if isinstance(method, DynamicNtk) else ORIGINAL
            length = method.original_max_position_embeddings
            if entries.setdefault(key, length) != length:
                raise RopewalkError(
                    f"a config has one {key}, but the layer types need {entries[key]}, {length}"
                )
    return entries


def _partial_rotary_factor(rotary_dim: int, head_dim: int) -> float:
    if rotary_dim > head_dim:
        raise RopewalkError(f"rotary_dim {rotary_dim} is more than head_dim {head_dim}")
    # int(head_dim * factor) is how readers get the dimension back; half a dimension more survives rounding
    # where the plain quotient would fall just short.
    quotient = rotary_dim / head_dim
    return quotient if int(head_dim * quotient) == rotary_dim else (rotary_dim + 0.5) / head_dim
