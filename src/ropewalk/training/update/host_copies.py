"""Copies between a GPU and ordinary CPU memory, through two pinned buffers, while the GPU computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class _Buffer:
    """Pinned memory that one copy uses at a time.

    Attributes:
        memory: its bytes.
        copied: event at the end of the copy in progress; None if there is none.
        then: what to do when the copy has ended.
        held: tensor that the copy reads.
    """

    memory: Tensor
    copied: Any = None
    then: Callable[[], object] | None = None
    held: Tensor | None = None

    def settle(self) -> None:
        """Wait for the copy in progress, and do what follows it."""
        if self.copied is None:
            return
        self.copied.synchronize()
        self.copied, self.held = None, None
        if self.then is not None:
            self.then()
            self.then = None


class HostCopies:
    """Sends tensors to CPU memory and brings tensors back, each copy beside the computation and the copies before it.

    Two buffers are enough for the GPU to fill one while the CPU empties the other. The tensors themselves need no
    pinned memory, of which torch would round every allocation up to a power of two. On other devices than CUDA, copies
    are made at once.
    """

    def __init__(self, device: torch.device, largest: int) -> None:
        """Prepare buffers.

        Args:
            device: device to copy from and to.
            largest: most bytes of a tensor that will be copied.
        """
        self.device = device
        self._stream: Any = None
        self._buffers: list[_Buffer] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._buffers = [
                _Buffer(torch.empty(largest, dtype=torch.uint8, pin_memory=True)) for _ in range(2)
            ]

    def send(self, tensor: Tensor, receive: Callable[[Tensor], object]) -> None:
        """Copy a tensor to the host and call ``receive`` with it, at the latest in :meth:`finish`.

        What ``receive`` gets is valid during the call alone. The tensor itself may be freed or reused right away.
        """
        if self._stream is None:
            receive(tensor.to("cpu", non_blocking=True))
            return
        buffer, there = self._next(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            there.copy_(tensor, non_blocking=True)
            buffer.copied = self._stream.record_event()
        buffer.held, buffer.then = tensor, partial(receive, there)

    def bring(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor of the host into one of the device, cast to its dtype; complete after :meth:`finish`."""
        if self._stream is None:
            target.copy_(source, non_blocking=True)
            return
        buffer, there = self._next(target)
        there.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(there, non_blocking=True)
            buffer.copied = self._stream.record_event()

    def finish(self) -> None:
        """Wait for all copies, and let the computation see them."""
        # The oldest first.
        for buffer in self._buffers:
            buffer.settle()

    def _next(self, like: Tensor) -> tuple[_Buffer, Tensor]:
        """The buffer whose copy is the oldest, free again, and a tensor in it."""
        buffer = self._buffers.pop(0)
        buffer.settle()
        self._buffers.append(buffer)
        return buffer, buffer.memory[: like.nbytes].view(like.dtype).view(like.shape)
