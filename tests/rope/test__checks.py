"""Fields of methods and values of configs are refused by their name and their value, and numbers pass as they are."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.rope import _checks

NO_NUMBERS = [None, "2", True, math.nan, math.inf, [2.0]]


@pytest.mark.parametrize(
    ("check", "lowest", "included"),
    [
        (lambda value: _checks.check_positive("low_freq_factor", value), 0, False),
        (_checks.check_theta, 1, False),
        (_checks.check_factor, 1, True),
    ],
)
def test_a_number_passes_from_its_bound_on_and_what_is_none_is_refused(check, lowest, included):
    check(lowest + 1e-9)
    check(10**9)
    for value in (*NO_NUMBERS, lowest - 1e-9, -1, *(() if included else (lowest,))):
        with pytest.raises(RopewalkError, match="must be a finite number"):
            check(value)
    if included:
        check(lowest)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_checks.check_original_length, [2, 8192], [1, 0, -2, 2.0, True, "2"]),
        (_checks.check_rotary_dim, [2, 4, 128], [0, 1, 3, -2, 4.0, True, None]),
        (_checks.check_ntk_dim, [4, 128], [2]),
        (_checks.check_sequence_length, [1, 4096, None], [0, -1]),
    ],
)
def test_whole_numbers_within_their_range_pass_and_others_are_named(check, good, bad):
    for value in good:
        assert check(value) in (None, value)
    for value in bad:
        with pytest.raises(RopewalkError) as refused:
            check(value)
        assert str(refused.value).endswith(f"got {value!r}")


@given(st.lists(st.floats(1e-6, 1e6), max_size=8))
def test_a_list_of_factors_comes_back_as_a_tuple_and_one_of_another_length_is_refused(values):
    assert _checks.check_factors("long_factor", values, len(values)) == tuple(values)
    with pytest.raises(
        RopewalkError, match=rf"long_factor .* = {len(values) + 1} entries, got {len(values)}"
    ):
        _checks.check_factors("long_factor", values, len(values) + 1)


def test_a_bad_entry_of_a_list_is_named_by_its_place():
    with pytest.raises(RopewalkError, match=r"short_factor\[1\] must be a finite number above 0, got 0"):
        _checks.check_factors("short_factor", [1.0, 0], 2)
    with pytest.raises(RopewalkError, match="short_factor must be a list of numbers, got '11'"):
        _checks.check_factors("short_factor", "11", 2)


def test_a_whole_number_of_a_config_may_be_a_float_and_may_be_missing():
    assert _checks.whole_number({"heads": 4.0}, "heads") == 4
    assert isinstance(_checks.whole_number({"heads": 4.0}, "heads"), int)
    assert _checks.whole_number({"heads": None}, "heads") is _checks.whole_number({}, "heads") is None
    for value in (0, -1, 1.5, True, "4", math.inf):
        with pytest.raises(RopewalkError, match="heads must be a whole number, at least 1, got"):
            _checks.whole_number({"heads": value}, "heads")
