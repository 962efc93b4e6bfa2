"""Loading a transformers model with our attention and rotary module in place, and saving it without them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ropewalk.attention import AttentionSpec, require_engine_name
from ropewalk.attention.choices import Limit
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.io.files import check_model_place, not_found
from ropewalk.models import attention_hooks, recurrent_layers
from ropewalk.models.config import BASES_OF_LAYERS, ModelConfig, decoder_key
from ropewalk.models.config_file import (
    CONFIG_ERRORS,
    class_of,
    config_from_json,
    one_line,
    read_config_file,
    read_model_config,
)
from ropewalk.models.generation import generating as generating
from ropewalk.models.generation import keep_one_choice
from ropewalk.models.rotary import rope_of as rope_of
from ropewalk.models.rotary import rope_of_rows as rope_of_rows
from ropewalk.models.rotary import rotary_module as rotary_module
from ropewalk.models.rotary import swap_rotary, teach_transformers
from ropewalk.rope import RopeMethod, for_all_readers, replace_methods
from ropewalk.rope.methods.base import MAX_LENGTH

log = logging.getLogger("ropewalk")


@dataclass(frozen=True)
class ModelSetup:
    """How a checkpoint is to run: with which RoPE, over which attention engine, through whose code.

    Attributes:
        rope: the RoPE method to run with and to write into the model's config; the checkpoint's own if None.
        max_position_embeddings: context in tokens to write into the config beside ``rope``; as it is if None.
        engine: attention engine for calls with a layout, or ``auto``.
        exact_rope: angles in float64, cos/sin and rotation in float32; False keeps transformers' own module.
        trust_remote_code: run model code from the checkpoint. Never on by default.
        lift: limits of the checkpoint's attention that are taken away beside ``rope``; see :meth:`ModelConfig.lifted`.
        other_ropes: methods of layer types that do not limit the context, where they have methods of their own; those
            left out keep the checkpoint's.
    """

    rope: RopeMethod | None = None
    max_position_embeddings: int | None = None
    engine: str = "auto"
    exact_rope: bool = True
    trust_remote_code: bool = False
    lift: tuple[Limit, ...] = ()
    other_ropes: Mapping[str, RopeMethod] = field(default_factory=dict)


AS_IT_IS = ModelSetup()
"""With the checkpoint's own RoPE, on the engine that suits the machine."""


def load_model(
    path_or_id: str | os.PathLike[str],
    setup: ModelSetup = AS_IT_IS,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
) -> Any:
    """Load a causal decoder so that ``model(input_ids, layout=layout)`` attends as the layout says.

    Args:
        path_or_id: folder in Hugging Face layout, or hub id.
        setup: its RoPE, attention engine and rotary module.
        dtype: dtype of the parameters; ``auto`` is the checkpoint's own.
        device: where to put the model; left where transformers loads it if None.

    Returns:
        The transformers model, in evaluation mode. ``generate()`` works as ever; with longrope that passes the
        original length, inside :func:`generating`.

    Raises:
        RopewalkError: if the checkpoint is missing, has no RoPE, or cannot be served; the message says why.
    """
    from transformers import AutoModelForCausalLM

    config, methods = configured(path_or_id, setup)
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path_or_id,
            config=config.source,
            dtype=dtype,
            attn_implementation=_implementation(config),
            trust_remote_code=setup.trust_remote_code,
            use_safetensors=True,
            # Both kinds of unfit weights are refused below, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RopewalkError(f"cannot load the model in {path_or_id}: {_first_line(error)}") from error
    except KeyError as error:
        if str(error.args[0]) not in (attention_hooks.OVER_SDPA, attention_hooks.OVER_EAGER):
            raise
        raise EngineError(
            f"{config.source.model_type} takes no attention function from outside, so it cannot run on packed rows"
        ) from error
    _refuse_incomplete(path_or_id, loading)
    if device is not None:
        model.to(device)
    attach(model, setup.engine, setup.exact_rope, methods)
    return model.eval()


def empty_model(
    path_or_id: str | os.PathLike[str], setup: ModelSetup = AS_IT_IS, dtype: torch.dtype = torch.float32
) -> Any:
    """What :func:`load_model` gives, but its parameters have no memory (device ``meta``): to be sharded, then filled.

    Args:
        path_or_id, setup: as for load_model.
        dtype: of the parameters.
    """
    from transformers import AutoModelForCausalLM

    config, methods = configured(path_or_id, setup)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config.source,
            dtype=dtype,
            attn_implementation=_implementation(config),
            trust_remote_code=setup.trust_remote_code,
        )
    # The rotary module computes its frequencies when it is made, and has none on the device meta.
    parent, attribute, stock = rotary_module(model)
    setattr(parent, attribute, type(stock)(config=config.source.get_text_config()))
    attach(model, setup.engine, setup.exact_rope, methods)
    return model.eval()


def configured(
    path_or_id: str | os.PathLike[str], setup: ModelSetup
) -> tuple[ModelConfig, Mapping[str | None, RopeMethod]]:
    """The config to build a model with, and the RoPE method of each layer type; transformers knows our parts then.

    Raises:
        RopewalkError: if the config is missing, has no RoPE, or cannot hold the methods.
    """
    require_engine_name(setup.engine)
    attention_hooks.register()
    teach_transformers()
    config = read_config(path_or_id, setup.trust_remote_code)
    refused = config.packing_refusals()
    if refused:
        raise EngineError(f"the model in {path_or_id} {refused[0]}")
    if setup.rope is None and not setup.other_ropes:
        return config, config.methods
    if setup.rope is not None:
        config = config.lifted(setup.lift)
    rope = setup.rope or config.full_attention_rope
    in_config = rope.as_computed_by_transformers()
    written = with_rope(config, in_config, setup.max_position_embeddings, setup.other_ropes)
    return written, config.methods_with(rope, setup.other_ropes)


def _refuse_incomplete(path_or_id: str | os.PathLike[str], loading: Mapping[str, Any]) -> None:
    """transformers fills weights that a checkpoint lacks with random numbers; nobody wants those trained on."""
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has the wrong shape for")):
        # A mismatched key comes with its two shapes.
        keys = sorted(key[0] if isinstance(key, tuple) else str(key) for key in loading.get(kind) or ())
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise RopewalkError(f"the checkpoint in {path_or_id} {what} the weight {keys[0]}{more}")


def read_config(path_or_id: str | os.PathLike[str], trust_remote_code: bool = False) -> ModelConfig:
    """The config of a folder or hub id as transformers reads it; what its file leaves to the class is said aloud, once.

    Returns:
        What it says; ``source`` is the transformers config.

    Raises:
        RopewalkError: if there is none, it says nothing of RoPE, or it contradicts itself.
    """
    from transformers import AutoConfig

    _check_exists(path_or_id)
    # The file itself comes first: a class takes one of two values that contradict each other, and says nothing, and its
    # own complaints name no layer.
    checkpoint = None if trust_remote_code else _of_known_class(str(path_or_id))
    try:
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
    except (*CONFIG_ERRORS, OSError) as error:
        if not Path(path_or_id).exists():
            raise not_found(path_or_id, "config.json", error) from error
        raise RopewalkError(f"cannot read a model config from {path_or_id}: {one_line(error)}") from error
    if getattr(config.get_text_config(), "alibi", False):
        raise RopewalkError(f"the checkpoint in {path_or_id} has ALiBi positions and no RoPE")
    read = ModelConfig.of(config)
    _ = (read.methods, read.layers)
    if type(config).__module__.startswith("transformers."):
        _say_defaults(str(path_or_id), checkpoint or read_model_config(str(path_or_id)))
    return read


def _of_known_class(path_or_id: str) -> ModelConfig | None:
    """What a config file says, if transformers has a class for it."""
    raw = read_config_file(path_or_id)
    return None if class_of(raw.get("model_type")) is None else config_from_json(raw, path_or_id)


def _say_defaults(path_or_id: str, checkpoint: ModelConfig) -> None:
    """Llama 2's config.json names no theta, and transformers fills in its class's own: never silently."""
    if checkpoint.defaults and path_or_id not in _told:
        _told.add(path_or_id)
        for key, value in checkpoint.defaults.items():
            log.warning(
                "%s/config.json gives no %s; %s's own default of %s is used",
                path_or_id.rstrip("/"),
                key,
                checkpoint.config_class,
                f"{value:g}" if isinstance(value, float) else value,
            )


_told: set[str] = set()
"""Checkpoints whose defaults were mentioned: once a process is enough."""


def choose_device(name: str) -> torch.device:
    """A device by name; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        RopewalkError: if there is no such device, or no CUDA where it was asked for.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RopewalkError(f"unknown device {name!r}; choose auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise RopewalkError(f"device {name} is not supported; choose auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RopewalkError(f"device {name} was asked for, but torch {torch.__version__} sees no CUDA device")
    return device


def attach(
    model: Any,
    engine: str = "auto",
    exact_rope: bool = True,
    methods: Mapping[str | None, RopeMethod] | None = None,
) -> None:
    """Put our attention, and with ``exact_rope`` our rotary module, into a transformers model in memory.

    Attached again, a model takes the new engine.

    Args:
        model: a causal decoder from transformers; changed in place.
        engine: attention engine for calls with a layout.
        exact_rope: swap the rotary module for one with float64 angles.
        methods: RoPE method of each layer type; read from the model's config if None.

    Raises:
        EngineError: if the model mixes in layers that packed rows cannot pass through.
        RopewalkError: if its rotary module does not compute what its config says.
    """
    config = ModelConfig.of(model.config)
    if methods is None:
        methods = config.methods if any(layer.rotates for layer in config.layers) else {}
    _refuse_architecture(model, config)
    attention_hooks.register()
    teach_transformers()
    model.set_attn_implementation(_implementation(config))
    if exact_rope:
        swap_rotary(model, methods)
        keep_one_choice(rotary_module(model)[0])
    elif any(getattr(method, "start_tokens", 0) for method in methods.values()):
        raise RopewalkError("start_tokens > 0 runs only through the exact rotary module; set exact_rope=True")
    hooks: attention_hooks.LayoutHooks | None = getattr(model, "_ropewalk_hooks", None)
    if hooks is None:
        model._ropewalk_hooks = attention_hooks.LayoutHooks(engine, config.localities)
        model._ropewalk_hooks.install(model)
        recurrent_layers.install(model, config)
    else:
        hooks.engine = engine


def with_rope(
    config: ModelConfig,
    method: RopeMethod,
    max_position_embeddings: int | None = None,
    others: Mapping[str, RopeMethod] | None = None,
) -> ModelConfig:
    """A model's config with a transformers config that says this RoPE method for the layers that limit the context.

    Args:
        config: with its transformers config as ``source``.
        method: for all layers; for those with full attention where layer types have methods of their own.
        max_position_embeddings: the context in tokens from now on; as it is if None.
        others: for other layer types, as for :meth:`ModelConfig.methods_with`.

    Raises:
        RopewalkError: if the config cannot hold this method.
    """
    bases = config.values.get(BASES_OF_LAYERS)
    if bases and config.methods_with(method, others) != config.methods:
        raise RopewalkError(
            f"{config.source.model_type} states the base of each layer in {BASES_OF_LAYERS}, which ropewalk reads and "
            f"does not set; write the new base into {BASES_OF_LAYERS} and rope_theta of config.json, and train with "
            "rope default and exact_rope: false"
        )
    before = config.decoder_values
    # A class may have another name for the width of a head, or none.
    values = replace_methods({**before, "head_dim": config.head_dim}, config.methods_with(method, others))
    length = max_position_embeddings or values.get(MAX_LENGTH) or config.max_position_embeddings
    values = for_all_readers({**values, MAX_LENGTH: length or 0})
    for key in ("head_dim", MAX_LENGTH):
        del values[key]
    if "head_dim" in before:
        values["head_dim"] = before["head_dim"]
    values[config.source.get_text_config().attribute_map.get(MAX_LENGTH, MAX_LENGTH)] = length
    if before.get("rope_theta") is not None:
        # Where a class has a field for it, it stands there once more.
        values["rope_theta"] = method.as_written().rope_theta
    attention = values.get("attn_config")
    if isinstance(attention, Mapping) and "rope_theta" in attention:
        # DBRX's, which transformers passes over and other programs read.
        values["attn_config"] = {**attention, "rope_theta": method.as_written().rope_theta}
    try:
        return config.with_decoder_values(values)
    except (ValueError, KeyError, StrictDataclassError) as error:
        # Phi-3 takes longrope only, and reads yarn as that.
        raise RopewalkError(
            f"the config of {config.source.model_type} cannot hold the RoPE method {method.name}: "
            f"{' '.join(str(error).split())}; theta always fits"
        ) from error


def left_out(config: ModelConfig) -> str | None:
    """What a load as a causal decoder leaves of a larger model behind, a sentence; None where it keeps all.

    Args:
        config: with its transformers config as ``source``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    key = decoder_key(config.source)
    if key is None or type(config.source) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    loaded = MODEL_FOR_CAUSAL_LM_MAPPING[type(config.source)]
    if loaded.config_class is type(config.source):
        return None
    return (
        f"transformers loads the language model of {config.source.model_type} alone ({loaded.__name__}): the result "
        "has no encoders of images or sounds"
    )


def attention_spec(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    backward: bool = True,
    ring: bool = False,
) -> AttentionSpec:
    """What a model's layers ask of an attention engine.

    Args:
        config: of the model.
        device, dtype: of queries, keys and values.
        backward: whether gradients are wanted.
        ring: whether keys travel around a ring of ranks.
    """
    return AttentionSpec(
        device,
        dtype,
        config.key_dim,
        config.value_dim,
        softcap=config.softcap,
        sinks=config.has_sinks,
        backward=backward,
        ring=ring,
    )


def checkpoint_activations(model: Any) -> None:
    """Keep each layer's input instead of its activations, and compute the layer again in the backward."""
    options = {"use_reentrant": False}
    # transformers 5.23 has a new name for it and warns of the old one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Put a model's parameters into a dtype, in place, and nothing else.

    ``model.to(dtype)`` would round buffers as well, the frequencies of transformers' own rotary modules among them.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def save_model(
    model: Any, folder: Path, tokenizer: Any = None, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a folder that plain transformers loads: our hooks and modules leave no trace in it.

    ``state_dict`` is saved in place of the model's own, if given.

    The caller makes the folder appear under its final name; see ``ropewalk.training.checkpoint.single``.
    """
    model.save_pretrained(folder, state_dict=state_dict)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _refuse_architecture(model: Any, config: ModelConfig) -> None:
    refused = config.packing_refusals()
    if refused:
        raise EngineError(f"{type(model).__name__} {refused[0]}")
    homes = {type(module).__module__ for module in model.modules()}
    if not any(hasattr(sys.modules[home], "ALL_ATTENTION_FUNCTIONS") for home in homes):
        raise EngineError(
            f"{type(model).__name__} takes no attention function from outside, so it cannot run on packed rows"
        )


def _implementation(config: ModelConfig) -> str:
    capped_or_sinks = config.softcap is not None or config.has_sinks
    return attention_hooks.OVER_EAGER if capped_or_sinks else attention_hooks.OVER_SDPA


def _check_exists(path_or_id: str | os.PathLike[str]) -> None:
    path = Path(path_or_id)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RopewalkError(
                f"{path} is a folder without a config.json: not a model in Hugging Face layout"
            )
    elif path.is_file():
        raise RopewalkError(f"{path} is a file; a model is a folder with config.json and weights")
    else:
        check_model_place(path_or_id)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
