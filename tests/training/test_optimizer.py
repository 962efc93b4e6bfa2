"""The optimiser against torch's own AdamW, its float32 masters, and the learning rate."""

import copy

import pytest
import torch

from ropewalk.training.optimizer import MasterAdamW, learning_rate_at
from ropewalk.training.recipe.recipe import Optimizer

SETTINGS = Optimizer()


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(dtype)


def gradients(model, seed):
    torch.manual_seed(seed)
    x = torch.randn(5, 6).to(next(model.parameters()).dtype)
    model(x).float().square().sum().backward()


def test_float32_parameters_follow_torchs_adamw():
    ours, theirs = network(), network()
    optimizer = MasterAdamW(ours.named_parameters(), SETTINGS)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(4):
        for model in (ours, theirs):
            gradients(model, step)
        optimizer.collect_gradients()
        optimizer.clip()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step(1e-2)
        adamw.step()
        optimizer.zero_grad()
        adamw.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_small_updates_reach_bfloat16_parameters_through_their_masters():
    """Steps of 1e-4 are lost in bfloat16 weights of size 1, but their sum must not be."""
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)], Optimizer(weight_decay=0.0))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.collect_gradients()
        optimizer.step(1e-4)
        optimizer.zero_grad()
    # Adam's step is the learning rate where the gradient is constant.
    expected = 1 - 100 * 1e-4
    assert (weight.float() - expected).abs().max() <= torch.finfo(torch.bfloat16).eps
    assert weight.float().max() < 1


def test_gradients_of_micro_batches_add_up_in_float32():
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)], SETTINGS)
    for value in [256.0] + [1.0] * 100:
        weight.grad = torch.full_like(weight, value)
        optimizer.collect_gradients()
    assert optimizer.masters["w"].grad.flatten().tolist() == [356.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_saved_and_loaded_goes_on_identically(dtype):
    model = network(dtype)
    optimizer = MasterAdamW(model.named_parameters(), SETTINGS)

    def steps(model, optimizer, seeds):
        for seed in seeds:
            gradients(model, seed)
            optimizer.collect_gradients()
            optimizer.step(1e-2)
            optimizer.zero_grad()

    steps(model, optimizer, range(3))
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    weights = optimizer.weights(model.state_dict())
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    other = copy.deepcopy(model)
    resumed = MasterAdamW(other.named_parameters(), SETTINGS, weights)
    resumed.load_state(state)
    steps(model, optimizer, range(3, 6))
    steps(other, resumed, range(3, 6))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_learning_rate():
    def rates(schedule, warmup=2, steps=6):
        return [learning_rate_at(step, 1.0, warmup, steps, schedule) for step in range(steps)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])
    assert rates("linear", warmup=0)[0] == 1
    assert rates("constant", warmup=6) == pytest.approx([i / 6 for i in range(1, 7)])
