"""Kernels without data, recorded in a forward and in a backward."""

import torch

from ropewalk.training.simulation.recording import Recorder
from ropewalk.training.simulation.recurrent.launch import launch
from ropewalk.training.simulation.simulated import register_device


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        launch("again", (grad,), (grad,), 1000, 10)
        launch("gradient", (grad,), (grad,), 1000, 10, gradient=True)
        return grad


def launches(backward):
    """The operators of kernels that are recorded."""
    recorder = Recorder(register_device((9, 0)))
    with recorder.recording_of() as recording:
        recorder.phase = "forward"
        x, y, z = (torch.empty(size, device=recorder.device, requires_grad=True) for size in (100, 50, 30))
        if backward:
            _InBackward.apply(x).sum().backward()
        else:
            with torch.no_grad():
                launch("some_kernel", (x, None, y), (z, None), 1000, 10)
    return [each for each in recording.operators if each.kind == "recurrent"]
