"""A model with the parameters that it had before anyone trained it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from ropewalk.errors import RopewalkError


@contextmanager
def random_parameters(model: Any, seed: int) -> Iterator[None]:
    """While the context is open, a model holds the random parameters that its class initialises it with.

    Its own wait in the CPU's memory, so that the device never holds both.

    Args:
        model: a transformers model; the same in the end.
        seed: of the initialisation; the state of torch's generators is left as it was.

    Raises:
        RopewalkError: if a new model of its class has other parameters than it has.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        # A copy of the config: building a model writes into the one that it is given.
        twin = AutoModelForCausalLM.from_config(
            deepcopy(model.config), dtype=model.dtype, attn_implementation="eager"
        )
    drawn, own = _learned(twin), _learned(model)
    unlike = {
        name for name, parameter in own.items() if name not in drawn or drawn[name].shape != parameter.shape
    }
    if unlike or drawn.keys() - own.keys():
        raise RopewalkError(
            f"a new {type(model).__name__} of this config has other parameters than the model "
            f"({min(unlike or drawn.keys() - own.keys())}), so there is no random twin to compare with"
        )
    del twin
    kept = {name: parameter.data.to("cpu") for name, parameter in own.items()}
    devices = {name: parameter.device for name, parameter in own.items()}
    try:
        for name, parameter in own.items():
            # Popped, so that no third copy waits.
            parameter.data = drawn.pop(name).data.to(devices[name], parameter.dtype)
        yield
    finally:
        for name, parameter in own.items():
            parameter.data = kept[name].to(devices[name])


def _learned(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that are saved with them: routers keep what they learned of balance in one."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}
