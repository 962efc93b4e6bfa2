"""Settings of a comparison: a recipe with keys to vary, or finished runs, and never both."""

import pytest
from pydantic import ValidationError

from ropewalk.experiments.settings import CompareSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"what": ()}, "must name a recipe"),
        ({"what": ("demo",)}, "nothing to compare"),
        ({"what": ("a", "b"), "vary": ("x=1,2",)}, "--vary applies to a recipe"),
        ({"what": ("a", "b"), "share": "1/2"}, "--part applies to a recipe"),
        ({"what": ("demo",), "vary": ("x=1,2",), "share": "3/2"}, "I/N"),
        ({"what": ("demo",), "vary": ("x=1,2",), "share": "0/2"}, "I/N"),
        ({"what": ("demo",), "vary": ("x=1,2",), "share": "1"}, "I/N"),
        ({"what": ("demo",), "vary": ("x=1,2",), "seeds": 0}, "greater than or equal to 1"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        CompareSettings.model_validate(values)


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_divide_the_runs(shares):
    parts = [
        {
            n
            for n in range(10)
            if CompareSettings(what=("r",), vary=("x=1,2",), share=f"{i}/{shares}").is_mine(n)
        }
        for i in range(1, shares + 1)
    ]
    assert set().union(*parts) == set(range(10))
    assert sum(map(len, parts)) == 10


def test_the_folder_of_a_comparison_is_read_again_and_takes_no_options(tmp_path):
    (tmp_path / "grid.json").write_text("{}")
    assert CompareSettings(what=(str(tmp_path),)).is_reread
    with pytest.raises(ValidationError, match="--vary applies to a recipe, but a comparison is given"):
        CompareSettings(what=(str(tmp_path),), vary=("x=1,2",))
