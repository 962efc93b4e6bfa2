"""Published bases agree with the rules that they were published for."""

from itertools import pairwise

import pytest

from ropewalk.rope.theory import EXTENSIONS, SCHEDULES, feasible_bases
from ropewalk.rope.theory.published import LOWER_BOUNDS


def test_published_extensions_agree_with_the_schedules() -> None:
    for name, model in (
        ("lwm", "LWM"),
        ("anchorcontext", "AnchorContext"),
        ("gradient", "Gradient Llama 3 8B"),
    ):
        taken = {each.target_length: each.new_theta for each in EXTENSIONS if each.model == model}
        assert taken.items() <= SCHEDULES[name].bases.items()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda s: s.name)
def test_schedules_grow(schedule) -> None:
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(schedule.bases.items()))


def test_published_lower_bounds_are_no_infimum() -> None:
    for length in (2048, 16384):
        found = feasible_bases(length, 128, 1e6).infimum
        assert found is not None
        assert found < 0.8 * LOWER_BOUNDS[length]
