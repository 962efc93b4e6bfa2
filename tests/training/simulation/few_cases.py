"""Steps of a deep model played whole and with a few of its layers, in a process of their own."""

from collections import Counter
from unittest import mock

from ropewalk.parallel.context import RunContext
from ropewalk.planning.sizing.time import H100
from ropewalk.training.simulation import rank_costs as playing
from ropewalk.training.simulation.assumed_documents import documents_of
from ropewalk.training.simulation.memory import memory_of
from ropewalk.training.simulation.rank_costs import flops_of, operators_of, play, transfers_of
from ropewalk.training.simulation.roofline import compute_seconds
from ropewalk.training.simulation.step import dry_step
from tests.dry_run.cases import played, resolved_for


def both(recipe, ranks, rank=0):
    """What a step takes: extended from a few layers, and of all layers."""
    documents = documents_of(recipe, 0, 10**9, RunContext())
    steps = []

    def noted(*arguments):
        steps.append(dry_step(*arguments))
        return steps[-1]

    with mock.patch.object(playing, "dry_step", noted):
        few = play(resolved_for(recipe, ranks), 0, documents, rank)
    step = played(recipe, ranks, rank=rank)
    memory, operators, transfers = memory_of(step), operators_of(step), transfers_of(step)
    return tuple(
        {
            "layers": max(len(each.kept) for each in steps),
            "peak": memory.peak,
            "host": memory.host,
            "moments": {name: held["total"] for name, held in memory.moments.items()},
            "operations": dict(flops_of(operators)),
            "seconds": sum(compute_seconds(operators, H100).values()),
            "moved": sum(each.bytes * number for each, number in operators.items()),
            "sent": (*transfers.shards, *transfers.ulysses, *transfers.ring, transfers.host),
            "waits": Counter(waits),
        }
        for memory, operators, transfers, waits in (
            (few.memory, few.operators, few.transfers, {(w.place, w.moment): w.number for w in few.waits}),
            (memory, operators, transfers, step.recording.waits),
        )
    )
