"""Tensor functions that a GPU runs as one compiled kernel, and that every other device runs as they are written.

Elementwise work is limited by memory: run operator by operator, each step of it reads and writes whole tensors, and
holds them until it ends. A compiled function reads its inputs once and writes its outputs once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")

MOST_GRAPHS = 64
"""Number of graphs of one function, for other shapes and modules, from which on a call that needs another one fails."""

Runner = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a function with its arguments as one operator."""

_runner: Runner | None = None
# A global and not a ContextVar, because autograd runs the backward of a GPU in a thread that has no context of ours.


@contextmanager
def fused_calls_run_by(runner: Runner) -> Iterator[None]:
    """Let a dry run account for fused functions while the context is open, in all threads of the process."""
    global _runner
    before, _runner = _runner, runner
    try:
        yield
    finally:
        _runner = before


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function where its tensors are on a GPU; elsewhere call it as it is, with the same bits as without.

    The first shapes that it meets are compiled as constants, because the rows of a training stage have one length; with
    other shapes it is compiled once more for all of them.

    Args:
        function: a function of tensors and plain values that depends on nothing else, changes nothing, and returns a
            tensor or a tuple of tensors.

    Example:
        >>> @fused
        ... def gated(gate: Tensor, up: Tensor) -> Tensor:
        ...     return torch.nn.functional.silu(gate) * up
    """

    def on_gpu(*args: P.args, **kwargs: P.kwargs) -> bool:
        given = (*args, *kwargs.values())
        return any(isinstance(each, Tensor) and each.is_cuda for each in given) and not compiler_missing(
            "cuda"
        )

    return compiled_where(on_gpu, function)


def compiled_where(
    where: Callable[..., bool], function: Callable[P, R], backend: str = "inductor"
) -> Callable[P, R]:
    """Compile a function for the calls that a condition on their arguments selects, and leave the others as they are.

    Args:
        where: the condition.
        function: as for :func:`fused`; it may also be a method that reads the parameters of its module.
        backend: compiler of torch.
    """
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        # Inside a function that is being compiled, this one becomes a part of its kernels.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if _runner is not None:
            result: R = _runner(function, args, kwargs)
            return result
        if not where(*args, **kwargs):
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, fullgraph=True, backend=backend)
        # A norm meets hidden states, queries and keys, with gradients and without, and must not fail at the ninth. For
        # this call alone: others' functions keep their limit, and threads, such as autograd's, each have their own.
        config = torch._dynamo.config
        before, config.recompile_limit = config.recompile_limit, max(config.recompile_limit, MOST_GRAPHS)
        try:
            return compiled(*args, **kwargs)
        finally:
            config.recompile_limit = before

    return call


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Save only the arguments of a method for its backward, which runs it again, with the same bits as without.

    Arguments of 32 bits are left alone: what is computed from them in float32 needs no copy of them, and autograd would
    add the parts of their gradients in another order.

    Args:
        function: a method of a module that depends on its tensor arguments and the module's parameters alone.
    """

    @wraps(function)
    def call(module: nn.Module, *args: Any) -> Tensor:
        narrow = all(isinstance(each, Tensor) and each.dtype.itemsize < 4 for each in args)
        if not narrow or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return function(module, *args)
        result: Tensor = _Recomputed.apply(function, module, len(args), *args, *module.parameters())
        return result

    return call


class _Recomputed(torch.autograd.Function):
    """A method of a module whose intermediate results live in its forward and its backward, but not between them."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], module: nn.Module, number: int, *given: Any
    ) -> Tensor:
        inputs = given[:number]
        ctx.function, ctx.module = function, module
        ctx.save_for_backward(*inputs)
        device = inputs[0].device.type
        # The backward runs outside of the forward's autocast, and on a GPU in another thread. Without a cache, because
        # a cast that is made here, without gradients, must not serve operators that need one.
        ctx.autocast = partial(
            torch.autocast,
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        with ctx.autocast():
            return function(module, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors]
        # Those of this moment, because FSDP2 gathers parameters anew for the backward.
        leaves = [*inputs, *ctx.module.parameters()]
        with torch.enable_grad(), ctx.autocast():
            output = ctx.function(ctx.module, *inputs)
        found = iter(torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], gradient))
        return None, None, None, *(next(found) if leaf.requires_grad else None for leaf in leaves)


@cache
def compiler_missing(device: str) -> str:
    """What torch lacks here to compile for a type of device; empty if it lacks nothing."""
    if device not in ("cuda", "cpu"):
        return "a CUDA device or the CPU"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    # Triton compiles its launchers with the first, torch its kernels for a CPU with the second.
    variable, programs = (
        ("CC", ("cc", "gcc", "clang")) if device == "cuda" else ("CXX", ("g++", "clang++", "c++"))
    )
    found = any(shutil.which(each) for each in (os.environ.get(variable), *programs) if each)
    return "" if found else f"a compiler ({' or '.join(programs)})"
