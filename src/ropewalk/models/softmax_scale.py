"""A constant scale of attention's scores, folded into the weights that make the queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig

NORMS = ("q_norm", "q_layernorm")
"""Attributes of a norm of queries, after which a factor on the queries' projection has no effect."""
FUSED = "qkv_proj"
"""Attribute of one projection for queries, keys and values, in this order (Phi-3)."""


def fold_softmax_scale(model: nn.Module, scale: float) -> None:
    """Multiply the scores of every attention by a constant, in place and without a new part.

    The factor goes to the weight of the norm of queries if there is one, otherwise to their projection. It is exact for
    a model without RoPE, and for one with RoPE too, because rotation is linear.

    Args:
        model: transformers decoder, whole or sharded.
        scale: factor on every score before the softmax, > 0; a soft cap applies after it.

    Raises:
        RopewalkError: if an attention of the model makes its queries otherwise.
    """
    with torch.no_grad():
        for parameter, rows in _makes_queries(model):
            parameter.mul_(_factors(parameter, rows, scale))


@contextmanager
def scaled_softmax(model: nn.Module, scale: float) -> Iterator[None]:
    """Run a model with a folded scale within the context manager; its weights are restored bit by bit afterwards."""
    kept = [(parameter, parameter.detach().clone()) for parameter, _ in _makes_queries(model)]
    fold_softmax_scale(model, scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept:
                parameter.copy_(before)


def _makes_queries(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Parameters that the queries are proportional to, with the number of first rows that belong to queries."""
    config = ModelConfig.of(model.config)
    layers = list(_attentions(model))
    if len(layers) != len(config.layers):
        raise RopewalkError(
            f"{type(model).__name__} has {len(layers)} modules self_attn for {len(config.layers)} layers, so ropewalk "
            "cannot fold a softmax scale into its queries"
        )
    for number, attention in enumerate(layers):
        norm = next((getattr(attention, name) for name in NORMS if _has(attention, name)), None)
        if norm is not None:
            # Without an offset a norm is proportional to its weight.
            yield from ((parameter, len(parameter)) for parameter in norm.parameters())
        elif _has(attention, "q_proj"):
            yield from ((parameter, len(parameter)) for parameter in attention.q_proj.parameters())
        elif _has(attention, FUSED):
            rows = config.heads_of_layers[number] * config.layers[number].key_dim
            yield from ((parameter, rows) for parameter in getattr(attention, FUSED).parameters())
        else:
            raise RopewalkError(
                f"{type(attention).__name__} has neither q_proj nor {FUSED}, so ropewalk cannot fold a softmax scale "
                "into its queries"
            )


def _attentions(model: nn.Module) -> Iterator[Any]:
    return (module for name, module in model.named_modules() if name.rpartition(".")[2] == "self_attn")


def _has(attention: nn.Module, name: str) -> bool:
    return isinstance(getattr(attention, name, None), nn.Module)


def _factors(parameter: Tensor, rows: int, scale: float) -> Tensor | float:
    """The factor of each row of a parameter, arranged over ranks as the parameter is."""
    if rows == len(parameter):
        return scale
    factors = torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    factors[:rows] = scale
    # With None torch sends nothing, since every rank has all factors.
    if isinstance(parameter, DTensor):
        return distribute_tensor(factors, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return factors
