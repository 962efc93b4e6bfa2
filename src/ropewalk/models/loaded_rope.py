"""What transformers' rotary module holds right after a load, found without reading a weight."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint_config import CheckpointConfig
from ropewalk.models.config_class import CONFIG_ERRORS, build, class_of, one_line, quiet


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


def loaded_rope(config: CheckpointConfig) -> list[LoadedRope] | None:
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
