"""What a run has around it."""

from ropewalk.io.progress import Silent
from ropewalk.parallel import World
from ropewalk.parallel.context import RunContext


class Recorder(Silent):
    pass


def test_only_the_process_that_leads_reports():
    recorder = Recorder()
    assert RunContext(reporter=recorder).rank_0_reporter is recorder
    assert type(RunContext(world=World(rank=1, size=2), reporter=recorder).rank_0_reporter) is Silent


def test_a_mesh_changes_nothing_else():
    context = RunContext(world=World(rank=1, size=2), device="cpu", dtype="float32")
    mesh = object()
    meshed = context.on(mesh)
    assert (meshed.mesh, context.mesh) == (mesh, None)
    assert (meshed.world, meshed.device, meshed.dtype) == (context.world, "cpu", "float32")
