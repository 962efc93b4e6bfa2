"""The search part of ``python -m benchmarks.gpu``: candidates a second by how many a forward pass takes.

The unit is a forward, one candidate on one document. Random weights in the shape of Llama 3.2 1B: time does not depend
on what they say. The loss of the same candidates is compared too, since a batch must not change it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.gpu_sizes import Case, Sizes, allocated_gib, milliseconds, peak_gib
from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.models.load import attach
from ropewalk.rope import Default
from ropewalk.search import Job, ModelEvaluator, goal_of, mutate
from ropewalk.search.objective import Forwards


def cases(sizes: Sizes, device: str) -> list[Case]:
    """Forwards a second, peak memory, and the largest relative difference of a loss from that of batch 1."""

    def batches(length: int) -> dict[str, Any]:
        return {"batches": forwards(random_llama(sizes, device), length, sizes, device)}

    return [Case({"length": length}, partial(batches, length)) for length in sizes.search]


def random_llama(sizes: Sizes, device: str) -> Any:
    """A model with the rotary module that a search exchanges."""
    config = transformers.LlamaConfig(
        **sizes.search_model,
        max_position_embeddings=sizes.search_trained,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    attach(model)
    # Only then: the stock module's frequencies would be rounded.
    return model.to(torch.bfloat16)


def forwards(model: Any, length: int, sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """A row of figures for each batch; what does not fit says so."""
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    layout = PackedLayout.from_lengths([length], "full", 0)
    text = Row(ids, next_token_labels(ids, layout), layout)
    config = model.config
    current = Default(config.head_dim, config.rope_parameters["rope_theta"])
    goal = goal_of(current, sizes.search_trained, max(sizes.search))
    space, random = goal.space(), np.random.default_rng(0)
    first = goal.seeds(space)["yarn"]
    jobs = [Job(mutate(space, first, 0.3, random), 0) for _ in range(max(sizes.search_batches))]
    found, alone = [], None
    for batch in sizes.search_batches:
        row: dict[str, Any] = {"length": length, "batch": batch}
        found.append(row)
        evaluator = ModelEvaluator(model, goal, [text], forwards=Forwards(batch))

        def losses(evaluator: ModelEvaluator = evaluator) -> list[float]:
            return [loss for _, loss in evaluator.losses(jobs)]

        try:
            allocated_gib(device)
            here = np.array(losses())
            ms = milliseconds(losses, device, sizes.repeats)
        except torch.OutOfMemoryError as error:
            row["refused"] = str(error).splitlines()[0]
        else:
            alone = here if alone is None else alone
            row["forwards_per_s"] = 1000 * len(jobs) / ms
            row["worst_difference"] = float(np.abs(here / alone - 1).max())
            row |= peak_gib(device)
    return found
