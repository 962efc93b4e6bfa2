"""Settings of a search for rescale factors, shared by the command, recipes and the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import (
    COMMON,
    FREE,
    MODEL_NAME,
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
"""Value of --start-tokens that searches over all start-token counts of the paper."""

OBJECTIVE, SPACE = Option(group="Objective"), Option(group="Search space")
ALGORITHM, COMPUTATION = Option(group="Algorithm"), Option(group="Computation")


def _start_tokens(value: Any) -> Any:
    """Parse one number into a single choice, or ``search`` into the paper's list."""
    if value == ANY_START_TOKENS:
        return START_TOKENS
    if isinstance(value, str):
        # isdigit() alone accepts digits such as ², which int() refuses.
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"{value!r} is neither a non-negative number of tokens nor {ANY_START_TOKENS}")
        value = int(value)
    # A tuple from Python stays as it is.
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

    documents: Annotated[Count, COMMON] = Field(
        5,
        ge=1,
        description="Number of sequences of text on which to measure each candidate (list of factors).",
    )
    largest: Annotated[float | None, SPACE] = Field(
        None,
        ge=SMALLEST,
        description="Upper bound of the factors. Default for long factors: 1.25 times the target length over the "
        "original length; for short factors: half of the largest long factor, and at least 1.25.",
    )
    algorithm: Annotated[AlgorithmName, ALGORITHM] = Field(
        DEFAULT_ALGORITHM,
        description="Search algorithm: cma-es (the best in the documented measurements) or evolution (LongRoPE's own).",
    )
    budget: Annotated[Count, COMMON] = Field(
        500, ge=1, description="Maximum number of measurements, each of one candidate on one sequence."
    )
    racing: Annotated[bool, ALGORITHM] = Field(
        True, description="Drop candidates early if they are clearly behind after their first sequences."
    )
    batch: Annotated[Count, FREE, COMPUTATION] = Field(
        1,
        ge=1,
        description="Number of candidates to measure in one forward pass; each takes the memory of one sequence.",
    )

    @property
    def rows(self) -> int:
        """Total number of rows of text that a candidate is measured on."""
        return self.documents


class LongFactorSearch(ShortFactorSearch):
    """Search settings for the factors of a longer context."""

    short_penalty: Annotated[float, OBJECTIVE] = Field(
        0.0,
        ge=0,
        description="Weight of the penalty for a higher loss at the trained length; 0 for no penalty.",
    )

    @property
    def rows(self) -> int:
        return self.documents * (2 if self.short_penalty else 1)


class SearchSettings(LongFactorSearch):
    """Settings of one search on a model in memory."""

    group: ClassVar[str | None] = COMPUTATION.group

    objective: Annotated[Literal["perplexity", "needle"], OBJECTIVE] = Field(
        "perplexity",
        description="Loss to minimise: perplexity (of all tokens) or needle (of the answers to questions about numbers "
        "that are hidden in the text).",
    )
    held_out: Annotated[Count, OBJECTIVE] = Field(
        5, ge=0, description="Maximum number of sequences from other documents to evaluate the result on."
    )
    start_tokens: Annotated[StartTokens, SPACE] = Field(
        (0,),
        description='Number of initial tokens whose RoPE angles stay unscaled. With the value "search", the '
        "numbers in the LongRoPE paper are tried. config.json can store only 0.",
    )
    attention_factor: Annotated[float | None, SPACE] = Field(
        None, description="Attention factor of all candidates. Default: the formula of the LongRoPE paper."
    )
    prefill_chunk: Length | None = Field(
        None, description="Tokens per forward call, to save memory: 4096, 8k. Default: a whole sequence."
    )
    seed: Annotated[Seed, ALGORITHM] = Field(0, description="Random seed of the search.")
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

    model: str = Field(description=f"{MODEL_NAME}.")
    target_length: Length = Field(
        description="Target length in tokens: 2048, 32k, 1M. For a longrope checkpoint, a target up to its original "
        "length searches the short factors."
    )
    text: str = Field(
        "embedded:validation",
        description="Documents to search on: a file or folder of text, JSON Lines or Parquet, hf:owner/name, or "
        "bundled text: embedded or embedded:validation.",
    )
    settings: SearchSettings = SearchSettings()
    out: FilePath | None = Field(
        None,
        description="File for the factor table (.json), with a log next to it. Default: write nothing.",
    )
    resume: bool = Field(False, description="Resume from the log next to the factor table.")

    @property
    def log(self) -> Path | None:
        """The log of losses, a JSON Lines file; None if nothing is written."""
        return None if self.out is None else self.out.with_suffix(".jsonl")
