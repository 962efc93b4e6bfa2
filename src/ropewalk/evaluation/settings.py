"""What `ropewalk eval` and the library are told: the benchmarks with their settings, model, server and folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, create_model, model_validator

from ropewalk.evaluation.backends.server import Serving
from ropewalk.evaluation.tasks.registry import BY_NAME, SUITES, chosen_suites
from ropewalk.evaluation.tasks.suite import HOW, TEXTS, BenchmarkSettings
from ropewalk.io.settings import (
    CommaList,
    Device,
    Dtype,
    FilePath,
    Folder,
    Length,
    Option,
    Seed,
    Several,
)
from ropewalk.io.settings import Settings as BaseSettings

LONGEST = 1 << 26
"""Tokens. Beyond any context there is; a slip of the pen must not fill the memory."""

if TYPE_CHECKING:
    SuiteName = str
else:
    SuiteName = Literal[tuple(BY_NAME)]

OWN: Mapping[str, type[BaseSettings]] = {
    name: kind for suite in SUITES for name, kind in suite.settings.items()
}
"""Settings that only some suites read, by the field that holds them."""

OWN_FIELDS: Mapping[str, str] = {field: name for name, kind in OWN.items() for field in kind.model_fields}
"""Where the settings of suites stand: the field of an evaluation's settings by the name of the setting."""


def unread(values: Mapping[str, Any], suites: Collection[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Settings of suites that are not their defaults and that no suite reads which is asked for.

    Args:
        values: the models of :data:`OWN` by their names, among others.
        suites: names of those that are asked for.

    Yields:
        The model's name, the setting's, and the names of the suites that would read it.
    """
    for name, kind in OWN.items():
        readers = [suite.name for suite in SUITES if name in suite.settings]
        if not set(readers) & set(suites):
            for field in values[name].model_fields_set:
                if getattr(values[name], field) != kind.model_fields[field].get_default():
                    yield name, field, readers


def _as_text(value: Any) -> Any:
    """A path, or a mapping to paths, in texts; anything else as it is."""
    if isinstance(value, Mapping):
        return {name: _as_text(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


class _Checked(BenchmarkSettings):
    suites: Annotated[Several[SuiteName], Option(name="--suite")] = Field(
        ("perplexity", "passkey"), description=f"Suites, with commas between: {', '.join(BY_NAME)}."
    )

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, value: Any) -> Any:
        """A suite's setting may be given by its own name alone, as it stands in records."""
        if not isinstance(value, Mapping):
            return value
        found = {name: each for name, each in value.items() if name not in OWN_FIELDS}
        for name in value.keys() & OWN_FIELDS.keys():
            own = found.get(OWN_FIELDS[name], {})
            found[OWN_FIELDS[name]] = {**(own if isinstance(own, Mapping) else dict(own)), name: value[name]}
        return found

    @model_validator(mode="after")
    def _check(self) -> _Checked:
        if not self.suites:
            raise ValueError(f"no suite given; choose from {', '.join(BY_NAME)}")
        for suite in self.suites:
            lengths = self.lengths_of(suite)
            if len(set(lengths)) < len(lengths):
                raise ValueError(f"each length can be given once, got {', '.join(map(str, lengths))}")
            for length in lengths:
                if not 1 <= length <= LONGEST:
                    raise ValueError(f"a length is from 1 to {LONGEST:,} tokens, got {length:,}")
        for suite in self.suites:
            if not BY_NAME[suite].known(self):
                raise ValueError(f"the suite {suite} needs the names of its tasks; give --lm-eval-tasks")
        return self

    def to_json(self) -> dict[str, Any]:
        """All settings as JSON values, those of suites by their own names."""
        return self._flat(OWN)

    def identity(self) -> dict[str, Any]:
        """What decides the results: nothing of suites that are not run, and not the threshold."""
        asked = {name for suite in chosen_suites(self) for name in suite.settings}
        return {k: v for k, v in self._flat(asked).items() if k != "threshold"}

    def _flat(self, own: Any) -> dict[str, Any]:
        values = self.model_dump(mode="python")
        flat = {name: value for name, value in values.items() if name not in OWN}
        for name in OWN:
            flat |= values[name] if name in own else {}
        return {name: _as_text(value) for name, value in flat.items()}


if TYPE_CHECKING:
    Settings = _Checked
else:
    Settings = create_model(
        "Settings",
        __base__=_Checked,
        __doc__="One evaluation: the suites to run and what they read.",
        **{name: (kind, Field(kind(), description=kind.__doc__)) for name, kind in OWN.items()},
    )


class Loading(BaseSettings):
    """How a model is put into memory and asked."""

    group: ClassVar[str | None] = "How"

    batch_size: int = Field(8, ge=1, description="Prompts at once; halved where memory ends.")
    prefill_chunk: Length = Field(8192, description="Tokens of a prompt read at once.")
    engine: str = Field("auto", description="Attention engine for perplexity by position.")
    dtype: Dtype = "auto"
    device: Device = "auto"
    exact_rope: bool = Field(
        True, description="Float64 angles and float32 rotation, or transformers' own RoPE."
    )
    rope: Annotated[FilePath | None, Option(metavar="FILE")] = Field(
        None,
        description="Run MODEL with the factors of this table, from ropewalk search, start tokens included.",
    )


class EvaluationSettings(BaseSettings):
    """All that one evaluation is told.

    Attributes:
        what: suites, lengths, and what the suites read.
        loading: how a model is put into memory.
        serving: where it is served in place of that; None for a model in memory.
    """

    model: Annotated[
        str,
        Field(
            description="A checkpoint's folder, a Hub id, or embedded; with --average a folder of checkpoints; with "
            "--server where its tokenizer lies."
        ),
    ]
    what: Settings = Settings()
    loading: Loading = Loading()
    serving: Serving | None = None
    text: Annotated[str, TEXTS] = Field(
        "embedded:validation", description="Documents for perplexity: as for ropewalk data pack."
    )
    average: Annotated[bool, HOW] = Field(
        False, description="MODEL holds checkpoints: the mean over the last ones."
    )
    last: Annotated[int, HOW] = Field(5, ge=1, description="Checkpoints of --average.")
    parallel: Annotated[str | None, HOW, Option(metavar="KEY=DEGREE")] = Field(
        None,
        description="Under torchrun, how its processes share model and rows: shard=2,sequence=4. All are sequence if "
        "not given.",
    )
    samples_dir: Annotated[Folder | None, Option(group="Output")] = Field(
        None, description="Where prompts are kept for the next model; ~/.cache/ropewalk/samples if not given."
    )


class CompareSettings(BaseSettings):
    """Which two evaluations are compared."""

    a: Annotated[FilePath, Option(argument=True)] = Field(description="Folder of a finished evaluation.")
    b: Annotated[FilePath, Option(argument=True)] = Field(description="Another one, on the same samples.")
    seed: Seed = Field(0, description="Random seed of the permutation test.")


class ProbeSettings(BaseSettings):
    """One step-0 probe: which RoPE settings, at which length, on which text."""

    model: Annotated[str, Option(argument=True)] = Field(
        description="A checkpoint's folder, a Hub id, or embedded."
    )
    to: Length = Field(description="Context to probe, in tokens: 2048, 32k, 1M.")
    text: str = Field("embedded:validation", description="Documents: as for ropewalk data pack.")
    rules: CommaList = Field(
        ("current", "critical-dimension", "ntk", "linear", "yarn"),
        description="RoPE settings, with commas between; theta=5e6 gives a base itself.",
    )
    rows: int = Field(4, ge=1, description="Most rows of text.")
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        None, description="Context the checkpoint was trained for; its config's if not given."
    )
    dtype: Dtype = "auto"
    device: Device = "auto"
