"""A loop of transformers over the chunks of a row, played for a few chunks and extended to all of them.

Such a loop takes the same of each chunk, so that memory and operations grow in proportion to their number, but for
gradients: autograd writes a gradient of the whole row for each chunk that a loop takes from it, so that bytes grow with
the square. The loop is played on the first chunks of its inputs, forward and backward, three times; what all chunks
take is extended from these. It is one node of the graph, which holds as much memory as the loop would save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ropewalk.training.simulation.bytes_moved import tensors_in
from ropewalk.training.simulation.extending import extended

FEW = (8, 9, 10)
"""Numbers of chunks that are played."""


class Account(Protocol):
    """The recorder's account; see :class:`~ropewalk.training.simulation.recording.Recorder`."""

    loops: dict[Any, Any]

    def apart(self) -> AbstractContextManager[Any]: ...
    def charge(self, name: str, most: int, operators: Counter[Any], forward: bool) -> None: ...
    def keeps(self) -> bool: ...
    def release(self, key: int) -> None: ...
    def without_memory(self, like: Tensor, size: int) -> Tensor: ...


@dataclass(frozen=True)
class Result:
    """Shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Loop:
    """What a loop takes beside its inputs.

    Attributes:
        saved: bytes from the end of the forward to the backward, without results.
        most: bytes at the highest points of a forward whose intermediate values are dropped, of one that saves them,
            both with results, and of the backward, with what is saved and gradients of inputs.
        forward, backward: operators.
        needed: which of the inputs the backward needs.
        results: what the loop returns, with a :class:`Result` in place of each tensor.
    """

    saved: int
    most: tuple[int, int, int]
    forward: Counter[Any]
    backward: Counter[Any]
    needed: tuple[bool, ...]
    results: Any


def few_chunks(
    account: Account, name: str, function: Callable[..., Any], chunk: int, module: nn.Module | None = None
) -> Callable[..., Any]:
    """A function that takes what another one does, which it plays for a few chunks alone.

    Args:
        account: the recorder's account.
        name: name of the function.
        function: tokens are the second dimension of its tensors, and of the results that have as many.
        chunk: tokens of a chunk.
        module: module whose parameters the function uses.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        tokens = args[0].shape[1]
        if tokens <= FEW[-1] * chunk:
            return function(*args, **kwargs)
        given, structure = tree_flatten((args, kwargs))
        places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]
        tensors = [given[place] for place in places]
        weights = [] if module is None else list(module.parameters())

        def short(number: int) -> tuple[Any, list[Tensor]]:
            """The call on a few chunks, the last as full as that of the row, and its tensors."""
            leaves = [_first(each, tokens, number * chunk - -tokens % chunk) for each in tensors]
            filled = list(given)
            for place, leaf in zip(places, leaves, strict=True):
                filled[place] = leaf
            positional, named = tree_unflatten(filled, structure)
            return function(*positional, **named), leaves

        device = tensors[0].device.type
        plain = [repr(each) for each in given if not isinstance(each, Tensor)]
        shapes = [
            (each.shape, each.stride(), each.dtype, each.requires_grad) for each in (*tensors, *weights)
        ]
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        key = name, chunk, tuple(plain), tuple(shapes), autocast
        if key not in account.loops:
            runs = [_played(account, partial(short, number), weights, device) for number in FEW]
            account.loops[key] = _of_all(runs, tokens, chunk)
        loop: Loop = account.loops[key]
        made = iter(_Node.apply(account, name, loop, *tensors, *weights))  # type: ignore[no-untyped-call]
        return tree_map_only(Result, lambda _: next(made), loop.results)

    return call


def _first(tensor: Tensor, tokens: int, number: int) -> Tensor:
    found = tensor.detach()
    if found.dim() > 1 and found.shape[1] == tokens:
        found = found[:, :number]
    return found.requires_grad_(tensor.requires_grad)


def _played(
    account: Account,
    run: Callable[[], tuple[Any, list[Tensor]]],
    parameters: Sequence[nn.Parameter],
    device: str,
) -> Loop:
    """Run a function and its backward apart from what is recorded."""
    with account.apart() as apart:
        with torch.no_grad(), _uncached(device):
            result, leaves = run()
        _, dropped = _heights(apart.events)
        del result, leaves
    saved: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        saved.add(_key(tensor))
        # An operator that saves its own result, and that no gradient reaches, would hold itself.
        return tensor.detach()

    with account.apart() as apart:
        with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x), _uncached(device):
            result, leaves = run()
        results = tree_map_only(Tensor, lambda each: Result(tuple(each.shape), each.dtype), result)
        forward, (held, most) = apart.operators.copy(), _heights(apart.events)
        needed = tuple(_key(each) in saved for each in leaves)
        own = {_key(each) for each in leaves}
        outputs = [each for each in tensors_in(result) if _key(each) not in own]
        of_outputs = {_key(each): each.untyped_storage().nbytes() for each in outputs}
        edges = [get_gradient_edge(each) for each in outputs if each.requires_grad]
        gradients = [torch.empty_like(each) for each in outputs if each.requires_grad]
        del result, outputs
        # Neither is held by the loop: gradients of its results, and results that it has saved.
        beside = sum(each.nbytes for each in gradients)
        beside += sum(size for key, size in of_outputs.items() if key in saved)
        start = len(apart.events)
        wanted = [each for each in (*leaves, *parameters) if each.requires_grad]
        torch.autograd.grad(edges, wanted, gradients, allow_unused=True)
        _, height = _heights(apart.events, start)
        backward = apart.operators - forward
        del edges, gradients, wanted, leaves
    highest = dropped, most, height - beside
    return Loop(held - sum(of_outputs.values()), highest, forward, backward, needed, results)


def _uncached(device: str) -> AbstractContextManager[Any]:
    """The present autocast without its cache, whose entries would outlive the run."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype, enabled, cache_enabled=False)


def _of_all(runs: Sequence[Loop], tokens: int, chunk: int) -> Loop:
    """What a loop over so many tokens takes."""
    first, second, third = (-(-tokens // chunk) - number for number in FEW)
    # The polynomials through three points, and the line through two: the highest memory has kinks, but no curvature.
    squares = second * third // 2, -first * third, first * second // 2
    line = -third, second
    last, few = runs[1:], FEW[-1] * chunk - -tokens % chunk

    def whole(result: Result) -> Result:
        length = (tokens,) if result.shape[1:2] == (few,) else result.shape[1:2]
        return Result((*result.shape[:1], *length, *result.shape[2:]), result.dtype)

    return Loop(
        extended([each.saved for each in last], line),
        extended([each.most for each in last], line),
        Counter(extended([each.forward for each in runs], squares)),
        Counter(extended([each.backward for each in runs], squares)),
        runs[-1].needed,
        tree_map_only(Result, whole, runs[-1].results),
    )


def _heights(events: Sequence[Any], start: int = 0) -> tuple[int, int]:
    """Bytes at the end of some events, and most at any time from one of them on."""
    now = most = 0
    for number, event in enumerate(events):
        now += 0 if event.allocation.host else event.change
        most = max(most, now) if number >= start else now
    return now, most


class _Node(torch.autograd.Function):
    """The loop as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, account: Account, name: str, loop: Loop, *given: Tensor) -> tuple[Tensor, ...]:
        results = [each for each in tree_leaves(loop.results) if isinstance(each, Result)]
        made = tuple(given[0].new_empty(each.shape, dtype=each.dtype) for each in results)
        beside = sum(each.bytes for each in results)
        if account.keeps():
            held = given[0].new_empty(loop.saved, dtype=torch.uint8)
            account.charge(name, loop.most[1] - loop.saved - beside, loop.forward, forward=True)
        else:
            # A checkpointed layer drops it at once, and compares its shape with that of its recomputation.
            held = account.without_memory(given[0], loop.saved)
            account.charge(name, loop.most[0] - beside, loop.forward, forward=True)
        needed = [each for each, need in zip(given, loop.needed, strict=False) if need]
        ctx.save_for_backward(held, *needed)
        ctx.account, ctx.name, ctx.loop = account, name, loop
        ctx.like = [(each.shape, each.dtype) for each in given]
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        held, loop = ctx.saved_tensors[0], ctx.loop
        ctx.account.charge(ctx.name, loop.most[2] - loop.saved, loop.backward, forward=False)
        ctx.account.release(_key(held))
        made = (
            held.new_empty(shape, dtype=dtype) if needed else None
            for (shape, dtype), needed in zip(ctx.like, ctx.needs_input_grad[3:], strict=True)
        )
        return None, None, None, *made


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
