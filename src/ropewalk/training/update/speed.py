"""Floating-point operations per second of a training step, and their share of the GPU's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from ropewalk.attention.options import Locality
from ropewalk.attention.spans import Spans
from ropewalk.errors import RopewalkError
from ropewalk.models.attention.hooks import localities_of
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.config.read import read_config
from ropewalk.parallel import Mesh, ShardedLayouts
from ropewalk.planning.sizing.model_shape import ModelShape
from ropewalk.planning.sizing.time import gpu_named, model_flops
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.update.step import Batch


@dataclass(frozen=True)
class Speed:
    """What the operations of a step follow from.

    Attributes:
        shape: dimensions of the model; None where they are not known.
        layers: number of layers of each window or chunk.
        sharing: number of ranks that share a row.
        peak: FLOP/s of this process's GPU in dense bfloat16 products; None if it is not known.
        adapter: operations that an adapter adds to those of a token, see :func:`adapter_flops`.
    """

    shape: ModelShape | None
    layers: Counter[Locality]
    sharing: int = 1
    peak: float | None = None
    adapter: int = 0

    @classmethod
    def of_stage(cls, resolved: ResolvedRecipe, model: LossModel, mesh: Mesh | None) -> Speed:
        """Read the dimensions of a model with hooks, and look up the peak of its GPU."""
        shape, adapter = None, 0
        # What is not estimated, such as recurrent layers, leaves these keys out of the log.
        with suppress(RopewalkError):
            shape = ModelShape.from_config(read_config(resolved.model, resolved.recipe.trust_remote_code))
            adapter = 0 if resolved.adapter is None else adapter_flops(shape, model)
        gpu = gpu_named(torch.cuda.get_device_name(model.device)) if model.device.type == "cuda" else None
        return cls(
            shape,
            localities_of(model.model),
            1 if mesh is None else mesh.shape.sequence_degree,
            None if gpu is None else gpu.peak_flops,
            adapter,
        )

    def of(self, batches: Sequence[Batch], seconds: float) -> dict[str, float]:
        """Values for a line of metrics: operations per second of this rank, and their share of its peak.

        Args:
            batches: this rank's micro-batches of the step. Ranks that share a row take equal parts of it.
            seconds: duration of the step.
        """
        if self.shape is None:
            return {}
        layouts = [
            layout
            for batch in batches
            for layout in (
                batch.layouts.layouts if isinstance(batch.layouts, ShardedLayouts) else batch.layouts
            )
        ]
        pairs = sum(
            number * int(Spans.of(layout, locality).pairs_before(np.array([layout.total_length]))[0])
            for layout in layouts
            for locality, number in self.layers.items()
        )
        tokens = sum(layout.total_length for layout in layouts)
        done = sum(model_flops(self.shape, tokens, pairs)) + tokens * self.adapter
        rate = done / self.sharing / seconds
        return {"flops_per_second": rate} | ({} if self.peak is None else {"mfu": rate / self.peak})


def adapter_flops(shape: ModelShape, model: LossModel) -> int:
    """Operations a token that an adapter adds to those of training all weights; negative, because most are frozen.

    A frozen matrix takes no product for its own gradient, and each matrix of the adapter takes three products.
    If neither embeddings nor norms are trained, the first layer's inputs need no gradients, which is not counted.
    """
    head = model.head.linear.weight
    frozen = shape.layer_matrices + (0 if head.requires_grad else shape.head_parameters)
    added = sum(each.numel() for name, each in model.named_parameters() if ".lora_" in name)
    return 6 * added - 2 * frozen
