"""Student's t distribution: the two-sided p-value, and the quantile of 95 % intervals.

With ``t = sqrt(freedom) sinh(u)``, the density of ``u`` is proportional to ``cosh(u) ** -freedom``, so both follow from
integrals of this function, without gamma functions. The double exponential rule computes them to float64 rounding.

Source: Takahasi and Mori, Double exponential formulas for numerical integration, 1974.
"""

import math

import numpy as np

_X = np.arange(-4, 4 + 1 / 32, 1 / 16)
_NODES = np.exp(_X - np.exp(-_X))
"""Abscissas from 0 to infinity for integrands that decay as ``exp(-s)`` or faster."""
_WEIGHTS = _NODES * (1 + np.exp(-_X)) / 16


def student_p_value(freedom: float, t: float) -> float:
    """Return the probability that Student's ``|T|`` exceeds ``|t|``.

    Args:
        freedom: degrees of freedom, at least 1; need not be a whole number.
        t: finite, and below 1e300.
    """
    return _tail(freedom, abs(t) / math.sqrt(freedom)) / _tail(freedom, 0.0)


def student_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's T, which is the half width of a 95 % interval in standard errors.

    Args:
        freedom: degrees of freedom, at least 1; need not be a whole number.
    """
    target = 0.05 * _tail(freedom, 0.0)
    # Newton's method on the logarithm of the tail, which is concave: after one step it falls towards the root.
    u = math.asinh(1.96 / math.sqrt(freedom))
    while True:
        tail = _tail(freedom, math.sinh(u))
        step = math.log(tail / target) * tail * math.cosh(u) ** freedom
        u += step
        # The next step would be of the order of the square of this one.
        if abs(step) < 1e-9 * u:
            return math.sqrt(freedom) * math.sinh(u)


def _tail(freedom: float, sinh: float) -> float:
    """Integral of ``cosh(u) ** -freedom`` over u from ``asinh(sinh)`` to infinity."""
    cosh = math.hypot(1.0, sinh)
    tanh = sinh / cosh
    # In this unit the integrand decays as the nodes want it.
    unit = 1 / max(math.sqrt(freedom), freedom * tanh)
    beyond = unit * _NODES
    # log(cosh(u + beyond) / cosh(u)), without cancellation.
    growth = np.log1p(2 * np.sinh(beyond / 2) ** 2 + tanh * np.sinh(beyond))
    log_cosh = math.log1p(sinh * sinh) / 2 if sinh < 1 else math.log(cosh)
    return math.exp(-freedom * log_cosh) * unit * float(_WEIGHTS @ np.exp(-freedom * growth))
