"""A kernel of a recurrent layer as a dry run sees it: what it reads and writes, and its operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ropewalk.attention.engines.capabilities import SIMULATED


def _compute(*_: Any) -> None:
    raise AssertionError("tensors of the simulated device have no data to compute with")


_launch = torch.library.custom_op(
    "ropewalk::launch",
    _compute,
    mutates_args=("writes",),
    schema="(str name, Tensor[] reads, Tensor(a!)[] writes, int flops, int again, bool gradient) -> ()",
)
_launch.register_fake(lambda *_: None)

LAUNCH = torch.ops.ropewalk.launch

Method = TypeVar("Method", bound=Callable[..., Any])


def forward_in_autocast(function: Method) -> Method:
    """The forward of a function whose backward runs in the same autocast, as those of the packages do."""
    found: Method = torch.amp.custom_fwd(function, device_type=SIMULATED)
    return found


def backward_in_autocast(function: Method) -> Method:
    """The backward of such a function."""
    found: Method = torch.amp.custom_bwd(function, device_type=SIMULATED)
    return found


def launch(
    name: str,
    reads: Iterable[Tensor | None],
    writes: Iterable[Tensor | None],
    flops: int = 0,
    again: int = 0,
    gradient: bool = False,
) -> None:
    """Run a kernel without data.

    Args:
        name: name of the kernel.
        reads: tensors that it reads; None for those that this call does without.
        writes: tensors that it writes.
        flops: floating-point operations of its products.
        again: those of them that are no work of the model: computed before, or beside it.
        gradient: whether it computes gradients, and no part of a forward that a backward repeats.
    """
    read, written = ([each for each in some if each is not None] for some in (reads, writes))
    LAUNCH(name, read, written, flops, again, gradient)
