"""Which function a dry run plays in place of which."""

import inspect

import pytest

from ropewalk.models.attention.kernels import FUNCTIONS, PACKAGES, kernel_parameters
from ropewalk.models.config.layers import LIGHTNING
from ropewalk.training.simulation.recurrent.stand_ins import KERNELS, LOOPS, stand_in
from tests.models.attention import standin_kernels
from tests.training.simulation.recurrent.kernel_cases import CALLS


class Machine:
    """A device with the kernels of some packages."""

    def __init__(self, *packages):
        self.packages = packages

    def has_kernels(self, package):
        return package in self.packages


def own(*args):
    return args


@pytest.mark.parametrize("name", PACKAGES)
def test_a_device_runs_the_kernels_of_the_packages_that_it_has(name):
    assert stand_in(Machine(PACKAGES[name]), name, own, 0, None) is KERNELS[name]
    without = stand_in(Machine(*{*PACKAGES.values()} - {PACKAGES[name]}), name, own, 0, None)
    assert (without is own) == (name not in LOOPS)
    assert without is not KERNELS[name]


def test_a_function_without_a_kernel_is_played_for_a_few_chunks_if_it_loops():
    everything = Machine(*PACKAGES.values())
    assert stand_in(everything, LIGHTNING, own, 256, None) is not own
    assert stand_in(everything, LIGHTNING, own, 0, None) is own


def test_each_function_that_takes_boundaries_has_a_kernel_that_takes_them():
    forms = {name: form for functions in FUNCTIONS.values() for name, form in functions.items()}
    assert KERNELS.keys() == PACKAGES.keys() == forms.keys() == standin_kernels.PACKAGES.keys()
    for name, form in forms.items():
        assert form in kernel_parameters(KERNELS[name])


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_parameters_of_the_package(name):
    """In its order, as transformers passes some by position."""
    call = next(each for each in CALLS.values() if each.function == name)
    whole, taken = inspect.signature(call.in_torch()).parameters, KERNELS[name].parameters
    assert [each for each in whole if each in taken] == list(taken)
