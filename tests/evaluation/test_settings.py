"""What no evaluation can do is refused by its value, before anything runs."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.settings import (
    OWN,
    Settings,
)
from ropewalk.evaluation.tasks.needle import NeedleSettings
from ropewalk.evaluation.tasks.registry import BY_NAME, check_names
from ropewalk.evaluation.tasks.suite import BenchmarkSettings
from ropewalk.io.settings import explain


def test_default_settings_and_every_suite_will_do() -> None:
    Settings()
    Settings(suites=tuple(BY_NAME), harness_names=("mine",))
    Settings(threshold=0, compat="nvidia", haystack="essay", depths=1, samples=1, rows=1)
    Settings(threshold=100, stride=1, short_context=4, haystack="embedded")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", 0, "samples must be 1 or more, got 0"),
        ("samples", True, "samples must be a whole number, got True"),
        ("rows", -1, "rows must be 1 or more, got -1"),
        ("depths", 0, "needle.depths must be 1 or more, got 0"),
        ("depths", 1002, "needle.depths must be 1001 or less, got 1002"),
        ("stride", 0, "perplexity.stride must be 1 or more, got 0"),
        ("short_context", 3, "longppl.short_context must be 4 or more, got 3"),
        ("threshold", -0.1, "threshold must be 0 or more, got -0.1"),
        ("threshold", 100.1, "threshold must be 100 or less, got 100.1"),
        ("threshold", math.nan, "threshold must be a finite number, got nan"),
        ("compat", "hf", "unknown ruler.compat 'hf'; choose from none, nvidia"),
        ("haystack", "hay", "unknown needle.haystack 'hay'; choose from noise, essay, embedded"),
        ("seed", -1, "seed must be 0 or more, got -1"),
        ("lengths", (8, 8), "give each length only once, got 8, 8"),
        ("lengths", (1 << 27,), "a length must be from 1 to 67,108,864 tokens, got 134,217,728"),
        ("suites", (), "no suite given; choose from ruler, passkey"),
        ("suites", ("ruler", "perplexty"), "unknown suites.1 'perplexty'; did you mean perplexity?"),
        ("suites", ("lm_eval",), "the suite lm_eval needs the names of its tasks"),
    ],
)
def test_impossible_values_are_named_with_what_would_do(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**{field: value})
    assert message in explain(refused.value, Settings)


def test_unknown_names_give_the_nearest_or_all_that_there_are() -> None:
    check_names("task", (), ())
    check_names("task", ("b", "a"), ("a", "b"))
    with pytest.raises(RopewalkError, match=r"^unknown task 'niah_single1'; did you mean niah_single_1\?$"):
        check_names("task", ("vt", "niah_single1"), ("niah_single_1", "vt"))
    with pytest.raises(RopewalkError, match=r"^unknown task 'zzz'; choose from niah_single_1, vt$"):
        check_names("task", ("zzz",), ("niah_single_1", "vt"))


def test_lengths_are_for_all_suites_or_for_each() -> None:
    for_all = Settings(lengths=(512, 64))
    assert for_all.lengths_of("ruler") == for_all.lengths_of("short") == [512, 64]
    each = Settings(lengths={"ruler": [4096, 8192], "passkey": ()})
    assert each.lengths_of("ruler") == [4096, 8192]
    assert each.lengths_of("passkey") == each.lengths_of("perplexity") == []
    assert Settings().lengths_of("ruler") == []


def test_settings_are_values() -> None:
    assert Settings() == Settings(lines=())
    with pytest.raises(ValidationError, match="frozen"):
        Settings().samples = 3  # type: ignore[misc]


def test_settings_of_a_suite_stand_with_it_and_come_back_from_json() -> None:
    asked = Settings(suites=("needle", "longppl"), depths=3, short_context="1k", essays=str(Path(__file__)))
    assert asked.of(NeedleSettings).depths == 3
    assert asked == Settings(
        suites=("needle", "longppl"),
        needle={"depths": 3},
        longppl={"short_context": 1024},
        prose={"essays": Path(__file__)},
    )
    assert Settings(**asked.to_json()) == asked
    # A folder is known by what its suites read, and by no more.
    assert {"depths", "essays", "evaluator"} <= set(asked.identity())
    assert not {"stride", "squad", "lines", "harness", "threshold"} & set(asked.identity())


def test_no_two_suites_have_a_setting_of_the_same_name() -> None:
    own = [field for kind in OWN.values() for field in kind.model_fields]
    assert len(own) == len(set(own))
    assert not set(own) & {*BenchmarkSettings.model_fields, *OWN}


def test_files_of_an_unknown_suite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"unknown suite in --benchmark-data 'longbnech_v2'.*longbench_v2"):
        Settings(suites=("longbench_v2",), benchmark_data={"longbnech_v2": path})
