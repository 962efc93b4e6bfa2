"""The effect of RoPE on similarity at a distance: the margin B(m), where it becomes negative, and the decay bound.

All functions take the frequencies themselves, so they apply to every method, including partial rotation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_rotary_dim, check_theta

if TYPE_CHECKING:
    import torch


SEARCH_LIMIT = 2**30
"""Largest distance in tokens for which a context bound is searched; the search takes two seconds on two cores."""
_BLOCK = 2**20
_FIRST_BLOCK = 2**12


def inv_freq_of_base(rotary_dim: int, rope_theta: float) -> Floats:
    """``θ_i = rope_theta^(-2i/rotary_dim)``, float64 ``[rotary_dim // 2]``, rad/token: unscaled RoPE, without torch.

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
        inv_freq: ``[pairs]``, rad/token, as ``RopeMethod.frequencies().inv_freq``.
        positions: distances ``m`` in tokens, any shape.

    Returns:
        float64 in the shape of ``positions``, between ``-pairs`` and ``pairs``. Multiplied by the variance of a key's
            components, it is half the expected difference between the logits of the similar key and of the random key.
            Dimensions that are not rotated would add a positive constant, which is left out.

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
    """The largest length ``L`` with ``B(m) ≥ 0`` for all integers ``0 ≤ m ≤ L``; B is :func:`similarity_margin`.

    The search stops at the first ``m`` with ``B(m) < 0``. It takes a fraction of a second for a million tokens.

    Args:
        inv_freq: ``[pairs]``, rad/token.
        limit: largest distance to examine, in tokens.

    Returns:
        Tokens, or None if ``B(m) ≥ 0`` up to ``limit``. With unscaled RoPE and ``rotary_dim`` 128, base 10000 gives
            1706 and base 500000 gives 18437.

    Raises:
        RopewalkError: if ``inv_freq`` is not a list of finite frequencies, each 0 or more, or if ``limit`` is negative.

    Source: Men et al., arXiv:2405.14591, section 4.3.
    """
    first = next(_violations(frequencies_of(inv_freq), limit), None)
    return None if first is None else int(first[0]) - 1


def violations(inv_freq: torch.Tensor | ArrayLike, length: int) -> NDArray[np.int64]:
    """All distances ``0 ≤ m ≤ length`` with ``B(m) < 0``, in increasing order.

    Source: arXiv:2405.14591, table 4, which counts them.
    """
    found = [np.empty(0, dtype=np.int64), *_violations(frequencies_of(inv_freq), length)]
    return np.concatenate(found)


def attention_upper_bound(inv_freq: torch.Tensor | ArrayLike, positions: ArrayLike) -> Floats:
    """``Σ_{n=1}^{pairs} |Σ_{l<n} e^{i·m·θ_l}|``: the long-term decay of attention with RoPE.

    Args:
        inv_freq: ``[pairs]``, rad/token.
        positions: distances ``m`` in tokens, ``[distances]``.

    Returns:
        float64 ``[distances]``; multiplied by ``max |h_{l+1} - h_l|`` of the q·k products it bounds an attention logit.

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
    """Distances with a negative margin in increasing order, block by block; one product finds them, cosines decide."""
    if limit < 0:
        raise RopewalkError(f"the number of tokens to examine must be 0 or more, got {limit}")
    # Each pair that stands still adds 1, and each that rotates at least -1.
    if 2 * np.count_nonzero(theta) <= len(theta):
        return
    # B(0) is the number of pairs, which is never negative, so the search starts at 1.
    first, size = 1, _FIRST_BLOCK
    while first <= limit:
        count = min(size, limit + 1 - first)
        # Only distances within the screen's error of zero are computed again, cosine by cosine.
        near = np.flatnonzero(screen(theta[None], first, count)[0] < screen_error(len(theta))) + first
        below = near[similarity_margin(theta, near) < 0]
        if len(below):
            yield below.astype(np.int64)
        first += count
        size = min(2 * size, _BLOCK)


def frequencies_of(inv_freq: torch.Tensor | ArrayLike) -> Floats:
    """``inv_freq`` as float64 ``[pairs]``, validated."""
    # A tensor may be on a GPU or require a gradient; torch itself is not imported for a plain base.
    values = inv_freq.detach().cpu() if hasattr(inv_freq, "detach") else inv_freq
    theta = np.asarray(values, dtype=np.float64)
    if theta.ndim != 1 or not len(theta):
        raise RopewalkError(f"inv_freq must be a non-empty list of frequencies, got shape {theta.shape}")
    wrong = theta[~(np.isfinite(theta) & (theta >= 0))]
    if len(wrong):
        raise RopewalkError(
            f"frequencies in inv_freq must be finite numbers, 0 or more rad/token, got {wrong[0]:g}"
        )
    if len(theta) > MOST_PAIRS:
        raise RopewalkError(
            f"a head may have at most {2 * MOST_PAIRS} rotated dimensions, got {2 * len(theta)}"
        )
    return theta


Floats = NDArray[np.float64]

MOST_PAIRS = 1024
"""More pairs than any model's head has."""


def screen_error(pairs: int) -> float:
    """Bound on the error of a screened B(m), for distances up to ``SEARCH_LIMIT`` and frequencies up to 1 rad/token.

    An angle in float64 is off by up to ``2^-53`` of its ``2^30`` rad. Two angles are rounded twice each for a pair, and
    those of :func:`similarity_margin` once: 6e-7. The other roundings are a thousand times smaller.
    """
    return pairs * 1e-6


def screen(theta: Floats, first: int, count: int) -> Floats:
    """B(m) for ``first ≤ m < first + count`` to within :func:`screen_error`, as one matrix product.

    With ``m = M + r``, ``cos(m·θ) = cos(Mθ)·cos(rθ) - sin(Mθ)·sin(rθ)``: a table of rows ``M`` times a table of
    columns ``r``. A million distances take a few thousand complex exponentials for each pair instead of a million
    cosines, and matrix products are fast at the sum over pairs.

    Args:
        theta: float64 ``[settings, pairs]``, rad/token, 0 or more.
        first, count: integers, in tokens.

    Returns:
        float64 ``[settings, count]``.
    """
    # The tables are smallest if there are about as many rows as columns.
    width = 2 ** math.ceil(math.log2(count) / 2)
    left = _table(theta, first, width, -(-count // width)).view(np.float64)
    right = _table(-theta, 0, 1, width).view(np.float64)
    if len(theta) == 1:
        # For a single context bound, loading torch would take ten times as long as the product.
        values: Floats = left[0] @ right[0].T
    else:
        try:
            import torch
        except ModuleNotFoundError:
            values = left @ right.transpose(0, 2, 1)
        else:
            # torch's product of many settings is faster, and it scales when called from several threads.
            values = torch.bmm(torch.from_numpy(left), torch.from_numpy(right).mT).numpy()
    return values.reshape(len(theta), -1)[:, :count]


def _table(theta: Floats, start: float, step: int, size: int) -> NDArray[np.complex128]:
    """``e^(i·(start + step·k)·θ)`` for ``k < size`` or a few more, complex128 ``[settings, size, pairs]``."""
    # Two factors of about √size exponentials each: e^(a + b) = e^a·e^b.
    inner = 2 ** round(math.log2(size) / 2)
    slow = np.exp(1j * theta[:, None] * (start + step * inner * np.arange(-(-size // inner)))[:, None])
    fast = np.exp(1j * theta[:, None] * (step * np.arange(inner))[:, None])
    table: NDArray[np.complex128] = (slow[:, :, None] * fast[:, None]).reshape(len(theta), -1, theta.shape[1])
    return table
