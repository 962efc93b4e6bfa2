"""The frequencies that a transformers model holds in its rotary module, in its weights, and after a save and a load."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint_config import read_checkpoint_config
from ropewalk.models.config_class import one_line, quiet
from ropewalk.models.load import save_model
from ropewalk.models.loaded_rope import LoadedRope, loaded_rope
from ropewalk.models.rotary import rotary_module

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
            found = loaded_rope(read_checkpoint_config(f"the saved {type(config).__name__}", folder))
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
