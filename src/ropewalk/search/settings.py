"""How to search for rescale factors: what the command, a recipe and the Python API share."""

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
"""What the user writes for all start tokens of the paper."""

WHAT, SPACE, HOW = Option(group="What"), Option(group="Where to search"), Option(group="How")


def _start_tokens(value: Any) -> Any:
    """A number as the only choice, or all of the paper's list."""
    if value == ANY_START_TOKENS:
        return START_TOKENS
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"{value!r} is neither a number of tokens from 0 on nor {ANY_START_TOKENS}")
        value = int(value)
    return (value,) if isinstance(value, int) else value


StartTokens = Annotated[
    tuple[int, ...],
    BeforeValidator(_start_tokens),
    Option(metavar=f"NUMBER|{ANY_START_TOKENS}", text=lambda found: ",".join(map(str, found))),
]
"""Numbers of start tokens n̂ to choose from."""


def check_budget(budget: int, candidates: int, rows: int) -> None:
    """Raise if a budget does not pay for the candidates that a search begins with.

    Args:
        budget: forward passes.
        candidates: different ones.
        rows: that each is measured on.
    """
    needed = candidates * rows
    if budget < needed:
        raise RopewalkError(
            f"a budget of {budget} forwards does not pay for the {candidates} candidate{'s' if candidates > 1 else ''} "
            f"that a search begins with, on {rows} documents each; give {needed} or more, or fewer documents"
        )


class ShortFactorSearch(Settings):
    """How factors are searched for, whatever they are for."""

    on_resume: ClassVar[OnResume | None] = OnResume("fixed", "it decides a search of the run")

    documents: Annotated[Count, WHAT] = Field(
        5, ge=1, description="Rows of text that candidates are measured on."
    )
    largest: Annotated[float | None, SPACE] = Field(
        None,
        ge=SMALLEST,
        description="Largest factor; 1.25 times the extension if not given, or half of the largest long factor for "
        "short ones.",
    )
    algorithm: Annotated[AlgorithmName, HOW] = Field(
        DEFAULT_ALGORITHM,
        description="Search algorithm: cma-es, which measured best, or the paper's evolution.",
    )
    budget: Annotated[Count, HOW] = Field(
        500, ge=1, description="Forward passes of candidates: one candidate on one row each."
    )
    racing: Annotated[bool, HOW] = Field(
        True, description="Drop candidates that are clearly behind after their first rows."
    )
    batch: Annotated[Count, FREE, HOW] = Field(1, ge=1, description="Candidates in one forward pass.")

    @property
    def rows(self) -> int:
        """Rows of text that a candidate is measured on, all in all."""
        return self.documents


class LongFactorSearch(ShortFactorSearch):
    """How factors for a longer context are searched for."""

    short_penalty: Annotated[float, WHAT] = Field(
        0.0,
        ge=0,
        description="Weight of the loss added at the trained length, in nats a nat; 0 for none.",
    )

    @property
    def rows(self) -> int:
        return self.documents * (2 if self.short_penalty else 1)


class SearchSettings(LongFactorSearch):
    """One search on a model in memory."""

    group: ClassVar[str | None] = "How"

    objective: Annotated[Literal["perplexity", "needle"], WHAT] = Field(
        "perplexity",
        description="perplexity, of all tokens; needle, of answers that lie far back in the text.",
    )
    held_out: Annotated[Count, WHAT] = Field(
        5, ge=0, description="Most rows of other documents to judge the result by."
    )
    start_tokens: Annotated[StartTokens, SPACE] = Field(
        (0,),
        description="First tokens that keep their angles: a number, or search; a config can hold 0 alone.",
    )
    attention_factor: Annotated[float | None, SPACE] = Field(
        None, description="Attention factor of all candidates; the published formula if not given."
    )
    prefill_chunk: Length | None = Field(
        None, description="Tokens of a pass: 4096, 8k; a row at once if not given."
    )
    seed: Seed = Field(0, description="Random seed of the search.")
    dtype: Dtype = "auto"
    device: Device = "auto"

    def within(self, length: int) -> SearchSettings:
        """The same with the start tokens that leave something of a length to scale, where there is a choice."""
        if len(self.start_tokens) == 1:
            return self
        return self.model_copy(
            update={"start_tokens": tuple(each for each in self.start_tokens if each < length)}
        )


class SearchConfig(Settings):
    """One search: on which model, for which length, on which text, and how."""

    model: str = Field(description="A checkpoint's folder, a Hub id, or embedded.")
    target_length: Length = Field(
        description="Tokens to search for: 2048, 32k, 1M; up to the original length of a longrope checkpoint its "
        "short factors."
    )
    text: str = Field("embedded:validation", description="Documents: as for ropewalk data pack.")
    settings: SearchSettings = SearchSettings()
    out: FilePath | None = Field(
        None, description="The factor table (.json); a log grows beside it. Nothing is written if not given."
    )
    resume: bool = Field(False, description="Go on with the log beside the table.")

    @property
    def log(self) -> Path | None:
        """Where losses are kept, line by line."""
        return None if self.out is None else self.out.with_suffix(".jsonl")
