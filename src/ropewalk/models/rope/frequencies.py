"""The frequencies that a transformers model contains: after a load, in memory, in its weights, saved and reloaded.

The frequencies after a load are determined from the config alone, without reading a weight.
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
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.auto_class import plain_model
from ropewalk.models.config.file import CONFIG_ERRORS, one_line, quiet, read_model_config, rebuilt
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.rope.rotary import rotary_module, teach_transformers

INV_FREQ = re.compile("(?<!original_)inv_freq$")
"""Name of the tensor that a rotary module uses; it keeps a second one to return from a long sequence."""


@dataclass(frozen=True)
class LoadedRope:
    """The contents of transformers' rotary module right after a load, for one layer type.

    Attributes:
        layer_type: None if all layers share one method.
        inv_freq: float64 ``[rotary_dim // 2]``, rad/token: the values in the buffer, not recomputed.
        dtype: dtype of the buffer.
        attention_factor: factor on cos and sin.
    """

    layer_type: str | None
    inv_freq: torch.Tensor
    dtype: str
    attention_factor: float


def loaded_rope(config: ModelConfig) -> list[LoadedRope] | None:
    """The rotary module's contents after ``from_pretrained`` in the checkpoint's own dtype; no weights are read.

    Methods that depend on the length give their values before the first call: longrope its short factors, dynamic its
    unscaled frequencies.

    Returns:
        One entry for each layer type, by name; None if transformers does not know the model type.

    Raises:
        RopewalkError: if the model does not have exactly one rotary module, or cannot be built from the config.
    """
    complete = rebuilt(config)
    if complete is None:
        return None
    rotary = _rotary_as_loaded(config.model, complete)
    names = sorted(name for name, _ in rotary.named_buffers() if INV_FREQ.search(name))
    return [_held(rotary, name.removesuffix("inv_freq")) for name in names]


def _held(rotary: nn.Module, prefix: str) -> LoadedRope:
    buffer = rotary.get_buffer(f"{prefix}inv_freq")
    return LoadedRope(
        layer_type=prefix.removesuffix("_") or None,
        # Without a copy, a buffer in float64 would be shared with the module.
        inv_freq=buffer.detach().to(torch.float64, copy=True),
        dtype=str(buffer.dtype).removeprefix("torch."),
        attention_factor=float(getattr(rotary, f"{prefix}attention_scaling", 1.0)),
    )


def _rotary_as_loaded(model: str, config: Any) -> nn.Module:
    """A new rotary module of the model's class, created on the CPU as in a load.

    This relies on transformers building rotary modules from the config alone and on checkpoints not changing them.
    transformers does not promise either, so a test compares with a real load.
    """
    teach_transformers()
    # A load sets the default dtype to the checkpoint's while it creates modules.
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    try:
        rotary_class = _rotary_class(config)
        with _default_dtype(dtype), torch.device("cpu"):
            rotary: nn.Module = rotary_class(config)
    except CONFIG_ERRORS as error:
        raise RopewalkError(
            f"cannot build transformers' rotary module for {model}: {one_line(error)}"
        ) from error
    return rotary


def _rotary_class(config: Any) -> type[nn.Module]:
    """The class of the model's rotary module, from a model on the meta device, with one layer if that works."""
    from transformers import AutoModel

    config = deepcopy(config)
    # It does not affect RoPE, and torch refuses one outside the embedding.
    config.pad_token_id = None
    try:
        small = deepcopy(config)
        # One layer on the meta device: only the class of the rotary module is wanted, at no cost of memory.
        small.num_hidden_layers = 1
        # The list must have an entry for each layer.
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:1]
        with quiet(), torch.device("meta"):
            model = AutoModel.from_config(small, trust_remote_code=False)
    # Some classes refuse a config whose lists do not fit one layer; they are built whole.
    except CONFIG_ERRORS:
        with quiet(), torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=False)
    found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if len(found) != 1:
        raise RopewalkError(
            f"{type(model).__name__} has {len(found)} rotary modules, but ropewalk needs exactly one"
        )
    return type(found[0])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


TRIP_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)
"""Exceptions that transformers raises if a model cannot be saved or loaded again."""


def held_inv_freq(rotary: nn.Module, layer_type: str | None) -> Tensor | None:
    """The frequencies in a rotary module's buffer, in their own dtype; None if it has no such buffer."""
    for name in ([] if layer_type is None else [f"{layer_type}_inv_freq"]) + ["inv_freq"]:
        held = getattr(rotary, name, None)
        if isinstance(held, Tensor):
            return held.detach()
    return None


def inv_freq_in_weights(model: nn.Module) -> list[tuple[str | None, Tensor]]:
    """Frequencies that a model saves among its weights, by the layer type in their name; each type once.

    transformers keeps them out of checkpoints. A module that loads them ignores the config's.
    """
    found: list[tuple[str | None, Tensor]] = []
    for key, value in model.state_dict().items():
        if not INV_FREQ.search(key):
            continue
        prefix = key.rpartition(".")[2].removesuffix("inv_freq").removesuffix("_")
        kind = (prefix or None, value.detach())
        # Older models have one copy in each layer.
        if not any(
            kind[0] == other and kind[1].dtype == held.dtype and torch.equal(kind[1], held)
            for other, held in found
        ):
            found.append(kind)
    return found


def rotary_saved_and_loaded(model: Any) -> nn.Module:
    """The rotary module after plain transformers saves this model and loads it again in the same dtype.

    Raises:
        RopewalkError: if it cannot be saved or loaded.
    """
    try:
        with _folder() as folder:
            with _config_kept(model.config):
                save_model(model, folder)
            other = plain_model(folder, dtype=model.dtype, use_safetensors=True)
    except TRIP_ERRORS as error:
        raise RopewalkError(
            f"{type(model).__name__} cannot be saved and loaded again: {one_line(error)}"
        ) from error
    return rotary_module(other)[2]


def rope_of_saved_config(model: Any) -> dict[str | None, LoadedRope]:
    """RoPE that the rotary module would get if the model's config were saved and loaded now; no weights are written.

    Returns:
        Entries by layer type; empty if transformers does not know the model type.

    Raises:
        RopewalkError: if the config cannot be saved or read again.
    """
    config = deepcopy(model.config)
    # Saving a model writes its dtype into the config; here only the config is saved.
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
    """A temporary folder within the context manager; transformers' log and progress bars are silenced."""
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
    """Restore the config afterwards: saving a model writes its class and dtype into it."""
    before = dict(config.__dict__)
    try:
        yield
    finally:
        # In place, because the parts of the model share this object.
        config.__dict__.clear()
        config.__dict__.update(before)
