"""Copies to the host and back through two buffers, with streams that only note what happens."""

from contextlib import nullcontext

import pytest
import torch

from ropewalk.training.update import host_copies
from ropewalk.training.update.host_copies import HostCopies


def test_on_the_cpu_copies_are_made_at_once():
    copies, there = HostCopies(torch.device("cpu"), 0), []
    copies.send(torch.arange(4.0), lambda each: there.append(each.clone()))
    assert torch.equal(there[0], torch.arange(4.0))
    target = torch.zeros(4, dtype=torch.bfloat16)
    copies.bring(torch.arange(4.0), target)
    assert torch.equal(target, torch.arange(4.0).bfloat16())


@pytest.fixture
def log(monkeypatch):
    """Waits of streams and of the host, in order, for copies to a GPU that does not exist."""
    made = []

    class Stream:
        def wait_stream(self, other):
            made.append("copies wait for the computation")

        def record_event(self):
            number = sum(line.startswith("copy") and "begins" in line for line in made)
            made.append(f"copy {number} begins")
            return Event(number)

    class Event:
        def __init__(self, number):
            self.number = number

        def synchronize(self):
            made.append(f"host waits for copy {self.number}")

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return made


def test_two_copies_are_under_way_and_what_arrives_is_taken_after_its_copy(log):
    copies = HostCopies(torch.device("cuda"), 32)
    for number in range(3):
        copies.send(
            torch.full((2, 4), float(number)),
            lambda each, n=number: log.append(f"takes {n}: {each.shape[0]} rows of {each[0, 0]:g}"),
        )
    begins = ["copies wait for the computation", "copy {} begins"]
    assert log == [
        *(line.format(n) for n in (0, 1) for line in begins),
        "host waits for copy 0",
        "takes 0: 2 rows of 0",
        *(line.format(2) for line in begins),
    ]
    log.clear()
    copies.finish()
    assert log == [
        "host waits for copy 1",
        "takes 1: 2 rows of 1",
        "host waits for copy 2",
        "takes 2: 2 rows of 2",
    ]
    log.clear()
    copies.finish()
    assert log == []


def test_a_tensor_on_its_way_is_held_until_its_copy_is_made(log):
    copies = HostCopies(torch.device("cuda"), 16)
    copies.send(torch.ones(4), lambda each: None)
    assert [buffer.held is not None for buffer in copies._buffers] == [False, True]
    copies.finish()
    assert all(buffer.held is None for buffer in copies._buffers)


def test_what_comes_back_is_cast_on_the_host(log):
    copies, targets = HostCopies(torch.device("cuda"), 16), []
    for number in range(4):
        targets.append(torch.zeros(8, dtype=torch.bfloat16))
        copies.bring(torch.full((8,), number + 1 / 3), targets[-1])
    copies.finish()
    for number, target in enumerate(targets):
        assert torch.equal(target, torch.full((8,), number + 1 / 3).bfloat16())
    assert log.count("host waits for copy 0") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_a_gpu_arrive():
    copies, there = host_copies.HostCopies(torch.device("cuda"), 4 * 2**20), []
    for number in range(5):
        big = torch.full((2**20,), float(number), device="cuda") * 2
        copies.send(big, lambda each: there.append(each.clone()))
        del big
    copies.finish()
    for number, each in enumerate(there):
        assert torch.equal(each, torch.full((2**20,), 2.0 * number))
    target = torch.zeros(2**20, dtype=torch.bfloat16, device="cuda")
    copies.bring(there[3], target)
    copies.finish()
    assert torch.equal(target.cpu(), there[3].bfloat16())
