"""Seconds of a step's parts: by the host's clock, and by events of a GPU that has not happened to reach them yet."""

import time

import pytest
import torch

from ropewalk.training.update.clock import StepClock


def test_on_a_cpu_each_step_has_its_own_update():
    clock = StepClock(torch.device("cpu"))
    for update in (0.05, None, 0.1):
        clock.mark("begun")
        time.sleep(0.02)
        clock.mark("computed")
        time.sleep(0.03)
        if update is not None:
            clock.mark("updating")
            time.sleep(update)
            clock.mark("updated")
        found = clock.seconds()
        assert 0.02 <= found["forward_backward"] < 0.05
        assert ("optimizer_update" in found) == (update is not None)
        assert update is None or update <= found["optimizer_update"] < update + 0.05


class Gpu:
    """A stream whose work is done when the host waits for it; each event has a place in milliseconds."""

    def __init__(self):
        self.recorded, self.reached = 0.0, -1.0

    def work(self, milliseconds):
        self.recorded += milliseconds

    def wait(self):
        self.reached = self.recorded

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self, stream):
        assert stream == "the stream of cuda:0"
        self.at = self.gpu.recorded

    def elapsed_time(self, end):
        # As CUDA does, instead of waiting.
        if max(self.at, end.at) > self.gpu.reached:
            raise RuntimeError("device not ready")
        return end.at - self.at


def test_on_a_gpu_the_update_is_told_when_the_next_step_has_waited(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock, found = StepClock(torch.device("cuda", 0)), []
    for computing, update in ((100, 10), (200, None), (300, 30), (400, 40)):
        clock.mark("begun")
        gpu.work(computing)
        clock.mark("computed")
        gpu.work(1)
        gpu.wait()
        if update is not None:
            clock.mark("updating")
            gpu.work(update)
            clock.mark("updated")
        found.append(clock.seconds())
    assert [each["forward_backward"] for each in found] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [each.get("optimizer_update") for each in found] == [None, 0.01, None, 0.03]
