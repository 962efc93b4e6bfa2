"""Roundings, split products and arithmetics, against their definitions on bits and in float64."""

import struct
from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.audit.arithmetic import (
    DTYPES,
    EXACT,
    PRODUCTS,
    STEPS,
    Arithmetic,
    rounded,
    split_bfloat16,
    stock_arithmetic,
    tf32,
)
from tests.audit.audit_cases import inner_products

LARGEST = float(np.finfo(np.float32).max)
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

ANY_FLOAT32 = st.integers(0, 2**32 - 1)
"""Every bit pattern: subnormals, infinities and NaN among them."""


def from_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def to_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def as_tensor(bits) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def bits_of(x: torch.Tensor) -> list[int]:
    return x.numpy().view(np.uint32).tolist()


def nearest_tf32(x: float) -> float:
    """By the definition: the nearest of the two neighbours with 13 zero bits, of two equally near ones the even."""
    if np.isnan(x) or np.isinf(x):
        return x
    below = to_bits(abs(x)) & ~0x1FFF
    above = below + 0x2000
    # The neighbour of the largest number stands for infinity at the place where it would be.
    value = {b: Fraction(from_bits(b)) if b < 0x7F800000 else Fraction(2) ** 128 for b in (below, above)}
    exact = Fraction(abs(x))
    down, up = exact - value[below], value[above] - exact
    even = below if (below >> 13) % 2 == 0 else above
    chosen = even if down == up else below if down < up else above
    return float(np.copysign(from_bits(chosen), x))


@given(st.lists(ANY_FLOAT32, min_size=1, max_size=40))
def test_tf32_is_the_nearest_number_with_ten_mantissa_bits(bits):
    x = as_tensor(bits)
    expected = np.array([nearest_tf32(float(value)) for value in x], dtype=np.float32)
    found = tf32(x).numpy()
    np.testing.assert_array_equal(found, expected)
    finite = np.isfinite(expected)
    assert (np.signbit(found) == np.signbit(expected))[finite].all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-11, 1.0),  # A tie: to the even neighbour below.
        (1 + 3 * 2**-11, 1 + 2**-9),  # A tie: to the even neighbour above.
        (1 + 2**-11 + 2**-23, 1 + 2**-10),
        (1 + 2**-11 - 2**-23, 1.0),
        (2 - 2**-11, 2.0),  # A carry into the exponent.
        (0.0, 0.0),
        (2.0**-149, 0.0),
        (2.0**-137, 0.0),  # A tie of subnormals.
        (3 * 2.0**-137, 2.0**-135),
        (2.0**-136, 2.0**-136),
        (SMALLEST_NORMAL, SMALLEST_NORMAL),
        (LARGEST, float("inf")),
        ((2 - 2**-10) * 2.0**127, (2 - 2**-10) * 2.0**127),
        ((2 - 2**-10 + 2**-12) * 2.0**127, (2 - 2**-10) * 2.0**127),
        (float("inf"), float("inf")),
    ],
)
def test_tf32_at_the_edges(sign, x, expected):
    found = tf32(torch.tensor([sign * x]))
    assert bits_of(found) == [to_bits(sign * expected)]


def test_tf32_keeps_nan_and_leaves_its_argument_alone():
    x = torch.tensor([float("nan"), 1 + 2**-11])
    before = x.clone()
    assert tf32(x)[0].isnan()
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@given(st.lists(ANY_FLOAT32, min_size=1, max_size=40))
def test_tf32_of_tf32_changes_nothing(bits):
    once = tf32(as_tensor(bits))
    assert torch.equal(tf32(once).nan_to_num(7.0), once.nan_to_num(7.0))


def test_tf32_reads_strided_and_wider_tensors():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(tf32(x.T), tf32(x).T)
    assert torch.equal(tf32(x.double()), tf32(x))


# bfloat16 has 8 significant bits: rounding errs by 2^-8 of a number at most, and the rest's rounding by 2^-16.
SPLITTABLE = st.floats(2.0**-100, 2.0**100, width=32) | st.floats(-(2.0**100), -(2.0**-100), width=32)


@given(st.lists(SPLITTABLE, min_size=1, max_size=40))
def test_a_split_number_is_off_by_at_most_two_to_the_minus_sixteen(values):
    x = torch.tensor(values, dtype=torch.float32)
    high, low = split_bfloat16(x)
    for part in (high, low):
        assert torch.equal(part.to(torch.bfloat16).float(), part)
    error = (high.double() + low.double() - x.double()).abs()
    assert (error <= 2**-16 * x.double().abs()).all()
    assert (low.double().abs() <= 2**-8 * x.double().abs()).all()


@given(st.integers(-(2**15), 2**15), st.integers(-60, 60), st.booleans())
def test_a_number_of_sixteen_bits_splits_exactly(mantissa, exponent, negative):
    x = torch.tensor([mantissa * 2.0**exponent * (-1 if negative else 1)], dtype=torch.float32)
    high, low = split_bfloat16(x)
    assert high.double() + low.double() == x.double()


def test_splitting_needs_both_halves():
    x = torch.tensor([1 + 2**-10])
    high, low = split_bfloat16(x)
    assert (high.item(), low.item()) == (1.0, 2**-10)


# How far an operand's rounding moves it, relative to itself; a product has two of them.
UNIT = {
    "float64": 2**-53,
    "float32": 2**-24,
    "split": 2**-16,
    "tf32": 2**-11,
    "float16": 2**-11,
    "bfloat16": 2**-8,
}


def drawn(seed, queries=5, keys=7, head_dim=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, queries, head_dim), (1, keys, head_dim)
    return [torch.randn(*one, generator=generator, dtype=torch.float64).to(dtype) for one in shape]


def worst_relative(query, key, product):
    """Largest error over the sum of absolute products, which is what roundings are relative to."""
    exact = query.double() @ key.double().transpose(-2, -1)
    size = query.double().abs() @ key.double().abs().transpose(-2, -1)
    return float(((inner_products(query, key, product).double() - exact).abs() / size).max())


@pytest.mark.parametrize("product", PRODUCTS)
@given(seed=st.integers(0, 10**6), head_dim=st.integers(1, 64))
def test_inner_products_err_by_their_operands_roundings(product, seed, head_dim):
    query, key = drawn(seed, head_dim=head_dim)
    unit = UNIT[product]
    # Two roundings, and for the split one its fourth product, 2^-8 squared, that is left out.
    rounding = 2 * unit + unit**2 + (2**-16 if product == "split" else 0)
    # Wider operands reach float32 first; sums of head_dim products run in float32, or in float64.
    wide = 2**-53 if product == "float64" else 2**-24
    summing = (3 * head_dim + 4) * wide
    assert worst_relative(query, key, product) <= (rounding + summing) * (1 + 2**-7)


def test_each_cruder_product_is_cruder():
    errors = {}
    for product in PRODUCTS:
        errors[product] = np.median([worst_relative(*drawn(seed), product) for seed in range(40)])
    order = ("float64", "float32", "split", "tf32", "bfloat16")
    for finer, cruder in pairwise(order):
        # Two thirds of the bits between them at the least.
        assert errors[cruder] > (UNIT[cruder] / UNIT[finer]) ** (2 / 3) * errors[finer], (finer, cruder)
    # As many mantissa bits, but a smaller range.
    assert errors["tf32"] / 2 < errors["float16"] < 2 * errors["tf32"]
    huge = torch.full((1, 1), 1e5)
    assert inner_products(huge, huge, "tf32").isfinite().all()
    assert inner_products(huge, huge, "float16").isinf().all()


@pytest.mark.parametrize("product", PRODUCTS)
def test_operands_that_need_no_rounding_give_exact_products(product):
    """Small whole numbers are exact in every dtype, and so are their sums."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randint(-9, 10, (2, 4, 16), generator=generator).double()
    key = torch.randint(-9, 10, (1, 6, 16), generator=generator).double()
    found = inner_products(query, key, product)
    assert torch.equal(found.double(), query @ key.transpose(-2, -1))
    assert found.dtype == (torch.float64 if product == "float64" else torch.float32)


@pytest.mark.parametrize(
    ("product", "x", "kept"),
    [
        ("split", 1 + 2**-9 + 2**-18, 1 + 2**-9),
        ("tf32", 1 + 2**-12, 1.0),
        ("bfloat16", 1 + 2**-9, 1.0),
        ("float16", 1 + 2**-12, 1.0),
    ],
)
def test_what_a_product_cannot_hold_is_lost(product, x, kept):
    for query, key in ((x, 1.0), (1.0, x)):
        parts = torch.tensor([[query]]), torch.tensor([[key]])
        assert float(inner_products(*parts, product)) == kept
        assert float(inner_products(*parts, "float32")) == x


def test_the_split_product_leaves_its_smallest_part_out():
    x = torch.tensor([[1 + 2**-9]])
    # Exactly 1 + 2^-8 + 2^-18; the last is the product of both low parts.
    assert float(inner_products(x, x, "split")) == 1 + 2**-8


def different(base: Arithmetic) -> Arithmetic:
    """An arithmetic that differs from another in every field."""
    one = stock_arithmetic(torch.bfloat16)
    two = Arithmetic(
        "exact",
        torch.float16,
        torch.float16,
        "tf32",
        torch.float16,
        torch.float16,
        torch.float16,
        torch.float16,
    )
    assert all(getattr(one, f.name) != getattr(two, f.name) for f in fields(Arithmetic))
    return two if base == one else one


FIELDS = {
    "angles": {"angles"},
    "cos_sin": {"cos_sin"},
    "rotation": {"rotation"},
    "product": {"product", "scores"},
    "softmax": {"softmax", "weights"},
    "rest": {"rest"},
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_brings_its_own_fields_and_no_other(step):
    base = stock_arithmetic(torch.bfloat16)
    of = different(base)
    found = base.with_step(step, of)
    changed = {f.name for f in fields(Arithmetic) if getattr(found, f.name) != getattr(base, f.name)}
    assert changed == FIELDS[step]
    assert all(getattr(found, name) == getattr(of, name) for name in changed)


def test_the_steps_share_out_every_field():
    assert tuple(FIELDS) == STEPS
    named = [name for step in STEPS for name in FIELDS[step]]
    assert sorted(named) == sorted(f.name for f in fields(Arithmetic))


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("angles", ["model", "exact"])
def test_all_steps_of_an_arithmetic_are_that_arithmetic(dtype, angles):
    of = stock_arithmetic(dtype, angles)
    found = EXACT
    for step in STEPS:
        found = found.with_step(step, of)
    assert found == of


def test_float64_is_exact():
    assert stock_arithmetic(torch.float64) is EXACT
    assert stock_arithmetic(torch.float64, "exact") is EXACT
    assert {getattr(EXACT, f.name) for f in fields(Arithmetic)} == {"exact", "float64", torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stock_arithmetic_is_what_transformers_rounds(dtype):
    found = stock_arithmetic(dtype)
    assert found.angles == "model"
    assert {found.cos_sin, found.rotation, found.scores, found.weights, found.rest} == {dtype}
    assert found.softmax == torch.float32
    assert DTYPES[found.product] == dtype
    assert stock_arithmetic(dtype, "exact") == replace(found, angles="exact")


@pytest.mark.parametrize("name", ["cos_sin", "rotation", "scores", "softmax", "weights", "rest"])
def test_one_float64_step_makes_the_steps_between_wide(name):
    base = stock_arithmetic(torch.bfloat16)
    assert base.wide == torch.float32
    assert replace(base, **{name: torch.float64}).wide == torch.float64
    assert replace(base, product="float64").wide == torch.float64
    assert EXACT.wide == torch.float64


@given(st.lists(ANY_FLOAT32, min_size=1, max_size=20))
def test_rounding_is_a_cast_there_and_back(bits):
    x = as_tensor(bits)
    for dtype in (torch.bfloat16, torch.float16):
        found = rounded(x.double(), dtype)
        assert found.dtype == torch.float64
        assert torch.equal(found.nan_to_num(7.0), x.double().to(dtype).double().nan_to_num(7.0))
    assert rounded(x, torch.float32) is x


def test_unknown_names_are_refused():
    with pytest.raises(RopewalkError, match="unknown product 'int8'; choose one of float64, float32, tf32"):
        replace(EXACT, product="int8")
    with pytest.raises(RopewalkError, match="unknown step 'scores'; choose one of angles, cos_sin, rotation"):
        EXACT.with_step("scores", EXACT)
    with pytest.raises(RopewalkError, match="unknown dtype 'float8_e4m3fn'; choose one of bfloat16"):
        stock_arithmetic(torch.float8_e4m3fn)
