"""What many parts take, from what a few take."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ropewalk.training.simulation.extending import extended, extended_fields

NUMBERS = st.integers(-(10**9), 10**9)


@given(NUMBERS, NUMBERS, st.integers(3, 1000))
def test_a_line_through_two_points_is_extended_exactly(start, slope, parts):
    values = [start + slope * number for number in (2, 3)]
    assert extended(values, (3 - parts, parts - 2)) == start + slope * parts


def test_entries_that_a_mapping_lacks_are_nothing():
    values = [{"a": 1, "c": (1, 2)}, {"a": 2, "b": 5}]
    assert extended(values, (-1, 2)) == {"a": 3, "b": 10, "c": (-1, -2)}


def test_each_field_of_a_class_is_extended():
    @dataclass
    class Need:
        bytes: int
        sent: tuple[int, int]

    assert extended_fields([Need(1, (10, 0)), Need(2, (12, 1))], (-3, 4)) == Need(5, (18, 4))
