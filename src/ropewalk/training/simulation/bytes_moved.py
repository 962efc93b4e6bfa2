"""Bytes that an operator reads and writes in the memory of its device, from its schema and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Operators that copy between devices."""

OVERWRITING = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "launch")
"""Operators that do not read what they write to."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, in order; torch's own walk takes ten times as long."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


class _Access(NamedTuple):
    """Whether an operator reads all its tensors, the arguments that it writes to, and whether it makes tensors."""

    reads: bool
    written: tuple[str, ...]
    makes: bool


@cache
def _access(func: Any) -> _Access:
    """How an operator uses memory; views do not, and the bytes of collectives are counted as sent."""
    space, _, name = str(getattr(func, "_overloadpacket", func)).partition(".")
    if "c10d" in space or name.startswith(("empty", "new_empty", "_unsafe_view")):
        return _Access(False, (), False)
    schema = func._schema
    written = tuple(
        each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write
    )
    makes = bool(schema.returns) and all(each.alias_info is None for each in schema.returns)
    return _Access(name not in OVERWRITING, written, makes)


def makes_tensors(func: Any) -> bool:
    """Whether the results of an operator are new tensors, and no views or arguments."""
    return _access(func).makes


def bytes_moved(
    func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], result: Any, device_type: str
) -> int:
    """Bytes that an operator reads and writes on a device; 0 for views, collectives, and copies between devices.

    Args:
        func: the operator.
        args, kwargs: its arguments.
        inputs: all tensors among them.
        result: its result.
        device_type: type of the device.
    """
    access = _access(func)
    written = [each for name in access.written for each in _argument(func, args, kwargs, name)]
    if access.makes:
        written += tensors_in(result)
    if not written or written[0].device.type != device_type:
        return 0
    if func in COPIES and any(each.device.type != device_type for each in inputs):
        return 0
    read = inputs if access.reads else [each for each in inputs if not any(each is one for one in written)]
    return sum(bytes_of(each) for each in (*read, *written) if each.device.type == device_type)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> list[Tensor]:
    """The tensors of an argument."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
    return tensors_in(given.get(name, kwargs.get(name)))


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor; what is repeated by a stride of 0 counts once."""
    number = tensor.numel()
    if number and 0 in (strides := tensor.stride()):
        number //= math.prod(n for n, stride in zip(tensor.shape, strides, strict=True) if stride == 0)
    return number * tensor.element_size()
