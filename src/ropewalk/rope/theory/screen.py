"""B(m) of many distances and many settings at once, in float32, as one matrix product.

With ``m = M + r``, ``cos(m·θ) = cos(Mθ)·cos(rθ) - sin(Mθ)·sin(rθ)``: a table of rows ``M`` times a table of
columns ``r``. A million distances take some thousand complex exponentials a pair in place of a million cosines,
and the sum over pairs is what matrix products are fast at. Pairs that hardly turn within a row are taken
together as one cubic in ``r``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

Floats = NDArray[np.float64]

SLOW_TURN = 0.1
"""Radians from a row's middle to its end up to which a pair is slow."""
CUBIC = 4
MOST_PAIRS = 1024
"""More than any model's head has; the error bound grows with their number."""


def screen_error(pairs: int) -> float:
    """Bound on the error of a screened B(m).

    A table entry is a product of two rounded ones (3 roundings of 6e-8), a term the product of two entries; the sum
    of ``2·pairs`` terms, each at most 1, rounds by at most ``2·pairs·6e-8`` a term; the cubic of a slow pair errs by
    ``SLOW_TURN⁴/24`` = 4.2e-6.
    """
    return pairs * (5e-6 + 1.2e-7 * pairs)


def screen(theta: Floats, first: int, count: int) -> NDArray[np.float32]:
    """B(m) for ``first ≤ m < first + count`` to within :func:`screen_error`.

    Args:
        theta: float64 ``[settings, pairs]``, rad/token, 0 or more.
        first, count: tokens, whole numbers.

    Returns:
        float32 ``[settings, count]``.
    """
    # About as many rows as columns makes the tables smallest.
    width = 2 ** math.ceil(math.log2(count) / 2)
    half = width / 2
    fast = theta.max(0) * half > SLOW_TURN
    pairs = int(fast.sum())
    right = _table(-theta[:, fast], 0, 1, width, spare=CUBIC // 2)
    left = _table(theta[:, fast], first, width, -(-count // width), spare=CUBIC // 2)
    offset = (np.arange(right.shape[1]) - half) / half
    right.view(np.float32)[..., 2 * pairs :] = offset[:, None] ** np.arange(CUBIC)
    left.view(np.float32)[..., 2 * pairs :] = _cubics(theta[:, ~fast], first + half, width, left.shape[1])
    values = _product(left.view(np.float32), right[:, :width].view(np.float32))
    values = values.reshape(len(theta), -1)[:, :count]
    _check(values[0, -1], theta[0], first + count - 1)
    return values


def _product(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """``left @ right^T`` of each setting."""
    if len(left) == 1:
        # One context bound: loading torch would take ten times as long as the product.
        single: NDArray[np.float32] = np.matmul(left, right.swapaxes(1, 2))
        return single
    # Of many settings torch's product is the faster one, and works well from several threads at once.
    import torch

    with torch.autocast("cpu", enabled=False):
        product: NDArray[np.float32] = torch.bmm(torch.from_numpy(left), torch.from_numpy(right).mT).numpy()
    return product


def _check(value: np.float32, theta: Floats, m: int) -> None:
    """torch can be told to multiply float32 in bfloat16: then nothing here would hold."""
    error = abs(float(value) - float(np.cos(m * theta).sum()))
    if error > screen_error(len(theta)):
        raise RopewalkError(
            f"float32 matrix products are off by {error:.1e} here; undo torch.set_float32_matmul_precision, or set "
            "it to 'highest'"
        )


def _cubics(theta: Floats, start: float, width: int, rows: int) -> NDArray[np.float32]:
    """Coefficients of ``Σ cos((M + r)·θ)`` in ``2r/width`` about each row's middle ``M``, ``[settings, rows, 4]``."""
    middle = _table(theta, start, width, rows, spare=0).view(np.float32)
    turn = theta * width / 2
    # What cos (first row) and sin (second) of a middle add to each power: cos - turn·sin - turn²/2·cos + …
    weights = np.zeros((*theta.shape, 2, CUBIC), dtype=np.float32)
    weights[..., 0, 0], weights[..., 1, 1] = 1, -turn
    weights[..., 0, 2], weights[..., 1, 3] = -(turn**2) / 2, turn**3 / 6
    coefficients: NDArray[np.float32] = middle @ weights.reshape(len(theta), -1, CUBIC)
    return coefficients[:, :rows]


def _table(theta: Floats, start: float, step: int, size: int, spare: int) -> NDArray[np.complex64]:
    """``e^(i·(start + step·k)·θ)`` for ``k < size`` or a few more, complex64 ``[settings, size, pairs + spare]``."""
    inner = 2 ** round(math.log2(size) / 2)
    outer = -(-size // inner)
    slow = np.exp(1j * theta[:, None] * (start + step * inner * np.arange(outer))[:, None])
    fast = np.exp(1j * theta[:, None] * (step * np.arange(inner))[:, None])
    settings, pairs = theta.shape
    table = np.empty((settings, outer, inner, pairs + spare), dtype=np.complex64)
    np.multiply(
        slow.astype(np.complex64)[:, :, None], fast.astype(np.complex64)[:, None], out=table[..., :pairs]
    )
    return table.reshape(settings, outer * inner, pairs + spare)
