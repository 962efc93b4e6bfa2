"""What no evaluation can do is refused by its value, before anything runs."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.settings import (
    SUITES,
    Materials,
    Settings,
    check_names,
    check_settings,
    check_suites,
)


def test_default_settings_and_every_suite_will_do() -> None:
    check_settings(Settings())
    check_settings(Settings(suites=SUITES, harness_names=("mine",)))
    check_settings(Settings(threshold=0, compat="nvidia", haystack="essay", depths=1, samples=1, rows=1))
    check_settings(Settings(threshold=100, stride=1, short_context=4, haystack="embedded"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", 0, "samples must be 1 or more, got 0"),
        ("rows", -1, "rows must be 1 or more, got -1"),
        ("depths", 0, "depths must be 1 or more, got 0"),
        ("stride", 0, "stride must be 1 or more, got 0"),
        ("short_context", 3, "short context must be 4 or more, got 3"),
        ("threshold", -0.1, "percentage from 0 to 100, got -0.1"),
        ("threshold", 100.1, "percentage from 0 to 100, got 100.1"),
        ("threshold", math.nan, "percentage from 0 to 100, got nan"),
        ("compat", "hf", "unknown compat 'hf'; choose none or nvidia"),
        ("haystack", "hay", "unknown haystack 'hay'; choose noise, essay or embedded"),
        ("suites", (), "no suite given; choose from perplexity, passkey"),
        ("suites", ("ruler", "perplexty"), "unknown suite 'perplexty'; did you mean perplexity"),
        ("suites", ("lm_eval",), "the suite lm_eval needs the names of its tasks"),
    ],
)
def test_impossible_values_are_named_with_what_would_do(field: str, value: Any, message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        check_settings(replace(Settings(), **{field: value}))


def test_unknown_names_give_the_nearest_or_all_that_there_are() -> None:
    check_names("task", (), ())
    check_names("task", ("b", "a"), ("a", "b"))
    with pytest.raises(RopewalkError, match=r"^unknown task 'niah_single1'; did you mean niah_single_1$"):
        check_names("task", ("vt", "niah_single1"), ("niah_single_1", "vt"))
    with pytest.raises(RopewalkError, match=r"^unknown task 'zzz'; choose from niah_single_1, vt$"):
        check_names("task", ("zzz",), ("niah_single_1", "vt"))
    with pytest.raises(RopewalkError, match="unknown suite 'Ruler'; did you mean ruler"):
        check_suites(("Ruler",))


def test_lengths_are_for_all_suites_or_for_each() -> None:
    for_all = Settings(lengths=(512, 64))
    assert for_all.lengths_of("ruler") == for_all.lengths_of("short") == [512, 64]
    each = Settings(lengths={"ruler": [4096, 8192], "passkey": ()})
    assert each.lengths_of("ruler") == [4096, 8192]
    assert each.lengths_of("passkey") == each.lengths_of("perplexity") == []
    assert Settings().lengths_of("ruler") == []


def test_settings_are_values() -> None:
    assert Settings() == Settings(materials=Materials())
    assert Materials().harness == {}
    with pytest.raises(AttributeError):
        Settings().samples = 3  # type: ignore[misc]
