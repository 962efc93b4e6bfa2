"""A run as tests call it: its summary as JSON values, and what ranks run; spawned processes import it by name."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from ropewalk import training
from ropewalk.io.progress import Silent
from ropewalk.parallel import World, joined
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.file import parse_recipe


def extend(recipe, resume=False, reporter=None, world=None):
    """The summary of a run, as ``summary.json`` has it."""
    context = RunContext(world or World(), reporter=reporter or Silent())
    return training.extend(recipe, context, resume).to_json()


def extended(values, resume=False):
    """The summary of a run of the ranks."""
    with joined("cpu") as world:
        return extend(parse_recipe(yaml.safe_dump(values), "test"), resume=resume, world=world)


@contextmanager
def cut_off_after(steps: int) -> Iterator[None]:
    """A run inside is interrupted, as by Ctrl-C, when it begins the step after so many."""
    from ropewalk.training import stage

    train_step, left = stage.train_step, [steps]

    def cut_off(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return train_step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "train_step", cut_off)
        with pytest.raises(KeyboardInterrupt):
            yield


def signalled(monkeypatch, number, at_step):
    """Send this process a signal in the middle of a step."""
    from ropewalk.training import stage

    step_of, steps = stage.train_step, []

    def train_step(*arguments):
        steps.append(1)
        if len(steps) == at_step:
            signal.raise_signal(number)
        return step_of(*arguments)

    monkeypatch.setattr(stage, "train_step", train_step)
