"""A step played with some of its tiles and with all of them, in a process of its own."""

from unittest import mock

from ropewalk.models.compute import losses
from ropewalk.training.simulation.memory import memory_of
from ropewalk.training.simulation.recording import Recorder
from tests.dry_run.cases import played


def both(recipe, ranks, chunk):
    """What is counted of a step, with chunks of the loss of so many tokens: of some tiles, and of all."""
    found = []
    for some in (Recorder._some_tiles, lambda self, tiles: tiles):
        with (
            mock.patch.object(losses, "LOGITS_BYTES", 4 * 512 * chunk),
            mock.patch.object(Recorder, "_some_tiles", some),
        ):
            step = played(recipe, ranks)
        memory, recording = memory_of(step), step.recording
        found.append(
            {
                "events": len(recording.events),
                "operators": dict(recording.operators),
                "sent": recording.sent,
                "waits": dict(recording.waits),
                "copies": recording.copies,
                "peak": memory.peak,
                "moments": {name: held["total"] for name, held in memory.moments.items()},
            }
        )
    return found
