"""Run a model with the random parameters that its class initialises, for comparison with its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.models.config.auto_class import auto_class, is_part
from ropewalk.models.encoders import set_encoders_aside


@contextmanager
def random_parameters(model: Any, seed: int) -> Iterator[None]:
    """Within the context manager, a model has the random parameters that its class initialises.

    Its own parameters wait in CPU memory, so that the device never holds both.

    Args:
        model: a transformers model; restored at the end.
        seed: seed of the initialisation; the states of torch's generators are restored.

    Raises:
        RopewalkError: if a new model of its class has different parameters.
    """
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        # A copy of the config, because building a model changes the config that it is given.
        fresh = auto_class(model.config).from_config(
            deepcopy(model.config), dtype=model.dtype, attn_implementation="eager"
        )
        if is_part(model.config):
            set_encoders_aside(fresh)
    initial, own = _learned(fresh), _learned(model)
    unlike = {
        name
        for name, parameter in own.items()
        if name not in initial or initial[name].shape != parameter.shape
    }
    if unlike or initial.keys() - own.keys():
        raise RopewalkError(
            f"a new {type(model).__name__} of this config has other parameters than the model, such as "
            f"{min(unlike or initial.keys() - own.keys())}, so the audit cannot compare the model with random weights; "
            "omit this comparison with --no-random-control"
        )
    del fresh
    # The trained weights wait in CPU memory: a device that holds one model may not hold two.
    kept = {name: parameter.data.to("cpu") for name, parameter in own.items()}
    devices = {name: parameter.device for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            # Popped, so that no third copy stays in memory.
            parameter.data = initial.pop(name).data.to(devices[name], parameter.dtype)
        yield
    finally:
        for name, parameter in own.items():
            parameter.data = kept[name].to(devices[name])


def _learned(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers; routers store their learned balance in a buffer."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}
