"""The optimizer against torch's own AdamW, its float32 masters, and the learning rate."""

import copy

import pytest
import torch
import transformers
from pydantic import ValidationError

from ropewalk.training.recipe.recipe import Optimizer, Stage
from ropewalk.training.recipe.stage import AS_A_FILE
from ropewalk.training.update.optimizer import MasterAdamW, learning_rate_at

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


def rates(schedule, warmup=2, steps=6, peak=1.0, **more):
    stage = Stage(context=8, learning_rate=peak, warmup_steps=warmup, steps=steps, schedule=schedule, **more)
    return [learning_rate_at(step, stage) for step in range(steps)]


def test_learning_rate():
    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2])
    assert rates("linear", warmup=0)[0] == 1
    assert rates("constant", warmup=6) == pytest.approx([i / 6 for i in range(1, 7)])
    assert rates("linear", min_learning_rate=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])
    assert rates("warmup-stable-decay", decay_steps=2) == [0.5, 1, 1, 1, 1, 0.5]
    assert rates("warmup-stable-decay", decay_steps=4, min_learning_rate=0.5)[2:] == [1, 0.875, 0.75, 0.625]


def of_transformers(make, steps, **more):
    """Rates of transformers' schedule, whose warm-up begins at 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    schedule = make(optimizer, num_training_steps=steps, **more)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("least", [0.0, 3e-5, 3e-4])
@pytest.mark.parametrize("warmup", [0, 7])
def test_decays_are_those_of_transformers(warmup, least):
    common = {"num_warmup_steps": warmup}
    wsd = of_transformers(
        transformers.get_wsd_schedule,
        50,
        num_decay_steps=11,
        decay_type="linear",
        min_lr_ratio=least / 3e-4,
        **common,
    )
    ours = rates("warmup-stable-decay", warmup, 50, 3e-4, decay_steps=11, min_learning_rate=least)
    assert ours[warmup:] == pytest.approx(wsd[warmup:])
    cosine = of_transformers(
        transformers.get_cosine_with_min_lr_schedule_with_warmup, 50, min_lr=least, **common
    )
    assert rates("cosine", warmup, 50, 3e-4, min_learning_rate=least)[warmup:] == pytest.approx(
        cosine[warmup:]
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_learning_rate": 1e-6}, "no effect on the schedule constant"),
        ({"min_learning_rate": 1.0, "schedule": "linear"}, "more than learning_rate 2e-05"),
        ({"min_learning_rate": -1.0, "schedule": "linear"}, "greater than or equal to 0"),
        ({"decay_steps": 3}, "no effect on the schedule constant"),
        ({"schedule": "warmup-stable-decay"}, "needs decay_steps of 1 or more"),
        ({"schedule": "warmup-stable-decay", "decay_steps": 6, "warmup_steps": 5}, "are more than steps 10"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        Stage(context=8, steps=10, **values)


def test_a_recipe_without_the_later_keys_is_written_as_before():
    assert (
        not {"min_learning_rate", "decay_steps"}
        & Stage(context=8, steps=10).model_dump(context=AS_A_FILE).keys()
    )
    stage = Stage(context=8, steps=10, schedule="warmup-stable-decay", decay_steps=2, min_learning_rate=1e-6)
    assert Stage.model_validate(stage.model_dump()) == stage


def moved(betas, steps, seed=0):
    """An optimizer after some steps with random gradients, its one matrix, and the gradients."""
    torch.manual_seed(seed)
    matrix = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float32))
    optimizer = MasterAdamW([("w", matrix)], Optimizer(beta1=betas[0], beta2=betas[1], weight_decay=0.0))
    gradients = [torch.randn(3, 4) for _ in range(steps)]
    for gradient in gradients:
        matrix.grad = gradient.clone()
        optimizer.step(1e-2)
    return optimizer, matrix, gradients


def carried(before, betas, rewarm):
    """An optimizer with other decay rates that has taken over the moments of one before it."""
    matrix = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = MasterAdamW([("w", matrix)], Optimizer(beta1=betas[0], beta2=betas[1], weight_decay=0.0))
    optimizer.load_state({name: tensor.clone() for name, tensor in before.state().items()})
    optimizer.carry_moments(before.betas, rewarm)
    return optimizer, matrix


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("rewarm", [False, True])
def test_carried_moments_are_the_same_averages_without_their_bias(betas, rewarm):
    before, _, gradients = moved((0.9, 0.95), 7)
    optimizer, matrix = carried(before, betas, rewarm)
    count = 1 if rewarm else 7
    following = torch.randn(3, 4, dtype=torch.float64)
    matrix.grad = following.float()
    optimizer.step(1.0)
    # The averages of the gradients so far, from their definition in float64.
    roots = []
    for power, was, now in zip((1, 2), before.betas, betas, strict=True):
        weights = torch.tensor([(1 - was) * was ** (6 - at) for at in range(7)], dtype=torch.float64)
        average = sum(
            w * g.double() ** power for w, g in zip(weights / weights.sum(), gradients, strict=True)
        )
        moment = now * average * (1 - now**count) + (1 - now) * following**power
        roots.append(moment / (1 - now ** (count + 1)))
    expected = -roots[0] / (roots[1].sqrt() + 1e-8)
    torch.testing.assert_close(matrix.detach().double(), expected, rtol=2e-5, atol=2e-6)
    assert optimizer.state()["step.w"] == count + 1


def test_moments_with_the_same_decay_rates_stay_as_they_are_to_the_last_bit():
    before, _, _ = moved((0.9, 0.95), 3)
    optimizer, _ = carried(before, (0.9, 0.95), False)
    for name, tensor in before.state().items():
        assert torch.equal(optimizer.state()[name], tensor)


def test_moments_without_a_step_stay_zero():
    before, _, _ = moved((0.9, 0.95), 0)
    optimizer, _ = carried(before, (0.8, 0.99), True)
    assert all(not tensor.any() for tensor in optimizer.state().values())


def stepped(model, optimizer, steps=4, passes=2):
    """Norms of the gradients of some steps of several micro-batches each."""
    norms = []
    for step in range(steps):
        for each in range(passes):
            gradients(model, passes * step + each)
            optimizer.collect_gradients()
        norms.append(optimizer.clip())
        optimizer.step(1e-2)
        optimizer.zero_grad()
    return norms


def fused(optimizer):
    """The same optimizer with the kernel that runs on the CPU under ``offload``."""
    for group in optimizer.adamw.param_groups:
        group["fused"] = True
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_takes_the_same_steps_to_the_bit(dtype):
    here, away = network(dtype), network(dtype)
    both = [
        fused(MasterAdamW(here.named_parameters(), SETTINGS)),
        MasterAdamW(away.named_parameters(), SETTINGS, offload=True),
    ]
    norms = [stepped(model, optimizer) for model, optimizer in zip((here, away), both, strict=True)]
    assert all(map(torch.equal, *norms))
    for a, b in zip(here.parameters(), away.parameters(), strict=True):
        assert torch.equal(a, b)
    assert both[0].state().keys() == both[1].state().keys()
    assert all(torch.equal(value, both[1].state()[name]) for name, value in both[0].state().items())


def test_the_fused_kernel_differs_from_torchs_loop_by_rounding():
    loop, one_pass = network(), network()
    stepped(loop, MasterAdamW(loop.named_parameters(), SETTINGS))
    stepped(one_pass, MasterAdamW(one_pass.named_parameters(), SETTINGS, offload=True))
    for a, b in zip(loop.parameters(), one_pass.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_gradient_leaves_before_the_next_layer_makes_its_own():
    model, there = network(), []
    optimizer = MasterAdamW(model.named_parameters(), SETTINGS, offload=True)
    for parameter in model.parameters():
        # After the optimizer's own hook.
        parameter.register_post_accumulate_grad_hook(
            lambda _: there.append([name for name, p in model.named_parameters() if p.grad is not None])
        )
    gradients(model, 0)
    assert there == [[]] * 4
    assert all(master.grad is not None for master in optimizer.masters.values())
    assert not any(
        master is p for master, p in zip(optimizer.masters.values(), model.parameters(), strict=True)
    )


def test_narrow_gradients_of_micro_batches_add_up_in_float32_on_the_host_too():
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", weight)], SETTINGS, offload=True)
    for value in [256.0] + [1.0] * 100:
        (weight * value).sum().backward()
        optimizer.collect_gradients()
    assert optimizer.masters["w"].grad.flatten().tolist() == [356.0] * 4


@pytest.mark.parametrize("offloads", [(False, True), (True, False)])
def test_state_is_the_same_with_and_without_offload(offloads):
    """A run may switch between steps: what one saves, the other goes on with."""
    model = network(torch.bfloat16)
    first = fused(MasterAdamW(model.named_parameters(), SETTINGS, offload=offloads[0]))
    stepped(model, first)
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    weights = {name: each.clone() for name, each in first.weights(model.state_dict()).items()}
    other = network(torch.bfloat16)
    second = fused(MasterAdamW(other.named_parameters(), SETTINGS, weights, offload=offloads[1]))
    second.load_state(state)
    stepped(model, first, steps=2)
    stepped(other, second, steps=2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
