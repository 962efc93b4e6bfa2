"""Team: the processes of a run, and how they hold models and rows between them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ropewalk.io.progress import Reporter, Silent
from ropewalk.models.load import load_model
from ropewalk.models.losses import LossModel, OutputHead
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, World
from ropewalk.rope import RopeMethod
from ropewalk.training.recipe.recipe import Recipe

if TYPE_CHECKING:
    from ropewalk.training.preflight import Plan


@dataclass(frozen=True, eq=False)
class Team:
    """All processes of a run.

    Attributes:
        world: who this process is among them.
        mesh: how they are arranged; None where this process is alone.
    """

    world: World = field(default_factory=World)
    mesh: Mesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes files and talks."""
        return self.world.leads

    def reporter(self, reporter: Reporter | None) -> Reporter:
        """The reporter of the process that talks; the others say nothing."""
        return reporter if reporter is not None and self.leads else Silent()

    def share(self, rows: Sequence[int]) -> list[int]:
        """This process's part of one step's rows: those of its data rank."""
        if self.mesh is None:
            return list(rows)
        return list(rows[self.mesh.data_rank :: self.mesh.shape.data_degree])

    def load(
        self,
        path: str,
        recipe: Recipe,
        chosen: Plan,
        method: RopeMethod | None = None,
        context: int | None = None,
        dtype: torch.dtype | str = "auto",
        compute_dtype: torch.dtype | None = None,
    ) -> LossModel:
        """A model with its output head: whole in a process that is alone, else sharded over all.

        Args:
            path: folder or hub id.
            recipe, chosen: engine, rotary module and device.
            method, context: RoPE to run with, and the context that the config states; the checkpoint's own if None.
            dtype: of the parameters; ``auto`` is the checkpoint's own.
            compute_dtype: what shards are gathered in; ``dtype`` if None.
        """
        options: dict[str, Any] = {
            "rope": method,
            "engine": recipe.engine,
            "exact_rope": recipe.exact_rope,
            "max_position_embeddings": context,
            "trust_remote_code": recipe.trust_remote_code,
        }
        if self.mesh is None:
            model = load_model(path, dtype=dtype, device=chosen.device, **options)
            return LossModel(model, OutputHead.of(model)).eval()
        # A sharded model that went out of scope refers to itself: its shards live until the collector comes by.
        gc.collect()
        shards = chosen.dtype if isinstance(dtype, str) else dtype
        return load_sharded(
            path, self.mesh, self.world, chosen.device, dtype=shards, compute_dtype=compute_dtype, **options
        )
