"""Settings of a search for rescale factors, shared by the command, recipes and the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import (
    FREE,
    Count,
    Device,
    Dtype,
    FilePath,
    Length,
    OnResume,
    Option,
    Seed,
    Settings,
)
from ropewalk.search.space import SMALLEST, START_TOKENS

AlgorithmName = Literal["cma-es", "evolution"]
ALGORITHMS: tuple[AlgorithmName, ...] = ("cma-es", "evolution")
DEFAULT_ALGORITHM: AlgorithmName = "cma-es"
ANY_START_TOKENS = "search"
"""The user's word for searching over all start-token counts of the paper."""

WHAT, SPACE, HOW = Option(group="What"), Option(group="Where to search"), Option(group="How")


def _start_tokens(value: Any) -> Any:
    """Parse one number into a single choice, or ``search`` into the paper's list."""
    if value == ANY_START_TOKENS:
        return START_TOKENS
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"{value!r} is neither a non-negative number of tokens nor {ANY_START_TOKENS}")
        value = int(value)
    return (value,) if isinstance(value, int) else value


StartTokens = Annotated[
    tuple[int, ...],
    BeforeValidator(_start_tokens),
    Option(metavar=f"NUMBER|{ANY_START_TOKENS}", text=lambda found: ",".join(map(str, found))),
]
"""Start-token counts n̂ to choose from."""


def check_budget(budget: int, candidates: int, rows: int) -> None:
    """Raise if the budget is too small to measure the initial candidates of a search.

    Args:
        budget: forward passes.
        candidates: number of distinct initial candidates.
        rows: rows of text that each candidate is measured on.

    Raises:
        RopewalkError: if the budget is less than ``candidates * rows``.
    """
    needed = candidates * rows
    if budget < needed:
        raise RopewalkError(
            f"a budget of {budget} forward passes is too small for the {candidates} initial "
            f"candidate{'s' if candidates > 1 else ''} on {rows} documents each; give {needed} or more, or fewer "
            "documents"
        )


class ShortFactorSearch(Settings):
    """Search settings common to short and long factors."""

    on_resume: ClassVar[OnResume | None] = OnResume("fixed", "it decides the result of a search in this run")

    documents: Annotated[Count, WHAT] = Field(
        5, ge=1, description="Number of rows of text to measure each candidate on."
    )
    largest: Annotated[float | None, SPACE] = Field(
        None,
        ge=SMALLEST,
        description="Upper bound of the factors; default: 1.25 times the extension ratio, or for short factors half of "
        "the largest long factor.",
    )
    algorithm: Annotated[AlgorithmName, HOW] = Field(
        DEFAULT_ALGORITHM,
        description="Search algorithm: cma-es (best in our measurements) or evolution (the paper's).",
    )
    budget: Annotated[Count, HOW] = Field(
        500, ge=1, description="Maximum number of forward passes; each runs one candidate on one row."
    )
    racing: Annotated[bool, HOW] = Field(
        True, description="Drop candidates early if they are clearly behind after their first rows."
    )
    batch: Annotated[Count, FREE, HOW] = Field(
        1, ge=1, description="Number of candidates to evaluate together in one batch."
    )

    @property
    def rows(self) -> int:
        """Total number of rows of text that a candidate is measured on."""
        return self.documents


class LongFactorSearch(ShortFactorSearch):
    """Search settings for the factors of a longer context."""

    short_penalty: Annotated[float, WHAT] = Field(
        0.0,
        ge=0,
        description="Weight of the loss increase at the trained length, in nats per nat; 0 disables this penalty.",
    )

    @property
    def rows(self) -> int:
        return self.documents * (2 if self.short_penalty else 1)


class SearchSettings(LongFactorSearch):
    """Settings of one search on a model in memory."""

    group: ClassVar[str | None] = "How"

    objective: Annotated[Literal["perplexity", "needle"], WHAT] = Field(
        "perplexity",
        description="perplexity: loss of all tokens; needle: loss of answers whose evidence lies far back in the text.",
    )
    held_out: Annotated[Count, WHAT] = Field(
        5, ge=0, description="Maximum number of rows from other documents to evaluate the result on."
    )
    start_tokens: Annotated[StartTokens, SPACE] = Field(
        (0,),
        description="Initial tokens whose RoPE angles stay unscaled: a number, or search; config.json stores only 0.",
    )
    attention_factor: Annotated[float | None, SPACE] = Field(
        None, description="Attention factor of all candidates; default: the formula of the LongRoPE paper."
    )
    prefill_chunk: Length | None = Field(
        None, description="Tokens to process per forward call: 4096, 8k; default: a whole row."
    )
    seed: Seed = Field(0, description="Random seed for the search.")
    dtype: Dtype = "auto"
    device: Device = "auto"

    def within(self, length: int) -> SearchSettings:
        """These settings without the start-token choices that would cover the whole ``length``.

        A single choice is kept, so that a later check can refuse it by name.
        """
        if len(self.start_tokens) == 1:
            return self
        return self.model_copy(
            update={"start_tokens": tuple(each for each in self.start_tokens if each < length)}
        )


class SearchConfig(Settings):
    """Configuration of one search: model, target length, text and search settings."""

    model: str = Field(description="Checkpoint: a folder, a Hub id, or embedded.")
    target_length: Length = Field(
        description="Target length in tokens: 2048, 32k, 1M. Up to the original length of a longrope checkpoint, the "
        "search finds its short factors."
    )
    text: str = Field(
        "embedded:validation", description="Source of the text: a path or dataset, as for ropewalk data pack."
    )
    settings: SearchSettings = SearchSettings()
    out: FilePath | None = Field(
        None,
        description="File for the factor table (.json), with a log next to it; default: write nothing.",
    )
    resume: bool = Field(False, description="Resume from the log next to the factor table.")

    @property
    def log(self) -> Path | None:
        """The log of losses, a JSON Lines file; None if nothing is written."""
        return None if self.out is None else self.out.with_suffix(".jsonl")
