"""Bases that are compared."""

from ropewalk.planning.bases import bound_of
from ropewalk.planning.settings import BoundSettings


def test_a_base_that_is_compared_with_itself_is_listed_as_asked() -> None:
    said = bound_of(BoundSettings(rope_theta=5e5, rotary_dim=32, compare=(1e6, 5e5))).to_json()
    assert [other["rope_theta"] for other in said["others"]] == [1e6, 5e5]
    assert said["others"][1]["context_bound"] == said["context_bound"]
