"""What RoPE does to similarity at a distance: the margin B(m), where it fails, and the decay bound.

All functions take the frequencies themselves, so every method, partial rotary included, goes through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_rotary_dim, check_theta
from ropewalk.rope.theory.screen import MOST_PAIRS, Floats, screen, screen_error

if TYPE_CHECKING:
    import torch

SEARCH_LIMIT = 2**30
"""Tokens up to which a context bound is searched: two seconds on two cores."""
_BLOCK = 2**20
_FIRST_BLOCK = 2**12


def inv_freq_of_base(rotary_dim: int, rope_theta: float) -> Floats:
    """``θ_i = rope_theta^(-2i/rotary_dim)``, float64 ``[rotary_dim // 2]``, rad/token: unscaled RoPE without torch.

    Raises:
        RopewalkError: if an argument is out of range; the message gives its value.
    """
    check_rotary_dim(rotary_dim)
    check_theta(rope_theta)
    frequencies: Floats = float(rope_theta) ** (np.arange(0, rotary_dim, 2) / -rotary_dim)
    return frequencies


def similarity_margin(inv_freq: torch.Tensor | ArrayLike, positions: ArrayLike) -> Floats:
    """``B(m) = Σ_i cos(m·θ_i)``: how much more a query attends to a similar key than to a random one.

    Args:
        inv_freq: ``[pairs]``, rad/token.
        positions: distances ``m`` in tokens, any shape.

    Returns:
        float64, the shape of ``positions``; between ``-pairs`` and ``pairs``. Times the variance of a key's
        components it is half the expected gap between the two attention logits. Dimensions that are not rotated add
        a constant above 0, which is left out.

    Source: Men et al., arXiv:2405.14591, theorem 1.
    """
    theta = frequencies_of(inv_freq)
    m = np.asarray(positions, dtype=np.float64)
    margin = np.empty(m.size)
    flat = m.ravel()
    for at in range(0, m.size, _FIRST_BLOCK):
        part = slice(at, at + _FIRST_BLOCK)
        margin[part] = np.cos(flat[part, None] * theta).sum(1)
    return margin.reshape(m.shape)


def context_bound(inv_freq: torch.Tensor | ArrayLike, limit: int = SEARCH_LIMIT) -> int | None:
    """The largest ``L`` with ``B(m) ≥ 0`` for all whole ``0 ≤ m ≤ L``.

    The search stops at the first violation. It costs ``O(L·pairs)`` operations, as matrix products: a million
    tokens take a fraction of a second.

    Args:
        inv_freq: ``[pairs]``, rad/token.
        limit: tokens to look at.

    Returns:
        Tokens, or None where there is no violation up to ``limit``.

    Source: arXiv:2405.14591, section 4.3. For rotary_dim 128: base 10000 gives 1706, 500000 gives 18437.
    """
    first = next(_violations(frequencies_of(inv_freq), limit), None)
    return None if first is None else int(first[0]) - 1


def violations(inv_freq: torch.Tensor | ArrayLike, length: int) -> NDArray[np.int64]:
    """All distances ``0 ≤ m ≤ length`` with ``B(m) < 0``, rising.

    Source: arXiv:2405.14591, table 4, which counts them.
    """
    found = [np.empty(0, dtype=np.int64), *_violations(frequencies_of(inv_freq), length)]
    return np.concatenate(found)


def attention_upper_bound(inv_freq: torch.Tensor | ArrayLike, positions: ArrayLike) -> Floats:
    """``Σ_{n=1}^{pairs} |Σ_{l<n} e^{i·m·θ_l}|``: the long-term decay of RoPE's attention.

    Args:
        inv_freq: ``[pairs]``, rad/token.
        positions: distances ``m`` in tokens, ``[distances]``.

    Returns:
        float64 ``[distances]``; times ``max |h_{l+1} - h_l|`` of the q·k products it bounds an attention logit.

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.4.3; arXiv:2405.14591, figure 4.
    """
    theta = frequencies_of(inv_freq)
    m = np.asarray(positions, dtype=np.float64)
    bounds = [
        np.abs(np.exp(1j * m[at : at + _FIRST_BLOCK, None] * theta).cumsum(1)).sum(1)
        for at in range(0, len(m), _FIRST_BLOCK)
    ]
    return np.concatenate([np.empty(0), *bounds])


def _violations(theta: Floats, limit: int) -> Iterator[NDArray[np.int64]]:
    """Distances with a negative margin, rising, a block at a time; float32 finds them, float64 decides."""
    if limit < 0:
        raise RopewalkError(f"the length to look at must be 0 tokens or more, got {limit}")
    # B(0) is the number of pairs, never negative.
    first, size = 1, _FIRST_BLOCK
    while first <= limit:
        count = min(size, limit + 1 - first)
        near = np.flatnonzero(screen(theta[None], first, count)[0] < screen_error(len(theta))) + first
        below = near[similarity_margin(theta, near) < 0]
        if len(below):
            yield below.astype(np.int64)
        first += count
        size = min(2 * size, _BLOCK)


def frequencies_of(inv_freq: torch.Tensor | ArrayLike) -> Floats:
    """``inv_freq`` as float64 ``[pairs]``, checked."""
    # A tensor may lie on a GPU or carry a gradient; torch itself is not imported for a plain base.
    values = inv_freq.detach().cpu() if hasattr(inv_freq, "detach") else inv_freq
    theta = np.asarray(values, dtype=np.float64)
    if theta.ndim != 1 or not len(theta) or not np.isfinite(theta).all() or (theta < 0).any():
        raise RopewalkError(
            f"inv_freq must be a list of frequencies in rad/token, each 0 or more, got shape {theta.shape}"
        )
    if len(theta) > MOST_PAIRS:
        raise RopewalkError(
            f"a head may have at most {2 * MOST_PAIRS} rotated dimensions, got {2 * len(theta)}"
        )
    return theta
