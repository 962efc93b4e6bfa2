"""RunContext: what a run has around it, as one value in place of long argument lists."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ropewalk.io.progress import Reporter, Silent
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.world import World


@dataclass(frozen=True, eq=False)
class RunContext:
    """Where and among whom a run happens; what it does is in its config, seeds included.

    Attributes:
        world: this process among all of the run.
        mesh: how the processes hold a model and rows between them; None where each holds all.
        output: folder that the run writes to; None where it writes nothing.
        reporter: where remarks and progress go.
        device: torch's name of it, or ``auto``: cuda where there is one, else cpu.
        dtype: of parameters: ``auto`` (the checkpoint's own), float32, bfloat16 or float16.
    """

    world: World = field(default_factory=World)
    mesh: Mesh | None = None
    output: Path | None = None
    reporter: Reporter = field(default_factory=Silent)
    device: str = "auto"
    dtype: str = "auto"

    @property
    def is_rank_0(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.world.is_rank_0

    @property
    def told(self) -> Reporter:
        """The reporter of the process that talks; the others say nothing."""
        return self.reporter if self.is_rank_0 else Silent()

    def on(self, mesh: Mesh | None) -> RunContext:
        """The same run with its processes arranged as a mesh."""
        return replace(self, mesh=mesh)
