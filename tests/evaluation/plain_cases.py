"""A small model, text of random tokens, and their losses from plain transformers' logits."""

from typing import Any

import numpy as np
import torch

BOS, VOCABULARY = 1, 97
# Losses of about 5 nats in float32, 1e-6 each, averaged.
FLOAT32 = 1e-5


def text(*lengths: int, seed: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCABULARY, size=n).astype(np.uint16) for n in lengths]


def naive_losses(plain: Any, ids: list[int]) -> list[float]:
    """Loss of every token but the first, from an untouched model's full logits."""
    with torch.no_grad():
        log_p = torch.log_softmax(plain(input_ids=torch.tensor([ids])).logits[0].double(), dim=-1)
    return [-float(log_p[t, ids[t + 1]]) for t in range(len(ids) - 1)]
