"""Attention results that a checkpointed layer keeps: fewer kernel calls, the same gradients to the bit."""

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.attention import kept, packed
from ropewalk.attention.engines.runs import Runs
from ropewalk.attention.kept import Keeping, Kept, keys_of_a_query
from ropewalk.models.compute.offload import Offload
from ropewalk.models.load import attach, checkpoint_activations
from tests.models.families import WINDOW, tiny_model

LENGTH = 42
LAYOUTS = {
    "full": [PackedLayout.from_lengths([LENGTH], "full", 0)],
    "anchor": [PackedLayout.from_lengths([17, 20], "anchor", 5)],
    "two rows": [PackedLayout.from_lengths([20, 22], "intra_document", 0)] * 2,
}


def gradients(family, layouts, least=None, offload=False, monkeypatch=None, on_device=False):
    """Gradients, and the number of times that the kernels ran."""
    model = tiny_model(family, sharp=True).train()
    attach(model, engine="sdpa")
    checkpoint_activations(model, None if least is None else Keeping(least, on_device))
    calls, forward = [], packed.attend_forward
    ids = torch.randint(3, 90, (len(layouts), LENGTH), generator=torch.Generator().manual_seed(0))
    kernel = packed.merge
    monkeypatch.setattr(packed, "merge", lambda *given: calls.append(1) or kernel(*given))
    try:
        if offload:
            with Offload():
                loss = model(ids, layout=tuple(layouts)).logits.square().mean()
        else:
            loss = model(ids, layout=tuple(layouts)).logits.square().mean()
        loss.backward()
    finally:
        monkeypatch.setattr(packed, "merge", kernel)
    assert packed.attend_forward is forward
    return {name: p.grad for name, p in model.named_parameters()}, len(calls)


@pytest.mark.parametrize("pattern", LAYOUTS)
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_kernels_run_once_a_layer_and_gradients_are_the_same_to_the_bit(
    family, pattern, offload, monkeypatch
):
    """gpt-oss has sinks and windows, whose results are kept like others if they are asked for."""
    layouts = LAYOUTS[pattern]
    expected, again = gradients(family, layouts, None, False, monkeypatch)
    found, once = gradients(family, layouts, 0, offload, monkeypatch)
    assert (again, once) == (2 * 3, 3)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_results_that_stay_on_the_device_are_not_offloaded_with_the_inputs(monkeypatch):
    layouts, beside = LAYOUTS["anchor"], []
    expected, _ = gradients("mistral", layouts, None, False, monkeypatch)
    send = Offload.send
    monkeypatch.setattr(
        Offload,
        "send",
        lambda self, tensor, with_last=False: beside.append(with_last) or send(self, tensor, with_last),
    )
    for on_device in (False, True):
        beside.clear()
        found, calls = gradients("mistral", layouts, 0, True, monkeypatch, on_device)
        assert calls == 3
        # An output and its log-sum-exp in each of three layers.
        assert (sum(beside), beside.count(False) > 3) == (0 if on_device else 6, True)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_results_of_windows_are_computed_again(monkeypatch):
    """Of gpt-oss's three layers the second sees the whole row, on average more keys than a window has."""
    layouts = LAYOUTS["full"]
    expected, _ = gradients("gpt_oss", layouts, None, False, monkeypatch)
    found, calls = gradients("gpt_oss", layouts, WINDOW + 1, False, monkeypatch)
    assert calls == 3 + 2
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_results_of_another_layer_show(monkeypatch):
    layouts = LAYOUTS["anchor"]
    expected, _ = gradients("mistral", layouts, None, False, monkeypatch)
    last = []

    def mixed(self, compute, runs, window):
        if self._recomputing:
            return last[0]
        last.append(compute())
        return last[-1]

    monkeypatch.setattr(Kept, "results", mixed)
    found, _ = gradients("mistral", layouts, 0, False, monkeypatch)
    assert not all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_result_is_let_go_when_it_is_taken():
    stash = Kept(0, lambda tensor: lambda: tensor)
    first, again = stash.contexts()
    made = torch.ones(2), torch.zeros(2)
    with first:
        stash.results(lambda: made, Runs((3,), (3,)), None)
    with again:
        taken = stash.results(lambda: pytest.fail("computed again"), Runs((3,), (3,)), None)
    assert all(map(torch.equal, taken, made))
    assert stash._results == []
    assert kept.KEPT.get() is None


@pytest.mark.parametrize("window", [None, 1, 4, 7, 30])
@pytest.mark.parametrize(("queries", "keys"), [((5, 9), (5, 9)), ((3, 4), (11, 4)), ((1,), (1,))])
def test_keys_of_a_query_are_those_that_a_mask_shows(queries, keys, window):
    pairs = 0
    for q, k in zip(queries, keys, strict=True):
        place, key = torch.arange(k - q, k)[:, None], torch.arange(k)
        seen = key <= place
        if window is not None:
            seen &= place - key < window
        pairs += int(seen.sum())
    assert keys_of_a_query(Runs(queries, keys), window) == pairs / sum(queries)
