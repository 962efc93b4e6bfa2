"""Settings are declared once: what people write is read strictly, and each mistake is one sentence."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, ValidationError, field_validator

from ropewalk.io.settings import (
    Count,
    ExistingPath,
    FileOrName,
    Folder,
    Length,
    Lengths,
    Numbers,
    Option,
    Settings,
    Text,
    explain,
    names_files,
)


class Inner(Settings):
    steps: Count = Field(default=1, ge=1)


class Wide(Settings):
    first: int = 0
    second: int = 0
    third: int = 0
    fourth: int = 0


class Outer(Settings):
    inner: Inner = Inner()
    rate: float = Field(default=0.1, ge=0)
    shuffle: bool = False
    lengths: Lengths = ()
    lines: Numbers = ()
    name: Text = "x"
    either: float | None = None
    small: Length = 1
    wide: Wide | None = None
    several: list[Inner] = Field(default_factory=list)
    named: dict[str, int] = Field(default_factory=dict)

    @field_validator("small")
    @classmethod
    def _is_small(cls, value: int) -> int:
        if value > 1000:
            raise ValueError(f"must not exceed 1000 tokens, got {value}")
        return value


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"inner": {"steps": True}}, "inner.steps must be a whole number, got True"),
        ({"inner": {"steps": 0}}, "inner.steps must be 1 or more, got 0"),
        ({"inner": {"stpes": 3}}, "unknown key inner.stpes; did you mean steps?"),
        ({"inner": 3}, "inner must be a mapping of steps, got 3"),
        ({"inner": [3]}, "inner must be a mapping of steps, got a list"),
        ({"wide": "x"}, "wide must be a mapping of first, second, third, ..., got 'x'"),
        ({"several": {"steps": 1}}, "several must be a list, got a mapping"),
        ({"several": [{}, 3]}, "several.1 must be a mapping of steps, got 3"),
        ({"named": 3}, "named must be a mapping, got 3"),
        ({"rate": True}, "rate must be a number, got True"),
        ({"rate": float("nan")}, "rate must be a finite number, got nan"),
        ({"shuffle": 1}, "shuffle must be true or false, got 1"),
        ({"name": ""}, "name must not be empty, got ''"),
        (
            {"lengths": "8k,8x"},
            "lengths.1: '8x' is not a length; write a number of tokens such as 131072, 128k or 1M",
        ),
        ({"lengths": ","}, "lengths: ',' is empty; give one or more values, separated by commas"),
        ({"lines": "20,x"}, "lines.1 must be a whole number, got 'x'"),
        ({"either": "x"}, "either must be a number, got 'x'"),
        ({"small": "1k"}, "small must not exceed 1000 tokens, got 1024"),
        ({"rate": -1, "either": "x"}, "rate must be 0 or more, got -1; either must be a number, got 'x'"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_value(values, sentence):
    with pytest.raises(ValidationError) as refused:
        Outer.model_validate(values)
    assert explain(refused.value, Outer) == sentence


def test_lists_and_lengths_are_read_as_people_write_them():
    read = Outer(lengths="8k, 1M,8k", lines="20,40")  # type: ignore[arg-type]
    assert read.lengths == (8192, 1048576)
    assert read.lines == (20, 40)
    assert Outer(lengths=(8192, 1048576), lines=(20, 40)) == read


def test_a_setting_names_files_where_its_type_says_so():
    class Paths(Settings):
        plain: Path = Path()
        perhaps: ExistingPath | None = None
        many: tuple[Folder, ...] = ()
        by_name: Annotated[dict[str, ExistingPath], Option(repeated=True)] = Field(default={})
        text: FileOrName = "hub"
        perhaps_text: Annotated[FileOrName | None, Option()] = None

    class Others(Settings):
        text: str = "a/b"
        named: Text = "a/b"
        perhaps: Annotated[str | None, Option(metavar="PATH")] = None
        count: Count = 0

    assert all(map(names_files, Paths.model_fields.values()))
    assert not any(map(names_files, Others.model_fields.values()))
