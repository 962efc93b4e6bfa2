"""What the loops of all benchmarks share: how they report progress, and the mode the model is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Progress = Callable[[int, int], None]
"""Called with the rows or samples that are done, and with how many there are."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients while the context is open; then the mode that was."""
    training = model.training
    model.eval()
    try:
        # Not inference_mode: index plans that attention keeps would be unfit for a later backward pass.
        with torch.no_grad():
            yield
    finally:
        model.train(training)
