"""Settings of `ropewalk eval` and of the library: benchmarks, model, server and folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from ropewalk.evaluation.backends.serving import Serving, json_values
from ropewalk.evaluation.tasks.published.rows import PublishedSettings
from ropewalk.evaluation.tasks.registry import BY_NAME, SUITES, check_names, chosen_suites
from ropewalk.evaluation.tasks.suite import HOW, TEXTS, BenchmarkSettings, GeneratedSuite
from ropewalk.io.settings import (
    COMMON,
    DOCUMENTS,
    FACTOR_TABLE,
    MODEL_NAME,
    ROPE_SETTINGS,
    STATED_LENGTH,
    TARGET_LENGTH,
    CommaList,
    Count,
    Device,
    Dtype,
    ExistingPath,
    FilePath,
    Folder,
    Length,
    Option,
    Seed,
    Several,
)
from ropewalk.io.settings import Settings as BaseSettings

ANSWERS = "answers"
"""Folder of the pages with all answers, in the folder that has the answers."""
LONGEST = 1 << 26
"""Largest length in tokens, beyond any existing context; a typing error must not exhaust the memory."""

# A Literal made from a tuple works for pydantic, but mypy cannot read it.
if TYPE_CHECKING:
    SuiteName = str
else:
    SuiteName = Literal[tuple(BY_NAME)]

OWN: Mapping[str, type[BaseSettings]] = {
    name: kind for suite in SUITES for name, kind in suite.settings.items()
}
"""Settings models that only some suites read, keyed by their field in the evaluation settings."""

OWN_FIELDS: Mapping[str, str] = {field: name for name, kind in OWN.items() for field in kind.model_fields}
"""Maps the name of each suite-specific setting to the field of the evaluation settings that contains it."""


def unread(values: Mapping[str, Any], suites: Collection[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Find suite settings that differ from their defaults and that none of the requested suites reads.

    Args:
        values: field values of the evaluation settings, including the models of :data:`OWN` by name.
        suites: names of the requested suites.

    Yields:
        The name of the settings model, the name of the setting, and the names of the suites that read it.
    """
    for name, kind in OWN.items():
        readers = [suite.name for suite in SUITES if name in suite.settings]
        if not set(readers) & set(suites):
            for field in values[name].model_fields_set:
                # A default written out by hand changes nothing, so it is not refused.
                if getattr(values[name], field) != kind.model_fields[field].get_default():
                    yield name, field, readers


def _as_text(value: Any) -> Any:
    """Convert a path, or the paths in a mapping, to strings; return other values unchanged."""
    if isinstance(value, Mapping):
        return {name: _as_text(each) for name, each in value.items()}
    return str(value) if isinstance(value, Path) else value


class _Checked(BenchmarkSettings):
    suites: Annotated[Several[SuiteName], COMMON, Option(name="--suite")] = Field(
        default=("perplexity", "passkey"),
        description="Suites to run, separated by commas: those that the text above lists.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sort(cls, value: Any) -> Any:
        """Move suite settings given at the top level, as records store them, into their settings models."""
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
                raise ValueError(f"give each length only once, got {', '.join(map(str, lengths))}")
            for length in lengths:
                if not 1 <= length <= LONGEST:
                    raise ValueError(f"a length must be from 1 to {LONGEST:,} tokens, got {length:,}")
        own_files = [name for name, suite in BY_NAME.items() if PublishedSettings in suite.settings.values()]
        check_names("suite in --benchmark-data", [*self.of(PublishedSettings).benchmark_data], own_files)
        for suite in self.suites:
            if not BY_NAME[suite].known(self):
                raise ValueError(
                    f"the suite {suite} needs the names of its tasks; give --lm-eval-tasks, or lm_eval.harness_names "
                    "in the evaluation section of a recipe"
                )
        return self

    def to_json(self) -> dict[str, Any]:
        """Return all settings as one flat mapping of JSON values."""
        return self._flat(OWN)

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect the results, without the threshold and settings of suites that do not run."""
        read_settings = {name for suite in chosen_suites(self) for name in suite.settings}
        # Without a chat template, these have no place; an evaluation of an earlier version can go on.
        without = ("threshold", *(() if self.chat else ("system_prompt", "thinking_tokens")))
        known = self._flat(read_settings) | {"samples": self.sample_counts()}
        return {k: v for k, v in known.items() if k not in without}

    def sample_counts(self) -> int | dict[str, int] | None:
        """The number of samples; by suite if suites differ, None if none has prompts."""
        if self.samples is not None:
            return self.samples
        counts = {s.name: s.samples_of(self) for s in chosen_suites(self) if isinstance(s, GeneratedSuite)}
        return counts if len({*counts.values()}) > 1 else next(iter(counts.values()), None)

    def _flat(self, own: Any) -> dict[str, Any]:
        values = self.model_dump(mode="python")
        flat = {name: value for name, value in values.items() if name not in OWN}
        for name in OWN:
            flat |= values[name] if name in own else {}
        return {name: _as_text(value) for name, value in flat.items()}


# Built at run time from the settings models that the suites bring along, which mypy cannot follow.
if TYPE_CHECKING:
    Settings = _Checked
else:
    Settings = create_model(
        "Settings",
        __base__=_Checked,
        __doc__="Settings of one evaluation: the suites to run and the settings of each suite.",
        **{name: (kind, Field(default=kind(), description=kind.__doc__)) for name, kind in OWN.items()},
    )


class Loading(BaseSettings):
    """Settings of loading a model into memory and running it."""

    group: ClassVar[str | None] = "Model"

    batch_size: int = Field(
        default=8,
        ge=1,
        description="Number of prompts per batch. It is halved if the device runs out of memory.",
    )
    prefill_chunk: Length = Field(
        default=8192, description="Number of tokens per forward pass. Fewer tokens take less memory."
    )
    engine: str = Field(
        default="auto",
        description="Attention implementation: sdpa (PyTorch's SDPA), flex (FlexAttention), varlen (FlashAttention), "
        "reference (a dense mask, for tests), or auto (on a GPU, the first of varlen, flex and sdpa that works; "
        "on a CPU, sdpa). With several processes, every task uses this implementation. With one process, only "
        "the task perplexity uses it, and all other tasks use transformers' own attention.",
    )
    dtype: Dtype = "auto"
    device: Device = "auto"
    exact_rope: bool = Field(
        default=True,
        description="Compute RoPE angles in float64 and rotate in float32. With --no-exact-rope: run transformers' own "
        "RoPE.",
    )
    rope: Annotated[FilePath | None, Option(metavar="FILE")] = Field(
        default=None,
        description=f"{FACTOR_TABLE}. The model runs with these factors.",
    )


class EvaluationSettings(BaseSettings):
    """Settings of one call of ``ropewalk eval``.

    Attributes:
        what: suites, lengths, and the settings of each suite.
        loading: how to load the model into memory.
        serving: the server that runs the model instead; None for a model in memory.
    """

    model: Annotated[str | None, Option(argument=True)] = Field(
        default=None,
        description=f"{MODEL_NAME}. With --average: a folder of checkpoints. With --server, not needed: the model's "
        "name on the server, or a folder or Hub id with its tokenizer.",
    )
    what: Settings = Settings()
    loading: Loading = Loading()
    serving: Serving | None = None
    text: Annotated[str, TEXTS] = Field(
        default="embedded:validation",
        description=f"Documents for the suites perplexity and longppl: {DOCUMENTS}.",
    )
    average: Annotated[bool, HOW] = Field(
        default=False,
        description="Evaluate the last checkpoints in the folder MODEL (--last says how many) and report their mean "
        "scores.",
    )
    last: Annotated[int, HOW] = Field(
        default=5, ge=1, description="Number of checkpoints to evaluate with --average."
    )
    parallel: Annotated[str | None, HOW, Option(metavar="KEY=DEGREE")] = Field(
        default=None,
        description="Number of processes for each kind of parallelism under torchrun: shard=2,sequence=4. sequence "
        "(Ulysses) and ring (ring attention) split each text. With shard (FSDP) and replicate (HSDP), processes get "
        "different texts. Default: sequence=N for N processes.",
    )
    samples_dir: Annotated[Folder | None, Option(group="Output")] = Field(
        default=None,
        description="Folder in which generated prompts are cached; models with the same tokenizer share them. Default: "
        "~/.cache/ropewalk/samples.",
    )


class CompareSettings(BaseSettings):
    """Settings of ``ropewalk eval compare``: the two evaluations to compare."""

    a: Annotated[FilePath, Option(argument=True)] = Field(description="Folder of a finished evaluation.")
    b: Annotated[FilePath, Option(argument=True)] = Field(
        description="Folder of another finished evaluation, on the same samples."
    )
    seed: Seed = Field(default=0, description="Random seed of the permutation test for significance.")


WholePrompts = Annotated[
    Count,
    Field(
        ge=0,
        description="Number of prompts of each task and length to show in full. They are made again with the tokenizer "
        "and the data of the evaluation.",
    ),
]


class JudgeSettings(BaseSettings):
    """Settings of ``ropewalk eval judge``."""

    group: ClassVar[str | None] = "Judge"

    folder: Annotated[FilePath, Option(argument=True)] = Field(
        description="Folder of an evaluation with answers."
    )
    url: Annotated[str, Option(name="--server", metavar="URL")] = Field(
        description="OpenAI-compatible server of the judge, with an endpoint of chats: http://localhost:8000/v1. The "
        "API key is read from OPENAI_API_KEY."
    )
    model: Annotated[str | None, Option(name="--server-model")] = Field(
        default=None, description="Name of the judge on the server. Default: the server's only model."
    )
    concurrency: int = Field(default=8, ge=1, description="Maximum number of concurrent requests.")
    extra: Annotated[
        dict[str, Any],
        BeforeValidator(json_values),
        Option(name="--server-extra", metavar="KEY=VALUE", repeated=True),
    ] = Field(default={}, description="Field to add to every request, with its value as JSON: top_k=1.")


class ViewSettings(BaseSettings):
    """Settings of ``ropewalk eval view``: whose answers to show, and where."""

    folder: Annotated[ExistingPath, Option(argument=True)] = Field(
        description="Folder of an evaluation or of a training run, whose answers before and after training stand side "
        "by side."
    )
    other: Annotated[ExistingPath | None, Option(argument=True)] = Field(
        default=None,
        description="Another such folder, to show the answers to the same prompts side by side; of a run, those after "
        "training.",
    )
    out: Folder | None = Field(
        default=None,
        description=f"Folder for the pages. Default: {ANSWERS} in the first folder, or {ANSWERS}-NAME with the name of "
        "the other folder.",
    )
    prompts: WholePrompts = 0

    @property
    def pages(self) -> Path:
        """Folder for the pages."""
        name = ANSWERS if self.other is None else f"{ANSWERS}-{self.other.resolve().name}"
        return self.folder / name if self.out is None else self.out


class ExportSettings(BaseSettings):
    """Settings of ``ropewalk eval export``: which evaluation to write as logs of inspect_ai, and where."""

    folder: Annotated[ExistingPath, Option(argument=True)] = Field(
        description="Folder of a finished evaluation."
    )
    out: Folder = Field(description="New or empty folder for the logs.")
    prompts: WholePrompts = 0


class ProbeSettings(BaseSettings):
    """Settings of one step-0 probe: the RoPE settings to compare, the length and the text."""

    model: Annotated[str, Option(argument=True)] = Field(description=f"{MODEL_NAME}.")
    to: Annotated[Length, COMMON] = Field(
        description=f"{TARGET_LENGTH} The loss is measured on sequences of this length."
    )
    text: Annotated[str, COMMON] = Field(
        default="embedded:validation", description=f"Documents to measure on: {DOCUMENTS}."
    )
    rules: Annotated[CommaList, COMMON] = Field(
        default=("current", "critical-dimension", "ntk", "linear", "yarn"),
        description=f"RoPE settings to compare, separated by commas: current (the checkpoint's own), "
        f"none (no RoPE), {ROPE_SETTINGS}.",
    )
    rows: int = Field(default=4, ge=1, description="Maximum number of sequences to measure on.")
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        default=None, description=STATED_LENGTH
    )
    dtype: Dtype = "auto"
    device: Device = "auto"
