"""Run the MLPs and experts of a decoder in tiles along the sequence, so that one tile's tensors exist at a time.

An MLP is several times as wide as the hidden state, and processes each token by itself. The forward keeps only the
MLP's input; the backward recomputes one tile after another. Source: Arctic Long Sequence Training, arXiv:2506.13996,
section 3.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
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
    hidden = given[0]
    if hidden.numel() <= tokens * hidden.shape[-1]:
        whole: Tensor = forward(*given)
        return whole
    shape = hidden.shape[:-1]
    flat = [each.reshape(-1, each.shape[-1]) for each in given]
    if not torch.is_grad_enabled():
        return _in_tiles(forward, tokens, flat, shape).view(*shape, -1)
    kept = _Kept.apply(torch.empty(0, device=hidden.device, requires_grad=True), *flat)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    out: Tensor = _Tiled.apply(kept.grad_fn, module, forward, tokens, shape, len(flat), *flat, *trained)
    return out.view(*shape, -1)


def _tile(tensors: Sequence[Tensor], start: int, stop: int, shape: torch.Size) -> list[Tensor]:
    """A tile of each ``[tokens, ...]`` tensor; with a batch dimension if the module was called with one."""
    parts = [each[start:stop] for each in tensors]
    return [each[None] for each in parts] if len(shape) > 1 else parts


def _bounds(count: int, tokens: int) -> list[tuple[int, int]]:
    """Starts and ends of tiles of equal size, up to one token: a shorter last one would be compiled anew."""
    tiles = -(-count // tokens)
    return list(pairwise(count * tile // tiles for tile in range(tiles + 1)))


def _in_tiles(
    forward: Callable[..., Tensor], tokens: int, given: Sequence[Tensor], shape: torch.Size
) -> Tensor:
    out = None
    for start, stop in _bounds(given[0].shape[0], tokens):
        part = forward(*_tile(given, start, stop, shape)).flatten(0, -2)
        if out is None:
            out = part.new_empty(given[0].shape[0], part.shape[-1])
        out[start:stop] = part
    assert out is not None
    return out


class _Kept(torch.autograd.Function):
    """Keeps the inputs for the backward before the tiles run: a checkpointed layer that is recomputed ends here."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return torch.empty_like(node)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("its result is no part of the loss")


class _Tiled(torch.autograd.Function):
    """The MLP, tile after tile; takes the trained parameters so that autograd passes their gradients on once."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: Any,
        module: nn.Module,
        forward: Callable[..., Tensor],
        tokens: int,
        shape: torch.Size,
        number: int,
        *tensors: Tensor,
    ) -> Tensor:
        given, ctx.kept = tensors[:number], kept
        ctx.module, ctx.run, ctx.tokens, ctx.shape = module, forward, tokens, shape
        kind = tensors[0].device.type
        ctx.autocast = partial(
            torch.autocast,
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            # A cached cast of a parameter, made without gradients here, would have none where one is needed.
            cache_enabled=False,
        )
        ctx.set_materialize_grads(False)
        with ctx.autocast():
            return _in_tiles(forward, tokens, given, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given = ctx.kept.saved_tensors
        ctx.kept = None
        # As FSDP has gathered them for the backward.
        trained = [parameter for parameter in ctx.module.parameters() if parameter.requires_grad]
        needed = ctx.needs_input_grad[6 : 6 + len(given)]
        results = [torch.empty_like(each) if need else None for each, need in zip(given, needed, strict=True)]
        sums: list[Tensor | None] = [None] * len(trained)
        for start, stop in _bounds(given[0].shape[0], ctx.tokens):
            leaves = [
                each[start:stop].detach().requires_grad_(need)
                for each, need in zip(given, needed, strict=True)
            ]
            with torch.enable_grad(), ctx.autocast():
                out = ctx.run(*_tile(leaves, 0, stop - start, ctx.shape)).flatten(0, -2)
            wanted = [each for each in leaves if each.requires_grad]
            found = torch.autograd.grad(
                out, [*wanted, *trained], gradient[start:stop].to(out.dtype), allow_unused=True
            )
            inputs = iter(found[: len(wanted)])
            for result in results:
                if result is not None:
                    part = next(inputs)
                    result[start:stop] = 0 if part is None else part
            for index, part in enumerate(found[len(wanted) :]):
                sums[index] = _added(sums[index], part)
        parameters = (
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, trained, strict=True)
        )
        return (None,) * 6 + (*results, *parameters)


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """A sum over tiles in float32 or wider: in bfloat16, each addition would round the sum of all tiles before."""
    if part is None:
        return total
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32))
    return total.add_(part)
