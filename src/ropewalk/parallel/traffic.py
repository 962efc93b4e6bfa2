"""Count the bytes that ranks send each other, over every collective that passes torch's dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Traffic:
    """Bytes that this rank sent to others and the number of calls, by kind of collective.

    The byte counts assume an algorithm of minimal volume. With P ranks, all-to-all sends everything but the rank's own
    part, all-gather and reduce-scatter send (P - 1) / P of the whole tensor, and all-reduce sends twice that.

    Attributes:
        bytes, calls: dicts with the keys ``all_to_all``, ``all_gather``, ``reduce_scatter``, ``all_reduce`` and
            ``broadcast``.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, sent: int) -> None:
        self.bytes[kind] = self.bytes.get(kind, 0) + sent
        self.calls[kind] = self.calls.get(kind, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count this rank's collectives while the context is open, including those of a backward pass.

    Torch's own ``CommDebugMode`` also counts in a ``TorchDispatchMode``. The class lives in a private module of torch,
    so a test compares the two counts.
    """
    traffic = Traffic()
    with _Counter(traffic):
        yield traffic


class _Counter(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sent = sent_by(func, args, kwargs or {})
        if sent is not None:
            self.traffic.add(sent.kind, sent.bytes)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Sent:
    """What one collective sends.

    Attributes:
        kind: a key of :attr:`Traffic.bytes`.
        bytes: bytes that this rank sends to others.
        group: torch's name of the process group.
        ranks: size of the group.
    """

    kind: str
    bytes: int
    group: str
    ranks: int


def sent_by(func: Any, args: Any, kwargs: Any) -> Sent | None:
    """What a call of one of torch's operators sends to other ranks; None if it is no collective."""
    name = func.name() if hasattr(func, "name") else ""
    if not name.startswith("c10d::"):
        return None
    kind = _KINDS.get(name.removeprefix("c10d::").partition(".")[0])
    return None if kind is None else _sent(kind, func, args, kwargs)


# Names of torch's c10d operators; the underscore variants work on one flat tensor instead of a list.
_KINDS = {
    "alltoall_base_": "all_to_all",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
}


def _sent(kind: str, func: Any, args: Any, kwargs: Any) -> Sent:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group = dist.ProcessGroup.unbox(given["process_group"])
    sent = _bytes_sent(kind, given, group.size(), group.rank())
    return Sent(kind, sent, group.group_name, group.size())


def _bytes_sent(kind: str, given: dict[str, Any], size: int, rank: int) -> int:
    if kind == "all_to_all":
        sent: Tensor = given["input"]
        splits = given.get("input_split_sizes") or []
        row = _bytes(sent) // sent.shape[0] if sent.shape[0] else 0
        own = splits[rank] if splits else sent.shape[0] // size
        # A rank's own part never leaves it.
        return row * (sent.shape[0] - own)
    if kind == "all_gather":
        return _bytes(given.get("input_tensor", given.get("input_tensors"))) * (size - 1)
    if kind == "reduce_scatter":
        return _bytes(given.get("input_tensor", given.get("input_tensors"))) * (size - 1) // size
    whole = _bytes(given["tensors"])
    return 2 * whole * (size - 1) // size if kind == "all_reduce" else whole


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(each) for each in tensors)
