"""Load a transformers model with our attention and rotary module."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ropewalk.attention import AttentionSpec, require_engine_name
from ropewalk.attention.choices import Limit
from ropewalk.attention.engines.capabilities import Capability
from ropewalk.attention.kept import Keeping, Kept, on_device
from ropewalk.attention.options import EVERYTHING
from ropewalk.errors import EngineError, RopewalkError, first_line
from ropewalk.io.files import adapter_beside_weights
from ropewalk.models.attention import hooks as attention_hooks
from ropewalk.models.attention import indexed as indexed_layers
from ropewalk.models.attention import recurrent as recurrent_layers
from ropewalk.models.checkpoint.loaded_weights import refuse_other_weights
from ropewalk.models.checkpoint.save import SavePretrained, holds_own_head
from ropewalk.models.checkpoint.weights import weight_files, weight_tensors
from ropewalk.models.checkpoint.whole import WholeCheckpoint
from ropewalk.models.compute.offload import beside_the_input
from ropewalk.models.config.auto_class import auto_class, is_part, loads_decoder_alone
from ropewalk.models.config.model import ModelConfig, decoder_key
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope
from ropewalk.models.encoders import set_encoders_aside
from ropewalk.models.rope.generation import generating as generating
from ropewalk.models.rope.generation import keep_one_choice
from ropewalk.models.rope.rotary import rotary_module, rotary_modules, swap_rotary, teach_transformers
from ropewalk.rope import NoRope, RopeMethod

log = logging.getLogger("ropewalk")


@dataclass(frozen=True)
class ModelSetup:
    """Settings of a checkpoint in memory: its RoPE, its attention engine, and whether its own code may run.

    Attributes:
        rope: RoPE method to run with and to write into the model's config; None for the checkpoint's own. If layer
            types have different RoPE, this method is for the layers that limit the context, those with full attention.
        max_position_embeddings: context, in tokens, to write into the config together with ``rope``; None keeps the
            config's value.
        engine: attention engine for calls with a layout, or ``auto``; see :func:`ropewalk.attend`.
        exact_rope: whether ropewalk's rotary module replaces that of transformers. ropewalk's module computes angles in
            float64, and cos, sin and rotation in float32.
        trust_remote_code: whether to run model code from the checkpoint.
        lift: limits of the checkpoint's attention to remove if ``rope`` is given: ``windows``,
            ``dual_chunk_attention``.
        other_ropes: RoPE methods by layer type, for layer types that do not limit the context, such as
            ``sliding_attention``. Layer types that are left out keep the checkpoint's method.
    """

    rope: RopeMethod | None = None
    max_position_embeddings: int | None = None
    engine: str = "auto"
    exact_rope: bool = True
    trust_remote_code: bool = False
    lift: tuple[Limit, ...] = ()
    other_ropes: Mapping[str, RopeMethod] = field(default_factory=dict)


AS_IT_IS = ModelSetup()
"""The checkpoint's own RoPE, and the default engine for the machine."""


def load_model(
    path_or_id: str | os.PathLike[str],
    setup: ModelSetup = AS_IT_IS,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    quantization: Any = None,
) -> Any:
    """Load a causal decoder whose ``model(input_ids, layout=layout)`` attends as the layout defines.

    Args:
        path_or_id: folder of a checkpoint in the format of transformers, or Hub id.
        setup: RoPE, attention engine and rotary module.
        dtype: dtype of the parameters; ``auto`` for the checkpoint's own.
        device: device for the model; None leaves it where transformers loads it.
        quantization: transformers' settings for quantizing the weights while they are loaded; None keeps the
            weights as they are.

    Returns:
        The transformers model in evaluation mode. ``generate()`` works as usual. If a LongRoPE model generates beyond
            its original length, call ``generate()`` inside :func:`ropewalk.models.rope.generation.generating`.

    Raises:
        RopewalkError: if the checkpoint is missing, cannot be loaded or has no RoPE.
        EngineError: if the model cannot run on packed rows; the message says why.
    """
    config, methods = configured(path_or_id, setup)
    refuse_files(path_or_id)
    stored = getattr(config.source, "quantization_config", None)
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4":
        # Its kernels compute no gradients, and what is computed must not depend on whether a machine has them.
        config.source.quantization_config = {**stored, "dequantize": True}
    # transformers does not move a quantized model, so it has to load it where it belongs.
    quantized = {"quantization_config": quantization, "device_map": {"": device or "cpu"}}
    try:
        model, loading = auto_class(config.source).from_pretrained(
            path_or_id,
            config=config.source,
            dtype=dtype,
            attn_implementation=_implementations(config),
            trust_remote_code=setup.trust_remote_code,
            # Other formats are pickles, which can run code when they are read.
            use_safetensors=True,
            # Missing, mismatched and unused weights are all rejected below, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({} if quantization is None else quantized),
        )
    except (OSError, ValueError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        raise RopewalkError(f"cannot load the model in {path_or_id}: {first_line(error)}") from error
    except AssertionError as error:
        raise _refused_padding(path_or_id, config, error) from error
    except ImportError as error:
        raise _lacks_package(path_or_id, config, error) from error
    except KeyError as error:
        # A class with its own table of attention functions looks ours up there.
        if str(error.args[0]) not in (attention_hooks.OVER_SDPA, attention_hooks.OVER_EAGER):
            raise _lacks_key(path_or_id, config, error) from error
        raise EngineError(
            f"{config.source.model_type} does not accept external attention functions, so it cannot run on packed rows"
        ) from error
    # transformers initialises missing weights at random, and drops unknown ones, with no more than a warning.
    alone = loads_decoder_alone(config.source)
    refuse_other_weights(
        path_or_id, config.source, model, loading, alone, added=_start_norms(setup, model, loading)
    )
    if holds_own_head(model):
        log.warning(
            "config.json of %s says tie_word_embeddings: true, but its output head differs from its embedding; the "
            "model keeps both, and is saved with tie_word_embeddings: false",
            path_or_id,
        )
        _untie(model.config)
    if is_part(config.source):
        set_encoders_aside(model)
        model._ropewalk_whole = WholeCheckpoint.of(path_or_id)
        # What is quantized is not saved: neither a frozen model below an adapter, nor such a checkpoint.
        if quantization is None and getattr(config.source, "quantization_config", None) is None:
            model._ropewalk_whole.check(model)
    if device is not None and quantization is None:
        model.to(device)
    attach(model, setup.engine, setup.exact_rope, methods)
    return model.eval()


def _start_norms(setup: ModelSetup, model: Any, loading: Mapping[str, Any]) -> tuple[str, ...]:
    """Set the norms that a checkpoint lacks to 1 if the setup adds them; the endings of their names."""
    if not isinstance(setup.rope, NoRope) or not setup.rope.qk_norm:
        return ()
    added = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    for name in loading.get("missing_keys") or ():
        if name.endswith(added):
            torch.nn.init.ones_(model.get_parameter(name))
    return added


def _lacks_key(path_or_id: str | os.PathLike[str], config: ModelConfig, error: KeyError) -> RopewalkError:
    """Some classes look up a layer type in RoPE parameters that a config may state once for all layers."""
    return RopewalkError(
        f"cannot build the model in {path_or_id}: transformers' class for {config.source.model_type} reads the key "
        f"{error.args[0]!r}, which the model's config does not have; if the key is a layer type, give "
        "rope_parameters an entry for each layer type"
    )


def _refused_padding(
    path_or_id: str | os.PathLike[str], config: ModelConfig, error: AssertionError
) -> RopewalkError:
    """torch asserts that the row for padding exists in the embedding."""
    pad, rows = getattr(config.source.get_text_config(), "pad_token_id", None), config.vocab_size
    if isinstance(pad, int) and rows is not None and not -rows <= pad < rows:
        return RopewalkError(
            f"pad_token_id is {pad} in the config of {path_or_id}, but vocab_size is {rows}; set pad_token_id to null, "
            f"or to a token id below {rows}"
        )
    return RopewalkError(f"cannot build the model in {path_or_id}: {first_line(error)}")


def _lacks_package(
    path_or_id: str | os.PathLike[str], config: ModelConfig, error: ImportError
) -> RopewalkError:
    """Quantized weights need packages of their own."""
    quantized = getattr(config.source, "quantization_config", None)
    if quantized is None:
        return RopewalkError(f"cannot load the model in {path_or_id}: {first_line(error)}")
    stated = quantized if isinstance(quantized, dict) else quantized.to_dict()
    return RopewalkError(
        f"the weights in {path_or_id} are quantized ({stated.get('quant_method')}), and the package that they need is "
        f"not installed: {first_line(error)}; give the checkpoint that they were made from instead"
    )


def empty_model(
    path_or_id: str | os.PathLike[str],
    setup: ModelSetup = AS_IT_IS,
    dtype: torch.dtype = torch.float32,
    own_head: bool = False,
) -> Any:
    """The same model as :func:`load_model`, with parameters on the ``meta`` device: to be sharded, then filled.

    Args:
        path_or_id, setup: as for :func:`load_model`.
        dtype: dtype of the parameters.
        own_head: whether the files have an output head of their own, whatever the config says of tying.
    """
    config, methods = configured(path_or_id, setup)
    if own_head:
        _untie(config.source)
    try:
        with torch.device("meta"):
            model = auto_class(config.source).from_config(
                config.source,
                dtype=dtype,
                attn_implementation=_implementations(config),
                trust_remote_code=setup.trust_remote_code,
            )
    except KeyError as error:
        raise _lacks_key(path_or_id, config, error) from error
    except AssertionError as error:
        raise _refused_padding(path_or_id, config, error) from error
    if is_part(config.source):
        set_encoders_aside(model)
    # Classes create some parameters in float32 whatever the dtype, and FSDP shards parameters of one dtype only.
    cast_parameters(model, dtype)
    # Rotary modules compute their frequencies when they are created, so they must not be created on the meta device.
    for parent, attribute, stock in rotary_modules(model):
        # A family with a base for each layer gives each module a config of its own.
        stated = getattr(stock, "config", None) or config.source.get_text_config()
        setattr(parent, attribute, type(stock)(config=stated))
    attach(model, setup.engine, setup.exact_rope, methods)
    return model.eval()


def _untie(config: Any) -> None:
    """State in a transformers config, in place, that the output head is not the embedding."""
    for each in (config, config.get_text_config()):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False


def configured(
    path_or_id: str | os.PathLike[str], setup: ModelSetup
) -> tuple[ModelConfig, Mapping[str | None, RopeMethod]]:
    """The config to build a model with, and the RoPE method of each layer type; also registers our parts.

    Raises:
        RopewalkError: if the config is missing, has no RoPE, or cannot express the methods.
    """
    require_engine_name(setup.engine)
    attention_hooks.register()
    teach_transformers()
    config = read_config(path_or_id, setup.trust_remote_code)
    refused = [] if setup.trust_remote_code else config.loading_refusals()
    refused += config.packing_refusals()
    if refused:
        raise EngineError(f"the model in {path_or_id} {refused[0]}")
    recurrent_layers.refuse_older_transformers(config)
    if config.has_sinks:
        _refuse_sinks(path_or_id, config)
    if setup.rope is None and not setup.other_ropes:
        return config, config.methods
    if setup.rope is not None:
        config = config.lifted(setup.lift)
    rope = setup.rope or config.full_attention_rope
    # A config cannot express everything that ours computes; this is the closest method that it can.
    in_config = rope.as_computed_by_transformers()
    written = with_rope(config, in_config, setup.max_position_embeddings, setup.other_ropes)
    return written, config.methods_with(rope, setup.other_ropes)


def _refuse_sinks(path_or_id: str | os.PathLike[str], config: ModelConfig) -> None:
    """Raise if a layer has more or fewer attention sinks than heads, from the shapes in the files' headers alone."""
    heads = config.source.get_text_config().num_attention_heads
    for name, shape in _shapes(path_or_id, ".sinks").items():
        if shape != [heads]:
            layer = re.search(r"layers\.(\d+)\.", name)
            where = f"layer {layer[1]}" if layer else name
            raise RopewalkError(
                f"{where} of the checkpoint in {path_or_id} has attention sinks of shape {shape}, but its "
                f"config.json says num_attention_heads {heads}, and a layer must have one sink for each head; "
                "correct the wrong one"
            )


def refuse_files(path_or_id: str | os.PathLike[str]) -> None:
    """Raise for files that transformers would load otherwise than as the weights of one model, before it reads them.

    Raises:
        RopewalkError: as :func:`ropewalk.models.checkpoint.weights.weight_files` does, and for an adapter beside the
            weights.
    """
    from transformers.utils import find_adapter_config_file

    # A folder is checked with its config; transformers looks for the adapter of a Hub id by this function.
    if not Path(path_or_id).is_dir() and find_adapter_config_file(str(path_or_id)) is not None:
        raise adapter_beside_weights(path_or_id)
    weight_files(path_or_id)


def _shapes(path_or_id: str | os.PathLike[str], ending: str) -> dict[str, list[int]]:
    """Shapes of a checkpoint's weights whose names end so, without reading a weight; of a Hub id, none if offline."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        NotASafetensorsRepoError,
        OfflineModeIsEnabled,
        SafetensorsParsingError,
    )

    shapes = {name: shape for name, _, shape in weight_tensors(path_or_id) if name.endswith(ending)}
    if weight_files(path_or_id) or Path(path_or_id).is_dir():
        return shapes
    try:
        # Some kilobytes of each file, long before gigabytes of weights are downloaded.
        found = HfApi().get_safetensors_metadata(str(path_or_id))
    except (OfflineModeIsEnabled, HfHubHTTPError, OSError, NotASafetensorsRepoError, SafetensorsParsingError):
        # Loading reports what is wrong, or finds the weights in the cache.
        return {}
    for of_file in found.files_metadata.values():
        shapes |= {name: each.shape for name, each in of_file.tensors.items() if name.endswith(ending)}
    return shapes


def choose_device(name: str) -> torch.device:
    """A device by name; ``auto`` selects CUDA if available, otherwise the CPU.

    Raises:
        RopewalkError: if the device does not exist, or CUDA was requested and is not available.
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
        raise RopewalkError(
            f"device {name} was asked for, but torch {torch.__version__} sees no CUDA device; choose auto or cpu"
        )
    return device


def attach(
    model: Any,
    engine: str = "auto",
    exact_rope: bool = True,
    methods: Mapping[str | None, RopeMethod] | None = None,
) -> None:
    """Install our attention, and with ``exact_rope`` our rotary module, in a transformers model in memory.

    A second call replaces the engine.

    Args:
        model: a causal decoder from transformers; changed in place.
        engine: attention engine for calls with a layout.
        exact_rope: replace the rotary module by one with float64 angles.
        methods: RoPE method of each layer type; None to read them from the model's config.

    Raises:
        EngineError: if the model has layers through which packed rows cannot pass.
        RopewalkError: if its rotary module does not compute what its config states.
    """
    config = ModelConfig.of(model.config)
    if methods is None:
        methods = config.methods if any(layer.rotates for layer in config.layers) else {}
    _refuse_architecture(model, config)
    attention_hooks.register()
    teach_transformers()
    ours = _implementation(config)
    # Of a model with encoders, the decoder's part alone.
    parts = {"": ours, str(decoder_key(model.config)): ours} if is_part(model.config) else ours
    model.set_attn_implementation(parts)
    if exact_rope:
        swap_rotary(model, methods)
        keep_one_choice(rotary_module(model)[0])
    elif any(getattr(method, "start_tokens", 0) for method in methods.values()):
        raise RopewalkError("start_tokens above 0 needs ropewalk's own rotary module; set exact_rope=True")
    # Attaching again changes the engine only: a second set of hooks would check every call twice.
    hooks: attention_hooks.LayoutHooks | None = getattr(model, "_ropewalk_hooks", None)
    if hooks is None:
        model._ropewalk_hooks = attention_hooks.LayoutHooks(engine, config.localities)
        model._ropewalk_hooks.install(model)
        # Trainers save in their own way: this is what they call.
        model.save_pretrained = SavePretrained(model)
        recurrent_layers.install(model, config)
        indexed_layers.install(model, config)
    else:
        hooks.engine = engine


def attention_spec(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    backward: bool = True,
    ring: bool = False,
    full: int | None = None,
    capability: Capability | None = None,
) -> AttentionSpec:
    """The requirements of a model's layers on an attention engine.

    Args:
        config: config of the model.
        device, dtype: those of queries, keys and values.
        backward: whether gradients are needed.
        ring: whether rows are split over ranks by context parallelism (ring).
        full: tokens of a row, if rows have the pattern ``full``; None for other patterns.
        capability: compute capability of the GPU; None for that of this machine.
    """
    one_run = full is not None and all(each.within(full) == EVERYTHING for each in config.localities)
    return AttentionSpec(
        device,
        dtype,
        *config.widest_dims,
        softcap=config.softcap,
        sinks=config.has_sinks,
        backward=backward,
        ring=ring,
        one_run=one_run,
        capability=capability,
    )


def checkpoint_activations(model: Any, keeping: Keeping | None = None) -> None:
    """Store each layer's input instead of its activations, and recompute the layer in the backward pass.

    Args:
        model: a transformers model.
        keeping: which results of attention are kept too, so that the recomputation takes them; None to keep none.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if keeping is not None:
        store = on_device if keeping.on_device else beside_the_input
        options["context_fn"] = lambda: Kept(keeping.least, store).contexts()
    # transformers 5.23 renamed it and warns about the old name.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast a model's parameters in place, except quantized ones, and nothing else.

    ``model.to(dtype)`` would also round buffers, including the frequencies of transformers' own rotary modules.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _refuse_architecture(model: Any, config: ModelConfig) -> None:
    refused = config.packing_refusals()
    if refused:
        raise EngineError(f"{type(model).__name__} {refused[0]}")
    recurrent_layers.refuse_older_transformers(config)
    homes = {type(module).__module__ for module in model.modules()}
    # The modules of transformers look attention functions up in this table.
    if not any(hasattr(sys.modules[home], "ALL_ATTENTION_FUNCTIONS") for home in homes):
        raise EngineError(
            f"{type(model).__name__} does not accept external attention functions, so it cannot run on packed rows"
        )


def _implementation(config: ModelConfig) -> str:
    # SDPA computes neither soft caps nor sinks.
    capped_or_sinks = config.softcap is not None or config.has_sinks
    return attention_hooks.OVER_EAGER if capped_or_sinks else attention_hooks.OVER_SDPA


def _implementations(config: ModelConfig) -> str | dict[str, str]:
    """The attention of each part of a model while it is created: encoders may have no function but their own."""
    ours = _implementation(config)
    if not is_part(config.source):
        return ours
    parts = dict.fromkeys(config.source.sub_configs, "eager")
    return {**parts, "": ours, str(decoder_key(config.source)): ours}
