"""RunContext: processes, output folder, reporter and device of a run, in one value instead of many arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ropewalk.io.progress import Reporter, Silent
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.world import World


@dataclass(frozen=True, eq=False)
class RunContext:
    """Where a job runs and which folder it writes to. The job's settings say what it does, and contain its seeds.

    Attributes:
        world: rank of this process and number of processes; by default one process.
        mesh: how the model and rows are sharded over the processes; None if each process holds everything.
        output: folder that the job writes to; None if it writes nothing.
        reporter: receiver of notes and progress; by default they are dropped.
        device: torch device name, or ``auto``, which is cuda if available and cpu otherwise.
        dtype: dtype of the parameters: ``auto`` (the checkpoint's own), float32, bfloat16 or float16.
    """

    world: World = field(default_factory=World)
    mesh: Mesh | None = None
    output: Path | None = None
    reporter: Reporter = field(default_factory=Silent)
    device: str = "auto"
    dtype: str = "auto"

    @property
    def is_rank_0(self) -> bool:
        """Whether this process writes files and prints messages."""
        return self.world.is_rank_0

    @property
    def rank_0_reporter(self) -> Reporter:
        """The reporter on rank 0, and a silent one on other ranks, so each message appears once."""
        return self.reporter if self.is_rank_0 else Silent()

    def on(self, mesh: Mesh | None) -> RunContext:
        """The same context with its processes arranged as a mesh."""
        return replace(self, mesh=mesh)
