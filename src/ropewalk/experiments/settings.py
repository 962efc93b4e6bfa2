"""Settings of ``ropewalk compare``: a recipe with keys to vary, or finished runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ropewalk.io.settings import COMMON, RECIPE_NAME, Count, Option, Overrides, Settings

GRID = "grid.json"
"""File in the folder of a comparison that says which runs it has."""
SHARE = re.compile(r"(\d{1,6})/(\d{1,6})")


def _values_by_key(value: Any) -> Any:
    """A mapping of keys to lists of values, or one text, as ``KEY=VALUE,...`` texts."""
    if isinstance(value, Mapping):
        return tuple(f"{key}={json.dumps(list(each), default=str)[1:-1]}" for key, each in value.items())
    return (value,) if isinstance(value, str) else value


class CompareSettings(Settings):
    """Settings of a comparison of the cells of a grid of runs, or of finished runs."""

    what: Annotated[tuple[str, ...], Option(argument=True, metavar="RECIPE | RUN RUN ... | COMPARISON")] = (
        Field(
            description=f"{RECIPE_NAME}. Or the folders of at least two finished runs or evaluations. The first folder "
            "is the reference. Or the folder of a comparison, whose results are read again.",
        )
    )
    vary: Annotated[
        tuple[str, ...],
        BeforeValidator(_values_by_key),
        COMMON,
        Option(group=COMMON.group, metavar="KEY=VALUE,...", repeated=True),
    ] = Field(
        default=(),
        description="Key of the recipe with the values to compare: stages.*.learning_rate=1e-5,2e-5 (* stands for "
        "every stage). The first value is the reference. Required for a recipe.",
    )
    seeds: Annotated[Count, COMMON] = Field(
        default=3,
        ge=1,
        description="Number of random seeds with which to run each combination of values. The seed decides the order "
        "of the data and the evaluation samples.",
    )
    overrides: Annotated[Overrides, COMMON] = ()
    share: Annotated[str | None, Option(name="--part", metavar="I/N", formerly=("--cell",))] = Field(
        default=None,
        description="Divide the runs into N parts and run only part I, counted from 1, as in a job array. When all "
        "parts are done, run the command without --part for the results. Default: run all parts.",
    )
    jobs: Count | None = Field(
        default=None,
        ge=1,
        description="Number of runs at a time. Default: one per GPU; 1 if --launch is given or there are no GPUs.",
    )
    launch: str | None = Field(
        default=None,
        description="Command that launches each run: 'torchrun --nproc-per-node 8'. Default: each run is one plain "
        "process.",
    )

    @field_validator("what")
    @classmethod
    def _something(cls, what: tuple[str, ...]) -> tuple[str, ...]:
        if not what:
            raise ValueError("must name a recipe, or two or more finished runs")
        return what

    @field_validator("share")
    @classmethod
    def _one_of_them(cls, share: str | None) -> str | None:
        if share is not None:
            found = SHARE.fullmatch(share)
            if found is None or not 1 <= int(found[1]) <= int(found[2]):
                raise ValueError("must be I/N with I from 1 to N")
        return share

    @model_validator(mode="after")
    def _one_or_the_other(self) -> CompareSettings:
        if self.is_reread or len(self.what) > 1:
            given = "a comparison is" if self.is_reread else f"{len(self.what)} finished runs are"
            options = {"overrides": "set", "share": "part"}
            fields = ("vary", "overrides", "share", "jobs", "launch")
            others = [f"--{options.get(name, name)}" for name in fields if getattr(self, name)]
            if others:
                raise ValueError(f"{others[0]} applies to a recipe, but {given} given; omit {others[0]}")
        elif not self.vary:
            raise ValueError(
                "no key is varied, so there is nothing to compare; give --vary KEY=VALUE,VALUE, or two finished runs, "
                "or the folder of a comparison"
            )
        return self

    @property
    def is_reread(self) -> bool:
        """Whether the folder of a comparison is given, whose results are read again."""
        return len(self.what) == 1 and (Path(self.what[0]).expanduser() / GRID).is_file()

    def is_mine(self, number: int) -> bool:
        """Whether the run with this index belongs to the share."""
        if self.share is None:
            return True
        mine, shares = map(int, self.share.split("/"))
        return number % shares == mine - 1
