"""What a forward keeps in CPU memory for the backward: which tensors, and when they come back."""

import copy
from contextlib import nullcontext

import pytest
import torch

from ropewalk.models.compute import offload
from ropewalk.models.compute.offload import Offload
from ropewalk.models.load import checkpoint_activations
from tests.models.families import tiny_model


def gradients(model, context=None):
    ids = torch.randint(3, 90, (2, 21), generator=torch.Generator().manual_seed(0))
    if context is None:
        loss = model.model(ids, use_cache=False).last_hidden_state.square().sum()
    else:
        with context:
            loss = model.model(ids, use_cache=False).last_hidden_state.square().sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def model():
    model = tiny_model("llama").train()
    checkpoint_activations(model)
    return model


@pytest.fixture
def order(monkeypatch):
    """Each copy to the host and back, in order, by its number."""
    made, send, load = [], Offload.send, Offload._load
    numbers = {}

    def sent(self, tensor, with_last=False):
        away = send(self, tensor, with_last)
        numbers[id(away)] = len(numbers)
        made.append(("out", numbers[id(away)], tuple(tensor.shape)))
        return away

    def loaded(self, away):
        if away.back is None:
            made.append(("back", numbers[id(away)], tuple(away.shape)))
        load(self, away)

    monkeypatch.setattr(Offload, "send", sent)
    monkeypatch.setattr(Offload, "_load", loaded)
    return made


@pytest.mark.parametrize("block", [offload.BLOCK_BYTES, 256], ids=["one block", "many blocks"])
def test_gradients_are_the_same_to_the_bit(model, monkeypatch, block):
    monkeypatch.setattr(offload, "BLOCK_BYTES", block)
    expected = gradients(copy.deepcopy(model))
    found = gradients(model, Offload())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_tensor_that_comes_back_wrong_shows(model, monkeypatch):
    expected = gradients(copy.deepcopy(model))
    fetch = Offload.fetch
    monkeypatch.setattr(Offload, "fetch", lambda self, away: fetch(self, away) * 2)
    found = gradients(model, Offload())
    assert not all(torch.equal(found[name], value) for name, value in expected.items())


def test_inputs_of_layers_leave_and_each_is_on_its_way_before_it_is_needed(model, order):
    """The input of the layer before is loaded when that of a layer is taken, and none earlier."""
    taken = []
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, n=number: taken.append((n, len(order))))
    gradients(model, Offload())
    hidden = (2, 21, 32)
    sent = [number for way, number, shape in order if way == "out" and shape == hidden]
    assert len(sent) >= 4
    inputs = sent[:3]
    back = [number for way, number, _ in order if way == "back"]
    assert back == sorted(back, reverse=True)
    # Forward passes of three layers, then their recomputations, last to first.
    assert [n for n, _ in taken] == [0, 1, 2, 2, 1, 0]
    for layer, copies in taken[3:]:
        arrived = {number for way, number, _ in order[:copies] if way == "back"}
        assert inputs[layer] in arrived
        assert inputs[layer - 1] in arrived or layer == 0
        assert not set(inputs[: max(layer - 1, 0)]) & arrived


def test_parameters_and_views_of_larger_tensors_stay(order):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    hidden = torch.ones(6, 4, requires_grad=True)
    with Offload():
        made = hidden * 2
        loss = sum((part @ weight).square().sum() for part in made.split(3))
    loss.backward()
    assert [shape for way, _, shape in order if way == "out"] == [(3, 4), (3, 4)]
    assert torch.equal(hidden.grad, torch.full((6, 4), 128.0))


def test_blocks_are_powers_of_two(model):
    sent = Offload()
    with sent:
        loss = (torch.ones(3, 5, requires_grad=True) * 1.5).square().sum()
    away = sent._groups[0][0]
    assert [block.numel() for block in away.blocks] == [16]
    loss.backward()
    assert sent._groups[0] == []


class Streams:
    """A device module that notes which stream waits for what, in the order of the calls."""

    def __init__(self):
        self.log, self.main = [], self.Stream("main", self)

    class Stream:
        def __init__(self, name="side", owner=None):
            self.name, self.owner = name, owner

        def wait_stream(self, other):
            self.owner.log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            self.owner.log.append(f"{self.name} waits for copy {event}")

    def current_stream(self):
        return self.main

    def stream(self, stream):
        return nullcontext()


def test_copies_wait_for_the_computation_and_memory_is_reused_after_its_copy(monkeypatch):
    streams, events = Streams(), iter(range(10))

    class Event:
        def record(self, stream):
            self.number = next(events)
            streams.log.append(f"copy {self.number} is sent")

        def __str__(self):
            return str(self.number)

    streams.Event = Event
    side = Streams.Stream("side", streams)
    streams.__dict__["Stream"] = lambda: side
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    sent = Offload()
    sent._lane = offload._Lane(torch.device("cuda"))
    first, second = (sent.send(torch.full((3,), float(n))) for n in range(2))
    out = ["side waits for main", "copy 0 is sent", "side waits for main", "copy 1 is sent"]
    # The first tensor is let go after the second is on its way, which is the work of a layer later.
    assert streams.log == [*out, "main waits for copy 0"]
    streams.log.clear()
    assert torch.equal(sent.fetch(second), torch.full((3,), 1.0))
    # What comes back waits for what its memory was used for, and is used after it has come; the next one follows.
    assert streams.log == [
        "main waits for copy 1",
        "side waits for main",
        "main waits for side",
        "side waits for main",
    ]
    streams.log.clear()
    assert torch.equal(sent.fetch(first), torch.zeros(3))
    assert streams.log == ["main waits for side"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_are_the_same_on_a_gpu(model):
    expected = gradients(copy.deepcopy(model))
    model = model.cuda()
    with torch.device("cuda"):
        ids = torch.randint(3, 90, (2, 21), generator=torch.Generator().manual_seed(0), device="cpu").cuda()
        with Offload():
            loss = model.model(ids, use_cache=False).last_hidden_state.square().sum()
        loss.backward()
    for name, value in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad.cpu(), value, rtol=1e-3, atol=1e-4)
