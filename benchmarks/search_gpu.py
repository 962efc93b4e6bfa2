"""The search part of ``python -m benchmarks.gpu``: candidates a second by how many a forward pass takes.

The unit is a forward, one candidate on one document. Random weights in the shape of Llama 3.2 1B: time does not depend
on what they say. The loss of the same candidates is compared too, since a batch must not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.models.load import attach
from ropewalk.rope import Default
from ropewalk.search import Job, ModelEvaluator, goal_of, mutate

TRAINED = 4096
LENGTHS = (4096, 16384)
BATCHES = (1, 2, 4, 8)


def measure(milliseconds: Callable[[Callable[[], Any]], float], device: str = "cuda") -> list[dict[str, Any]]:
    """Forwards a second, peak memory, and the largest relative difference of a loss from that of batch 1."""
    model = random_llama(device)
    return [row for length in LENGTHS for row in forwards(model, length, milliseconds)]


def random_llama(device: str, **smaller: int) -> Any:
    """A model of about a billion parameters with the rotary module that a search exchanges."""
    shape = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        **smaller,
    }
    config = transformers.LlamaConfig(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    attach(model)
    # Only then: the stock module's frequencies would be rounded.
    return model.to(torch.bfloat16)


def forwards(
    model: Any, length: int, milliseconds: Callable[[Callable[[], Any]], float]
) -> list[dict[str, Any]]:
    """A row of figures for each batch; what does not fit says so."""
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
    layout = PackedLayout.from_lengths([length], "full", 0)
    text = Row(ids, next_token_labels(ids, layout), layout)
    config = model.config
    goal = goal_of(Default(config.head_dim, config.rope_parameters["rope_theta"]), TRAINED, max(LENGTHS))
    space, random = goal.space(), np.random.default_rng(0)
    first = goal.seeds(space)["yarn"]
    jobs = [Job(mutate(space, first, 0.3, random), 0) for _ in range(max(BATCHES))]
    found, alone = [], None
    for batch in BATCHES:
        row: dict[str, Any] = {"length": length, "batch": batch}
        found.append(row)
        evaluator = ModelEvaluator(model, goal, [text], batch=batch)
        try:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            losses = np.array([loss for _, loss in evaluator.losses(jobs)])
            ms = milliseconds(lambda evaluator=evaluator: list(evaluator.losses(jobs)))
        except (RuntimeError, ValueError) as error:
            row["refused"] = str(error).splitlines()[0]
        else:
            alone = losses if alone is None else alone
            row["forwards_per_s"] = 1000 * len(jobs) / ms
            row["worst_difference"] = float(np.abs(losses / alone - 1).max())
            if torch.cuda.is_available():
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(row, flush=True)
    return found
