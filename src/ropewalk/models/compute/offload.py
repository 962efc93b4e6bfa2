"""Keep tensors in CPU memory from the forward to the backward, and move them while the GPU computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

BLOCK_BYTES = 64 * 2**20
"""Size of a block of pinned memory. torch rounds pinned allocations up to powers of two: one block for each tensor
would cost up to twice its bytes."""


@dataclass(eq=False)
class Away:
    """A tensor in CPU memory.

    Attributes:
        blocks: its elements in order, the last block possibly longer than what is left for it.
        shape, dtype, device: those of the tensor.
        group: number of the group that it comes back with.
        back: the tensor on its way back to the device.
    """

    blocks: list[Tensor]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    group: int
    back: Tensor | None = None


@dataclass(eq=False)
class _Lane:
    """A stream for copies beside the computation; on the CPU, copies are made at once.

    Attributes:
        held: tensor of the last copy to the host, which must not be freed before the copy, and the copy's event.
    """

    device: torch.device
    stream: Any = None
    held: tuple[Tensor, Any] | None = None

    def __post_init__(self) -> None:
        if self.device.type != "cpu":
            self.stream = torch.get_device_module(self.device).Stream()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies of what the computation has made so far."""
        if self.stream is None:
            yield
            return
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            yield

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor until its copy is made; the next call lets it go."""
        if self.stream is None:
            return
        event = torch.get_device_module(self.device).Event()
        event.record(self.stream)
        self.release()
        self.held = tensor, event

    def release(self) -> None:
        """Let the computation reuse the memory of the tensor held, after its copy."""
        if self.held is not None:
            torch.get_device_module(self.device).current_stream().wait_event(self.held[1])
            self.held = None

    def wait(self) -> None:
        """Let the computation wait for the copies made so far."""
        if self.stream is not None:
            torch.get_device_module(self.device).current_stream().wait_stream(self.stream)


CURRENT: ContextVar[Offload | None] = ContextVar("offload", default=None)
"""The offload of the forward pass in progress."""


class Offload:
    """Keeps what autograd saves during one forward pass in CPU memory.

    Of checkpointed layers that is their inputs; besides, the input of the final norm. Parameters stay where they are,
    and so do views of larger tensors, which would free nothing. When a tensor comes back in the backward, the group of
    tensors that was sent before its own follows, so that it is there when the layer before needs it.

    Example:
        >>> with Offload():
        ...     loss = model(ids, labels, layouts).sum()
        >>> loss.backward()
    """

    def __init__(self) -> None:
        self._lane: _Lane | None = None
        self._groups: list[list[Away]] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()
        self._token = CURRENT.set(self)

    def __exit__(self, *error: Any) -> None:
        CURRENT.reset(self._token)
        self._hooks.__exit__(*error)

    def send(self, tensor: Tensor, with_last: bool = False) -> Away:
        """Copy a tensor to CPU memory; with ``with_last`` it comes back together with the one that was sent before."""
        if self._lane is None:
            self._lane = _Lane(tensor.device)
        if not (with_last and self._groups):
            self._groups.append([])
        flat = tensor.detach().reshape(-1)
        pinned = flat.device.type == "cuda"
        away = Away([], tensor.shape, tensor.dtype, tensor.device, len(self._groups) - 1)
        with self._lane.copying():
            for part in flat.split(BLOCK_BYTES // flat.element_size()):
                block = part.new_empty(_rounded(part.numel()), device="cpu", pin_memory=pinned)
                block[: part.numel()].copy_(part, non_blocking=True)
                away.blocks.append(block)
        self._lane.hold(flat)
        self._groups[-1].append(away)
        return away

    def sent(self) -> Iterator[tuple[Away, bool]]:
        """What has been sent and not fetched, in order, and whether it was sent together with what is before it."""
        for group in self._groups:
            yield from ((away, index > 0) for index, away in enumerate(group))

    def fetch(self, away: Away) -> Tensor:
        """The tensor on its device; the group before its own follows."""
        assert self._lane is not None
        self._lane.release()
        group = self._groups[away.group]
        for each in (away, *group):
            self._load(each)
        self._lane.wait()
        for each in self._groups[away.group - 1] if away.group else ():
            self._load(each)
        tensor, away.back = away.back, None
        assert tensor is not None
        if away in group:
            group.remove(away)
        return tensor

    def _load(self, away: Away) -> None:
        if away.back is not None:
            return
        assert self._lane is not None
        # Allocated by the computation, which goes on to use it, and filled after what it was used for before.
        away.back = away.blocks[0].new_empty(away.shape, device=away.device)
        with self._lane.copying():
            parts = away.back.view(-1).split(BLOCK_BYTES // away.back.element_size())
            for part, block in zip(parts, away.blocks, strict=True):
                part.copy_(block[: part.numel()], non_blocking=True)

    def _pack(self, tensor: Tensor) -> Away | Tensor:
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
        if is_view or isinstance(tensor, nn.Parameter) or not tensor.numel():
            return tensor
        return self.send(tensor)

    def _unpack(self, saved: Away | Tensor) -> Tensor:
        return saved if isinstance(saved, Tensor) else self.fetch(saved)


def _rounded(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def beside_the_input(tensor: Tensor) -> Callable[[], Tensor]:
    """Keep a tensor of a checkpointed layer where the layer's input is; the result gets it back."""
    offload = CURRENT.get()
    if offload is None:
        return lambda: tensor
    return partial(offload.fetch, offload.send(tensor, with_last=True))
