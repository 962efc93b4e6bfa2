"""Run what processes each token by itself in tiles along the sequence: an MLP, or the output head with the loss.

The forward keeps only the inputs; the backward recomputes one tile after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Bounds = tuple[int, int]
"""Start and end of a tile, tokens."""
Chooser = Callable[[Sequence[Bounds]], Iterable[Bounds]]
"""Chooses the tiles that run, of all tiles."""

_chooser: Chooser | None = None
# A global and not a ContextVar, because autograd runs the backward of a GPU in a thread that has no context of ours.


@contextmanager
def tiles_chosen_by(chooser: Chooser) -> Iterator[None]:
    """Let a dry run leave out tiles that repeat others while the context is open, in all threads of the process."""
    global _chooser
    before, _chooser = _chooser, chooser
    try:
        yield
    finally:
        _chooser = before


def in_tiles(
    module: nn.Module, forward: Callable[..., Tensor], tokens: int, given: Sequence[Tensor]
) -> Tensor:
    """Call a function on tiles of its tensors, so that what it makes of one tile exists at a time.

    Gradients of parameters are summed over the tiles in float32 or wider, and passed on once.

    Args:
        module: its trained parameters are those that the function uses.
        forward: maps tensors ``[..., width]`` to one, each token by itself.
        tokens: most tokens of a tile, 1 or more.
        given: tensors of equally many tokens; those of the first have all dimensions but the last.

    Returns:
        ``[..., width]``, with the tokens of the first tensor.
    """
    hidden = given[0]
    if hidden.numel() <= tokens * hidden.shape[-1]:
        return forward(*given)
    shape = hidden.shape[:-1]
    flat = [each.reshape(-1, each.shape[-1]) for each in given]
    if not torch.is_grad_enabled():
        return _tile_by_tile(forward, tokens, flat, shape).view(*shape, -1)
    kept = _Kept.apply(torch.empty(0, device=hidden.device, requires_grad=True), *flat)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    out: Tensor = _Tiled.apply(kept.grad_fn, module, forward, tokens, shape, len(flat), *flat, *trained)
    return out.view(*shape, -1)


def _tile(tensors: Sequence[Tensor], start: int, stop: int, shape: torch.Size) -> list[Tensor]:
    """A tile of each ``[tokens, ...]`` tensor; with a batch dimension if the module was called with one."""
    parts = [each[start:stop] for each in tensors]
    return [each[None] for each in parts] if len(shape) > 1 else parts


def _bounds(count: int, tokens: int) -> Iterable[Bounds]:
    """Tiles of equal size, up to one token: a shorter last one would be compiled anew."""
    tiles = -(-count // tokens)
    found = list(pairwise(count * tile // tiles for tile in range(tiles + 1)))
    return found if _chooser is None else _chooser(found)


def _tile_by_tile(
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
    """The function, tile after tile; takes the trained parameters so that autograd passes their gradients on once."""

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
            # A cached cast would be of another tile's graph.
            cache_enabled=False,
        )
        ctx.set_materialize_grads(False)
        out = _tile_by_tile(forward, tokens, given, shape)
        # Casts of parameters that were cached here have no gradient, and would be taken where one is needed.
        torch.clear_autocast_cache()
        return out

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
