"""Differences are relative and see what is no number; budgets shrink with the unit of the arithmetic."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk.attention.kept import Keeping, Kept
from ropewalk.verification.computing import (
    as_in_a_run,
    largest_difference,
    load_whole,
    packed_losses,
    rounding_budget,
    row_losses,
)


def test_a_difference_is_relative_and_sees_what_is_no_number():
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-6])}
    other = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1e-6])}
    assert largest_difference(other, one).error == pytest.approx(0.1)
    assert largest_difference(other, one).name == "a"
    assert largest_difference({**one, "b": torch.tensor([math.nan])}, one).error == math.inf
    assert largest_difference({"a": one["a"]}, one).error == math.inf
    assert largest_difference({**one, "a": torch.zeros(3)}, one).error == math.inf


def test_a_budget_shrinks_with_the_unit_of_the_arithmetic():
    wide = {"a": torch.rand(1000, dtype=torch.float64)}
    narrow = {"a": wide["a"].float()}
    own = largest_difference(narrow, wide).error
    assert rounding_budget(narrow, wide, torch.float32) == pytest.approx(4 * own + 2**-23)
    assert rounding_budget(narrow, wide, torch.float64) == pytest.approx(
        rounding_budget(narrow, wide, torch.float32) * 2**-29
    )


def test_float64_is_not_rounded_inside_the_model(case):
    model = load_whole(case, torch.float64)
    seen = []
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(lambda norm, args, output: seen.append((args[0], output, norm)))
    result = row_losses(model, case.rows[:1], packed_losses)
    for hidden, output, norm in seen:
        exact = (
            hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
        )
        assert torch.allclose(output, exact, rtol=1e-14, atol=0)
    assert not torch.equal(result.losses, result.losses.float().double())


@pytest.mark.parametrize(("least", "kept"), [(None, []), (0.0, [True, True]), (1e6, [False, False])])
def test_the_recomputation_takes_the_attention_that_the_stage_keeps(case, monkeypatch, least, kept):
    taken = []
    results = Kept.results

    def noted(self, *arguments):
        if self._recomputing:
            taken.append(self._results[0] is not None)
        return results(self, *arguments)

    monkeypatch.setattr(Kept, "results", noted)
    checkpointed = replace(
        case, gradient_checkpointing=True, keeping=None if least is None else Keeping(least)
    )
    model = as_in_a_run(load_whole(checkpointed, torch.float32), checkpointed)
    row_losses(model, case.rows[:1], packed_losses)
    assert taken == kept * (len(model.model.model.layers) // 2)
