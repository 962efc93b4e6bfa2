"""Runs whose engine is measured on a CPU, by a clock that each engine turns; spawned processes import it by name."""

from contextlib import contextmanager

import pytest

from ropewalk.attention import measuring
from ropewalk.attention.measuring import Candidate
from ropewalk.parallel import joined
from ropewalk.training import stage, stage_engine
from tests.training.resume_cases import recipe_of
from tests.training.run_cases import extend


@contextmanager
def measured_by(seconds):
    """Within this block ``auto`` measures on a CPU too; gives the engines that were measured, in their order."""
    now, order = [0.0], []

    def measure(candidates, layers, layouts, tokens, attention, dtype, device):
        def turned(q, k, v, engine, options):
            now[0] += seconds[engine]
            return attention(q, k, v, engine, options)

        order.extend(each.engine for each in candidates)
        return measuring.measure(
            candidates, layers, layouts, tokens, turned, dtype, device, clock=lambda: now[0]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "measures_engine", lambda *_: True)
        patch.setattr(stage_engine, "measure", measure)
        patch.setattr(stage_engine, "candidates_for", lambda *_: [Candidate(each) for each in seconds])
        yield order


def measured_on_ranks(values, seconds):
    """Engines that each rank's training used; ``seconds`` gives the times on each rank."""
    with joined("cpu") as world, measured_by(seconds[world.rank]), engines_used() as used:
        extend(recipe_of(values), world=world)
        return used


@contextmanager
def engines_used():
    """The engine of each stage that is loaded for training within the block."""
    used, load = [], stage.load_for_run

    def recorded(*arguments, **more):
        used.append(more["engine"])
        return load(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "load_for_run", recorded)
        yield used
