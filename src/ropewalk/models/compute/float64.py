"""Run a transformers model in float64, although its classes ask for float32 in places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def run_experts_one_by_one(model: Any) -> dict[str, str | None]:
    """Make a mixture of experts multiply one expert after the other, because grouped matrix products lack float64.

    transformers stores this in the model's config, so it also affects models built from the same config object.

    Args:
        model: a transformers model; without experts it is not changed.

    Returns:
        The argument of its ``set_experts_implementation`` that undoes the change; empty if there is nothing to undo.
    """
    grouped: dict[str, str | None] = getattr(model, "get_experts_implementation", dict)()
    if all(implementation is None for implementation in grouped.values()):
        return {}
    model.set_experts_implementation("eager")
    return grouped


def compute_decays_again(model: Any) -> None:
    """Compute the decays of lightning attention in the dtype in which a model is.

    transformers computes these buffers in float32. In a float64 model, where the blocks of a run begin would otherwise
    change a result by the rounding of float32.

    Args:
        model: a transformers model; without lightning attention it is not changed.
    """
    for mixer in model.modules():
        if hasattr(mixer, "decay_factors"):
            decays = mixer.decay_factors(mixer.slope_rate)
            for name, decay in zip(("query_decay", "key_decay", "diagonal_decay"), decays, strict=True):
                setattr(mixer, name, decay)


class KeepFloat64(TorchFunctionMode):
    """Return float64 if code asks for float32 of a float64 tensor, as norms, routers and logits do.

    Float32 would make two sides that agree to 1e-16 sometimes round to different neighbours, and so differ by 1e-8.

    Attributes:
        paused: True while float32 is allowed.
    """

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0]
        return func(*(_wider(a) for a in args), **{key: _wider(a) for key, a in kwargs.items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
