"""The margin by its definition, in float64 and without a trick: what the theory is held against."""

from __future__ import annotations

import numpy as np


def inv_freq(rotary_dim: int, base: float) -> np.ndarray:
    return base ** (-2 * np.arange(rotary_dim // 2) / rotary_dim)


def margins(theta: np.ndarray, length: int, start: int = 0) -> np.ndarray:
    """B(m) for start <= m <= length, a few thousand distances at a time."""
    parts = [
        np.cos(np.outer(np.arange(at, min(at + 4096, length + 1)), theta)).sum(1)
        for at in range(start, length + 1, 4096)
    ]
    return np.concatenate(parts)


def reaches(base: float, rotary_dim: int, length: int) -> bool:
    theta = inv_freq(rotary_dim, base)
    # One negative margin decides, and most bases have it early.
    return all((margins(theta, min(at + 511, length), at) >= 0).all() for at in range(0, length + 1, 512))
