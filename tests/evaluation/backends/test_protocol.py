"""Evaluation mode is a model's only while something is measured, whatever becomes of it."""

import pytest
import torch

from ropewalk.evaluation.backends.protocol import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_that_was_comes_back_also_after_an_error(training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train(training)

    def measured() -> None:
        with evaluating(model):
            assert not model.training
            assert not model[0].training
            raise ArithmeticError

    with evaluating(model):
        assert not model.training
    assert model.training is training
    with pytest.raises(ArithmeticError):
        measured()
    assert model.training is model[0].training is training
    assert torch.is_grad_enabled()


def test_nothing_has_a_gradient_and_what_is_made_is_fit_for_a_later_backward() -> None:
    weight = torch.ones(2, requires_grad=True)
    with evaluating(torch.nn.Identity()):
        made = 2 * weight
    assert not made.requires_grad
    # A tensor of inference mode may not be saved for a backward.
    (weight * made).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]
