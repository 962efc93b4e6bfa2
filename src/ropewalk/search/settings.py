"""Settings of a search for rescale factors, shared by the command, recipes and the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import (
    COMMON,
    DOCUMENTS,
    FREE,
    MODEL_NAME,
    TARGET_LENGTH,
    TEXT,
    Count,
    Device,
    Dtype,
    FilePath,
    Length,
    Option,
    Seed,
    Settings,
    written,
)
from ropewalk.search.space import ALL_PAIRS, CRITICAL_DIMENSION, SMALLEST, START_TOKENS, SpaceName

AlgorithmName = Literal["cma-es", "evolution"]
ALGORITHMS: tuple[AlgorithmName, ...] = ("cma-es", "evolution")
DEFAULT_ALGORITHM: AlgorithmName = "cma-es"
ANY_START_TOKENS = "search"
"""Value of --start-tokens that searches over all start-token counts of the paper."""

SHORT_FACTORS = (
    "If MODEL already has longrope factors, a LENGTH up to its original length gives new short factors, and a larger "
    "LENGTH gives new long factors."
)
"""What the target length decides; for a description."""

OBJECTIVE, SPACE = Option(group="Objective"), Option(group="Search space")
ALGORITHM, COMPUTATION = Option(group="Algorithm"), Option(group="Computation")


@written({"type": "integer"}, TEXT)
def _start_tokens(value: Any) -> Any:
    """Parse one number into a single choice, or ``search`` into the paper's list."""
    if value == ANY_START_TOKENS:
        return START_TOKENS
    if isinstance(value, str):
        # isdigit() alone accepts digits such as ², which int() refuses.
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"must be a number of tokens (0 or more) or the word {ANY_START_TOKENS!r}")
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
            f"candidate{'s' if candidates > 1 else ''} on {rows} documents each; either raise budget (--budget) to "
            f"{needed} or more, or lower documents (--documents)"
        )


class ShortFactorSearch(Settings):
    """Search settings common to short and long factors."""

    documents: Annotated[Count, COMMON] = Field(
        default=5,
        ge=1,
        description="Number of sequences to measure each candidate (a list of factors) on. A sequence is the beginning "
        "of one document, or several documents joined if too few documents are long enough.",
    )
    largest: Annotated[float | None, SPACE] = Field(
        default=None,
        ge=SMALLEST,
        description="Largest factor to try. Default for long factors: 1.25 times the target length divided by the "
        "original length, or 2 times in the space critical-dimension. Default for short factors: half of "
        "the model's largest long factor, but at least 1.25.",
    )
    algorithm: Annotated[AlgorithmName, ALGORITHM] = Field(
        default=DEFAULT_ALGORITHM,
        description="Search algorithm: cma-es (CMA-ES, which needed fewer measurements in ropewalk's tests) or "
        "evolution (the algorithm of the LongRoPE papers). The space critical-dimension takes evolution alone, which "
        "is its default.",
    )
    budget: Annotated[Count, COMMON] = Field(
        default=500,
        ge=1,
        description="Maximum number of measurements, each of one candidate on one sequence.",
    )
    racing: Annotated[bool, ALGORITHM] = Field(
        default=True,
        description="Drop a candidate early if its loss on the first sequences is clearly higher than the best "
        "candidates' loss.",
    )
    batch: Annotated[Count, FREE, COMPUTATION] = Field(
        default=1,
        ge=1,
        description="Number of candidates to measure in one forward pass. Each candidate takes the memory of one "
        "sequence.",
    )

    @property
    def rows(self) -> int:
        """Total number of rows of text that a candidate is measured on."""
        return self.documents


class LongFactorSearch(ShortFactorSearch):
    """Search settings for the factors of a longer context."""

    short_penalty: Annotated[float, OBJECTIVE] = Field(
        default=0.0,
        ge=0,
        description="Weight of a penalty on candidates whose loss at the model's present context length is higher than "
        "the loss with its present RoPE. 0: no penalty.",
    )

    space: Annotated[SpaceName, SPACE] = Field(
        default=ALL_PAIRS,
        description="Search space: all-pairs (LongRoPE: a factor of its own for each pair) or critical-dimension "
        "(LongRoPE2: only from a critical pair on, which is searched too; the pairs before it follow from its "
        "factor).",
    )
    objective: Annotated[Literal["perplexity", "needle"], OBJECTIVE] = Field(
        default="perplexity",
        description="Loss to minimise: perplexity (loss of all tokens) or needle (loss of the answers to questions "
        "about numbers hidden in the text).",
    )

    @model_validator(mode="before")
    @classmethod
    def _algorithm_of_space(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("space") == CRITICAL_DIMENSION:
            return {"algorithm": "evolution", **values}
        return values

    @model_validator(mode="after")
    def _is_searched_by(self) -> LongFactorSearch:
        if self.space == CRITICAL_DIMENSION and self.algorithm != "evolution":
            raise ValueError(
                f"algorithm {self.algorithm} cannot search the space {CRITICAL_DIMENSION}, because its coordinates are "
                "offsets to factors and have no place for the critical pair; use algorithm evolution"
            )
        return self

    @property
    def rows(self) -> int:
        return self.documents * (2 if self.short_penalty else 1)


class SearchSettings(LongFactorSearch):
    """Settings of one search on a model in memory."""

    group: ClassVar[str | None] = COMPUTATION.group

    held_out: Annotated[Count, OBJECTIVE] = Field(
        default=5,
        ge=0,
        description="Maximum number of sequences, from other documents, to measure the result on.",
    )
    start_tokens: Annotated[StartTokens, SPACE] = Field(
        default=(0,),
        description='Number of initial tokens whose RoPE stays unscaled, or "search" to try the numbers in the '
        "LongRoPE paper. Only 0 can be stored in a model's config.json.",
    )
    attention_factor: Annotated[float | None, SPACE] = Field(
        default=None,
        description="Attention factor (multiplier of cos and sin) of all candidates. Default: the formula of the "
        "LongRoPE paper.",
    )
    prefill_chunk: Length | None = Field(
        default=None,
        description="Number of tokens per forward pass. Fewer tokens take less memory. Default: a whole sequence.",
    )
    seed: Annotated[Seed, ALGORITHM] = Field(
        default=0, description="Random seed of the texts and of the algorithm."
    )
    dtype: Dtype = "auto"
    device: Device = "auto"

    @model_validator(mode="after")
    def _can_be_stored(self) -> SearchSettings:
        if self.space == CRITICAL_DIMENSION and self.start_tokens != (0,):
            raise ValueError(
                f"the space {CRITICAL_DIMENSION} has no start tokens, got {','.join(map(str, self.start_tokens))}; use "
                f"start_tokens 0, or the space {ALL_PAIRS}"
            )
        return self

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
    target_length: Annotated[Length, Option(name="--to")] = Field(
        description=f"{TARGET_LENGTH} {SHORT_FACTORS}"
    )
    text: str = Field(default="embedded:validation", description=f"Documents to measure on: {DOCUMENTS}.")
    settings: SearchSettings = SearchSettings()
    out: FilePath | None = Field(
        default=None,
        description="File for the factor table (.json), with a log next to it. Default: write nothing.",
    )
    resume: bool = Field(default=False, description="Resume from the log next to the factor table.")

    @property
    def log(self) -> Path | None:
        """The log of losses, a JSON Lines file; None if nothing is written."""
        return None if self.out is None else self.out.with_suffix(".jsonl")
