"""Run the MLPs and experts of a decoder in tiles along the sequence, so that one tile's tensors exist at a time.

An MLP is several times as wide as the hidden state, and processes each token by itself. The forward keeps only the
MLP's input; the backward recomputes one tile after another. Source: Arctic Long Sequence Training, arXiv:2506.13996,
section 3.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.models.compute.tiles import in_tiles
from ropewalk.models.sharding import decoder_layers

EXPERTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
"""Arguments of experts to which a router beside them sends tokens; each has the tokens in its first dimension."""


def tile_mlps(model: Any, tokens: int) -> None:
    """Let the MLPs and experts of a model process at most so many tokens at a time, in place.

    Results are equal within rounding, because matrix products of another number of rows may sum in another order.
    Gradients of parameters are summed over the tiles in float32, whatever the dtype of the parameters. Routers stay
    outside the tiles, so routing statistics do not change.

    Args:
        model: a transformers model, whole or sharded, without gradients of its own. Its parameters stay as they are.
        tokens: most tokens of a tile, over all rows of a batch, 1 or more.

    Raises:
        RopewalkError: if the layers have no such part, one that does not process each token by itself, or dropout,
            whose random numbers the recomputation would draw anew.
    """
    found = [module for layer in decoder_layers(model) for module in _by_token(layer)]
    if not found:
        raise RopewalkError(
            f"tiled_mlp found no MLP in the layers of {type(model).__name__} that processes each token by itself; set "
            "tiled_mlp to null"
        )
    for module in found:
        for name, part in module.named_modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                raise RopewalkError(
                    f"tiled_mlp recomputes the MLPs, and the dropout of {part.p:g} in {type(module).__name__}.{name} "
                    "would draw other random numbers; set the dropout to 0, or tiled_mlp to null"
                )
        # An instance's own forward, so that hooks, names of parameters and classes stay as they are.
        module.forward = partial(_run, module, module.forward, tokens)  # type: ignore[method-assign]


def _by_token(layer: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in a layer that process each token by itself, and hold its widest tensors."""
    for child in layer.children():
        if _arguments(child) in EXPERTS or _is_mlp(child):
            yield child
        elif "Experts" in type(child).__name__:
            raise RopewalkError(
                f"tiled_mlp cannot divide the tokens of {type(child).__name__}, whose arguments are "
                f"{', '.join(_arguments(child))} rather than {', '.join(EXPERTS[0])}; set tiled_mlp to null"
            )
        else:
            yield from _by_token(child)


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module maps one tensor through several linear maps, with nothing between them that mixes tokens."""
    if len(_arguments(module)) != 1:
        return False
    # Linear maps have matrices, norms and biases are vectors; convolutions have a third dimension.
    dimensions = [parameter.dim() for parameter in module.parameters()]
    own = list(module.parameters(recurse=False))
    return not own and dimensions.count(2) >= 2 and max(dimensions) == 2


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _run(module: nn.Module, forward: Callable[..., Tensor], tokens: int, *args: Any, **kwargs: Any) -> Tensor:
    given = tuple(inspect.signature(forward).bind(*args, **kwargs).arguments.values())
    return in_tiles(module, forward, tokens, given)
