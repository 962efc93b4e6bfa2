"""Student's t distribution, by the incomplete beta function in 40 digits."""

import math
import sys

import mpmath
import pytest
from scipy.special import stdtrit

from ropewalk.evaluation.student import student_p_value, student_quantile

FREEDOMS = [1, 1.0001, 1.5, 2, 2.7, 3, 5, 9.3, 30, 100, 1234.5, 1e6]
EPSILON = sys.float_info.epsilon


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(40):
        yield


def exact_p_value(freedom, t):
    freedom, t = mpmath.mpf(freedom), mpmath.mpf(t)
    return mpmath.betainc(freedom / 2, mpmath.mpf(0.5), 0, freedom / (freedom + t * t), regularized=True)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_p_values_are_exact_to_rounding_far_into_the_tail(freedom):
    for t in (0.0, 1e-8, 1e-3, 0.1, 0.5, 1.0, 1.96, -3.0, 10.0, 40.0, 1e3, 1e8, 1e160):
        exact = exact_p_value(freedom, t)
        if exact < sys.float_info.min:
            continue
        # One rounding of the exponent changes the result by its own size; the sum of the rule has a few more.
        allowed = EPSILON * (4 + abs(math.log(exact)))
        assert student_p_value(freedom, t) == pytest.approx(float(exact), rel=allowed, abs=0)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_quantiles_are_exact_to_rounding(freedom):
    exact = mpmath.findroot(lambda t: exact_p_value(freedom, t) - mpmath.mpf("0.05"), stdtrit(freedom, 0.975))
    # A relative error of the tail is at most as large in the quantile; four roundings each.
    assert student_quantile(freedom) == pytest.approx(float(exact), rel=8 * EPSILON, abs=0)


def test_published_quantiles():
    # Table of t, for example NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
    for freedom, quantile in ((1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (100, 1.984)):
        assert round(student_quantile(freedom), 3) == quantile


def test_a_p_value_below_the_smallest_number_is_zero():
    assert student_p_value(50.0, 1e100) == 0.0
