"""Floating-point operations per second of a training step, and their share of the GPU's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ropewalk.attention.options import Locality
from ropewalk.attention.spans import Spans
from ropewalk.models.attention.hooks import localities_by_layer
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.compute.products import layer_products
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import Mesh, ShardedLayouts
from ropewalk.planning.sizing.recurrent import RecurrentShape, recurrent_shapes
from ropewalk.planning.sizing.time import gpu_named
from ropewalk.training.update.step import Batch


@dataclass(frozen=True)
class Speed:
    """What the operations of a step follow from: multiply-adds of the model's forward, and the GPU.

    Attributes:
        products: of a token, with weights; None where they are not known.
        pairs: of a pair of a query and a key, summed over the layers of each window or chunk.
        recurrent: the mixers of the recurrent layers.
        sharing: number of ranks that share a row.
        peak: FLOP/s of this process's GPU in dense bfloat16 products; None if it is not known.
        adapter: operations that an adapter adds to those of a token, see :func:`adapter_flops`.
    """

    products: int | None
    pairs: Mapping[Locality, int] = field(default_factory=dict)
    recurrent: Sequence[RecurrentShape] = ()
    sharing: int = 1
    peak: float | None = None
    adapter: int = 0

    @classmethod
    def of_stage(cls, model: LossModel, mesh: Mesh | None) -> Speed:
        """Read a model with hooks, and look up the peak of its GPU."""
        config = ModelConfig.of(model.model.config)
        in_layers, head = layer_products(model.model), model.head.linear
        gpu = gpu_named(torch.cuda.get_device_name(model.device)) if model.device.type == "cuda" else None
        # What indexers compute, and that they have no backward, is not counted.
        in_layers = None if config.indexed_layers else in_layers
        return cls(
            None if in_layers is None else in_layers + head.in_features * head.out_features,
            products_of_pairs(config, localities_by_layer(model.model)),
            recurrent_shapes(model.model, config),
            1 if mesh is None else mesh.shape.sequence_degree,
            None if gpu is None else gpu.peak_flops,
            adapter_flops(in_layers or 0, model),
        )

    def of(self, batches: Sequence[Batch], seconds: float) -> dict[str, float]:
        """Values for a line of metrics: operations per second of this rank, and their share of its peak.

        What a backward computes again, and what passing states between ranks adds, is not counted.

        Args:
            batches: this rank's micro-batches of the step. Ranks that share a row take equal parts of it.
            seconds: duration of the step.
        """
        if self.products is None:
            return {}
        layouts = [
            layout
            for batch in batches
            for layout in (
                batch.layouts.layouts if isinstance(batch.layouts, ShardedLayouts) else batch.layouts
            )
        ]
        of_pairs = sum(
            number * int(Spans.of(layout, locality).pairs_before(np.array([layout.total_length]))[0])
            for layout in layouts
            for locality, number in self.pairs.items()
        )
        tokens = sum(layout.total_length for layout in layouts)
        recurrent = sum(each.flops(tokens) for each in self.recurrent)
        # Two operations of each multiply-add, and a backward of twice the forward.
        done = 3 * (2 * (tokens * self.products + of_pairs) + recurrent) + tokens * self.adapter
        rate = done / self.sharing / seconds
        return {"flops_per_second": rate} | ({} if self.peak is None else {"mfu": rate / self.peak})


def products_of_pairs(config: ModelConfig, localities: Sequence[Locality]) -> Counter[Locality]:
    """Multiply-adds of a pair of a query and a key, summed over the layers of each window or chunk: score and value.

    Args:
        config: the model's config.
        localities: window or chunk of each layer.
    """
    found: Counter[Locality] = Counter()
    for layer, locality, number in zip(config.layers, localities, config.heads_of_layers, strict=True):
        if layer.attends:
            found[locality] += number * (layer.key_dim + layer.value_dim)
    return found


def adapter_flops(products: int, model: LossModel) -> int:
    """Operations a token that an adapter adds to those of training all weights; negative, because most are frozen.

    A frozen matrix takes no product for its own gradient, and each matrix of the adapter takes three products.
    If neither embeddings nor norms are trained, the first layer's inputs need no gradients, which is not counted.

    Args:
        products: multiply-adds of a token in the layers, without the adapter's.
        model: the model with its adapter.
    """
    added = sum(each.numel() for name, each in model.named_parameters() if ".lora_" in name)
    if not added:
        return 0
    head = model.head.linear
    frozen = products + (0 if head.weight.requires_grad else head.in_features * head.out_features)
    return 6 * added - 2 * frozen
