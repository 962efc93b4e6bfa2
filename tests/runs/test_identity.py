"""Which keys of two identities differ, and how a user is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.runs.identity import Difference, differences, listed, plain, refuse_other

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_values_differ_exactly_if_their_json_does(one, other):
    import json

    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (differences(one, other) == []) == same
    assert differences(one, one) == []


@pytest.mark.parametrize(
    ("then", "now", "found"),
    [
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}, [("a.b", 1, 3)]),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, [("a", 1, 2), ("b", 1, 2)]),
        ({"a": [{"n": 1}, {"n": 2}]}, {"a": [{"n": 1}, {"n": 3}]}, [("a.1.n", 2, 3)]),
        ({"a": [1]}, {"a": [1, 2]}, [("a", [1], [1, 2])]),
        ({"a": [1, 2]}, {"a": [1, 3]}, [("a", [1, 2], [1, 3])]),
        ({}, {"a": None}, [("a", None, None)]),
        ({"a": None}, {}, [("a", None, None)]),
        ({"a": 1}, {"a": True}, [("a", 1, True)]),
        ({"a": 1}, {}, [("a", 1, None)]),
        ({"a": (1, 2)}, {"a": (1, 2)}, [("a", (1, 2), [1, 2])][:0]),
    ],
)
def test_differences_are_named_by_key_with_both_values(then, now, found):
    assert differences(plain(then), now) == [Difference(*each) for each in found]


def test_the_order_of_keys_makes_no_difference_wherever_they_are():
    one, other = {"x": 1, "y": 2}, {"y": 2, "x": 1}
    for inside in (lambda value: value, lambda value: [value], lambda value: [[value]]):
        assert differences(inside(one), inside(other)) == differences(inside(other), inside(one)) == []


def test_a_message_is_short():
    found = differences({str(n): n for n in range(9)}, {str(n): "x" * 500 for n in range(9)})
    assert listed(found).startswith("0 (0 in the folder, xxx")
    assert len(listed(found)) < 1000
    assert str(Difference("a", None, "b")) == "a (none in the folder, b given)"


def test_what_json_lacks_is_no_identity():
    with pytest.raises(ValueError, match="not JSON compliant"):
        differences({}, {"a": float("nan")})


def test_another_value_is_refused_with_its_first_difference():
    refuse_other({"a": [1]}, {"a": (1,)}, str)
    with pytest.raises(RopewalkError, match=r"^b \(2 in the folder, 3 given\)$"):
        refuse_other({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 4}, str)
