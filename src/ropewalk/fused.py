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
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

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
        given = (*args, *kwargs.values())
        if not any(isinstance(each, Tensor) and each.is_cuda for each in given) or not compiler_works():
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, fullgraph=True)
        return compiled(*args, **kwargs)

    return call


@cache
def compiler_works() -> bool:
    """Whether torch can compile for a GPU here: it needs triton, and triton a compiler of C."""
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return importlib.util.find_spec("triton") is not None and any(
        shutil.which(each) for each in compilers if each
    )
