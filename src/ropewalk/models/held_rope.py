"""The frequencies that a transformers model holds: after a load, in memory, in its weights, saved and loaded again.

What a load leaves in the rotary module is found from the config alone, without reading a weight.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.models.config import ModelConfig
from ropewalk.models.config_file import CONFIG_ERRORS, build, class_of, one_line, quiet, read_model_config
from ropewalk.models.load import save_model
from ropewalk.models.rotary import rotary_module, teach_transformers


@dataclass(frozen=True)
class LoadedRope:
    """What transformers' rotary module holds right after a load, for one layer type.

    Attributes:
        layer_type: None where all layers share one.
        inv_freq: float64 ``[rotary_dim // 2]``, rad/token: the values held, not recomputed.
        dtype: in which the module holds them.
        attention_factor: factor on cos and sin.
    """

    layer_type: str | None
    inv_freq: torch.Tensor
    dtype: str
    attention_factor: float


def loaded_rope(config: ModelConfig) -> list[LoadedRope] | None:
    """What ``from_pretrained`` in the checkpoint's own dtype leaves in the rotary module; no weights are read.

    Methods that depend on the length give what they hold before the first call: longrope its short factors,
    dynamic its unscaled frequencies.

    Returns:
        One entry a layer type, by name; None where transformers does not know the model type.

    Raises:
        RopewalkError: if the model has not exactly one rotary module, or cannot be built from the config.
    """
    config_class = class_of(config.values.get("model_type")) if config.config_class else None
    if config_class is None:
        return None
    # Remote code is never run, and no weight is there to be quantised.
    values = {k: v for k, v in config.values.items() if k not in ("auto_map", "quantization_config")}
    rotary = _rotary_as_loaded(config.model, build(config.model, config_class, values))
    names = sorted(name for name, _ in rotary.named_buffers() if re.search("(?<!original_)inv_freq$", name))
    return [_held(rotary, name.removesuffix("inv_freq")) for name in names]


def _held(rotary: nn.Module, prefix: str) -> LoadedRope:
    buffer = rotary.get_buffer(f"{prefix}inv_freq")
    return LoadedRope(
        layer_type=prefix.removesuffix("_") or None,
        inv_freq=buffer.detach().to(torch.float64, copy=True),
        dtype=str(buffer.dtype).removeprefix("torch."),
        attention_factor=float(getattr(rotary, f"{prefix}attention_scaling", 1.0)),
    )


def _rotary_as_loaded(model: str, config: Any) -> nn.Module:
    """A new rotary module of the class that the model has, made on the CPU as a load makes it.

    That rotary modules are built from a config alone, and are not touched by the weights of a checkpoint, is how
    transformers has them and nothing it promises; a test compares with a real load.
    """
    teach_transformers()
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    try:
        rotary_class = _rotary_class(config)
        with _default_dtype(dtype), torch.device("cpu"):
            rotary: nn.Module = rotary_class(config)
    except CONFIG_ERRORS as error:
        raise RopewalkError(
            f"transformers cannot build the rotary module of {model}: {one_line(error)}"
        ) from error
    return rotary


def _rotary_class(config: Any) -> type[nn.Module]:
    """The class of the model's one rotary module, from a model without memory: one layer of it, if that works."""
    from transformers import AutoModel

    try:
        small = deepcopy(config)
        small.num_hidden_layers = 1
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:1]
        with quiet(), torch.device("meta"):
            model = AutoModel.from_config(small, trust_remote_code=False)
    except CONFIG_ERRORS:
        with quiet(), torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=False)
    found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if len(found) != 1:
        raise RopewalkError(f"{type(model).__name__} has {len(found)} rotary modules, not one")
    return type(found[0])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


INV_FREQ = re.compile("(?<!original_)inv_freq$")
"""Name of a tensor that a rotary module computes with; it keeps another for the way back from a long sequence."""
TRIP_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)
"""What transformers raises where a model cannot be saved, or cannot be loaded again."""


def held_inv_freq(rotary: nn.Module, layer_type: str | None) -> Tensor | None:
    """The frequencies as a rotary module holds them, in their own dtype; None where it holds none."""
    for name in ([] if layer_type is None else [f"{layer_type}_inv_freq"]) + ["inv_freq"]:
        held = getattr(rotary, name, None)
        if isinstance(held, Tensor):
            return held.detach()
    return None


def inv_freq_in_weights(model: nn.Module) -> list[tuple[str | None, Tensor]]:
    """Frequencies that a model saves among its weights, by the layer type in their name; each kind once.

    transformers keeps them out of a checkpoint. Where a module takes them in, they overrule its config.
    """
    found: list[tuple[str | None, Tensor]] = []
    for key, value in model.state_dict().items():
        if not INV_FREQ.search(key):
            continue
        prefix = key.rpartition(".")[2].removesuffix("inv_freq").removesuffix("_")
        kind = (prefix or None, value.detach())
        # Older models have one copy a layer.
        if not any(
            kind[0] == other and kind[1].dtype == held.dtype and torch.equal(kind[1], held)
            for other, held in found
        ):
            found.append(kind)
    return found


def weight_bytes(model: nn.Module) -> int:
    """Size of a model's parameters in memory."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def rotary_saved_and_loaded(model: Any) -> nn.Module:
    """The rotary module of the model that plain transformers loads from what this one saves, in the same dtype.

    Raises:
        RopewalkError: if it cannot be saved or loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _folder() as folder:
            with _config_kept(model.config):
                save_model(model, folder)
            other = AutoModelForCausalLM.from_pretrained(
                folder, dtype=model.dtype, use_safetensors=True, trust_remote_code=False
            )
    except TRIP_ERRORS as error:
        raise RopewalkError(
            f"{type(model).__name__} cannot be saved and loaded again: {one_line(error)}"
        ) from error
    return rotary_module(other)[2]


def rope_of_saved_config(model: Any) -> dict[str | None, LoadedRope]:
    """What a load would put into the rotary module if it read the model's config, saved now; no weight is written.

    Returns:
        By layer type; empty where transformers does not know the model type.

    Raises:
        RopewalkError: if the config cannot be saved or read again.
    """
    config = deepcopy(model.config)
    config.dtype = model.dtype
    try:
        with _folder() as folder:
            config.save_pretrained(folder)
            found = loaded_rope(read_model_config(f"the saved {type(config).__name__}", folder))
    except TRIP_ERRORS as error:
        raise RopewalkError(
            f"{type(config).__name__} cannot be saved and read again: {one_line(error)}"
        ) from error
    return {rope.layer_type: rope for rope in found or ()}


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for as long as the context is open; transformers says nothing and draws no bars."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _config_kept(config: Any) -> Iterator[None]:
    """Saving a model writes its class and dtype into its config."""
    before = dict(config.__dict__)
    try:
        yield
    finally:
        config.__dict__.clear()
        config.__dict__.update(before)
