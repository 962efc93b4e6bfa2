"""Factor tables: JSON files with rescale factors, the checkpoint they belong to, and their origin."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ropewalk.data.read.files import read_text
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_text
from ropewalk.io.settings import explain
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import (
    Default,
    DynamicNtk,
    LongRope,
    Ntk,
    RopeMethod,
    longrope_attention_factor,
    unscaled_inv_freq,
)
from ropewalk.search.goal import TITLES, Goal, goal_of, rescale_factors
from ropewalk.search.space import ALL_PAIRS

FORMAT: Literal["ropewalk-factors/1"] = "ropewalk-factors/1"
LARGEST_NATS = math.log(sys.float_info.max)
"""Largest loss in nats whose perplexity fits a float64."""
SAME_FACTOR = 1e-6
"""Relative tolerance between attention factors: configs write them with six digits or more."""


class _Strict(BaseModel):
    # NaN and infinity are not JSON; an infinite perplexity is None.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FactorsModel(_Strict):
    """Checkpoint that factors belong to.

    Attributes:
        name: name or path of the checkpoint as the user wrote it.
        digest: SHA-256 of its weights and config from ``model_digest``; None for imported factors.
        rotary_dim: number of rotated dimensions per head.
        rope_theta: RoPE base.
        original_max_position_embeddings: ``T``, trained length before any extension by longrope, tokens.
    """

    name: str
    digest: str | None = None
    rotary_dim: int = Field(ge=2)
    rope_theta: float = Field(gt=1)
    original_max_position_embeddings: int = Field(ge=1)

    @classmethod
    def of(cls, name: str, goal: Goal, digest: str | None = None) -> FactorsModel:
        """Record of the checkpoint that a search with this goal runs on."""
        return cls(
            name=name,
            digest=digest,
            rotary_dim=goal.current.rotary_dim,
            rope_theta=goal.current.rope_theta,
            original_max_position_embeddings=goal.original_length,
        )


class Provenance(_Strict):
    """Origin of factors: a search, a CSV written by the LongRoPE code, or a published config."""

    kind: Literal["search", "csv", "config"]
    source: str


class Best(_Strict):
    """Best candidate of a search, with the perplexity of its objective."""

    objective: float
    rescale_factors: tuple[float, ...]
    start_tokens: int = 0


class CriticalPair(_Strict):
    """The critical pair of a search in LongRoPE2's space; pairs are counted from 0, the fastest.

    The critical dimension that :func:`~ropewalk.rope.theory.critical_dimension` counts is twice a critical pair.

    Attributes:
        found: first pair with a factor of its own; the factors before it follow from its factor.
        smallest, theoretical: first and last pair that the search could choose; in theory the last one is the critical
            pair.
    """

    found: int
    smallest: int
    theoretical: int

    def __str__(self) -> str:
        return (
            f"critical pair {self.found}, counted from 0, of {self.smallest} to {self.theoretical} (in theory "
            f"{self.theoretical}); critical dimension {2 * self.found} (in theory {2 * self.theoretical})"
        )


class Point(_Strict):
    """Objective of one candidate as a perplexity (None if infinite), and the forwards spent when it was reached."""

    forwards: int
    objective: float | None


class SearchRecord(_Strict):
    """Settings and course of a search.

    Attributes:
        objective: the loss that the search minimised: ``perplexity`` (the loss of all tokens) or ``needle`` (the loss
            of the answers to questions about hidden numbers).
        space: search space: ``all-pairs`` (LongRoPE) or ``critical-dimension`` (LongRoPE2).
        short_penalty: weight of a penalty on the loss at the trained length; 0 for none.
        algorithm, seed, budget, racing: the options of ``ropewalk search`` with these names.
        documents: number of rows that each candidate was measured on, including those for ``short_penalty``.
        text: source of the rows.
        documents_sha256: SHA-256 of the rows' token ids and labels.
        largest: largest factor that the search may choose.
        start_tokens: values of the start tokens n̂ that the search may choose from.
        device, dtype: device and dtype of the model during the search.
        candidates: number of candidates measured, including those that ``racing`` dropped before they were measured on
            all rows.
        ended_by: ``budget`` if the budget was spent, ``algorithm`` if the algorithm had no further candidates; None in
            older tables.
        seconds: wall-clock time of the run that completed the search.
    """

    objective: str
    space: str = ALL_PAIRS
    short_penalty: float = 0.0
    algorithm: str
    seed: int
    budget: int
    racing: bool
    documents: int
    text: str
    documents_sha256: str
    largest: float
    start_tokens: tuple[int, ...]
    device: str
    dtype: str
    candidates: int
    ended_by: Literal["budget", "algorithm"] | None = None
    seconds: float


class HeldOut(_Strict):
    """Perplexity of the factors found and of the baselines on held-out documents; None means infinite."""

    documents: int
    documents_sha256: str
    best: float | None
    baselines: dict[str, float | None]


class Factors(_Strict):
    """One factor table.

    Attributes:
        model: checkpoint that the factors belong to.
        target_length: context that the factors extend the model to, in tokens.
        long_factor: ``[pairs]`` factors for inputs longer than the original length (the trained length before any
            extension); None if the table has only short factors.
        short_factor: ``[pairs]`` factors for inputs up to the original length; None if the table has only long
            factors.
        start_tokens: n̂ of the long factors: number of initial tokens whose RoPE angles stay unscaled.
        attention_factor: multiplier of cos and sin, with which the factors were searched or published.
        critical_pair: critical pair of the long factors, if the search looked for one.
        provenance: origin of the factors: a search, a CSV file or a published config.
        best: best candidate of the search; None for imported factors.
        baselines: perplexity of each baseline (PI, NTK, YaRN) on the rows of the search; None means infinite. Empty for
            imported factors.
        baseline_factors: ``[pairs]`` factors of each baseline in the search; empty if not recorded.
        forwards: number of forward passes of the search; None for imported factors.
        history: value of the objective for each candidate that was measured on all rows, in the order of measurement.
        search: settings of the search; None for imported factors.
        held_out: perplexity of the best candidate and of the baselines on held-out rows; None if there were no such
            rows.
        versions: versions of the software that wrote the file.
    """

    format: Literal["ropewalk-factors/1"] = FORMAT
    model: FactorsModel
    target_length: int = Field(ge=1)
    long_factor: tuple[float, ...] | None = None
    short_factor: tuple[float, ...] | None = None
    start_tokens: int = Field(default=0, ge=0)
    attention_factor: float = Field(gt=0)
    critical_pair: CriticalPair | None = None
    provenance: Provenance
    best: Best | None = None
    baselines: dict[str, float | None] = {}
    baseline_factors: dict[str, tuple[float, ...]] = {}
    forwards: int | None = None
    history: tuple[Point, ...] = ()
    search: SearchRecord | None = None
    held_out: HeldOut | None = None
    versions: dict[str, str] = {}

    @model_validator(mode="after")
    def _has_factors(self) -> Factors:
        if self.long_factor is None and self.short_factor is None:
            raise ValueError("long_factor and short_factor are both missing; give at least one")
        pairs = self.model.rotary_dim // 2
        lists = {"long_factor": self.long_factor, "short_factor": self.short_factor}
        lists |= {f"baseline_factors.{name}": factors for name, factors in self.baseline_factors.items()}
        for name, factors in lists.items():
            if factors is None:
                continue
            if len(factors) != pairs:
                raise ValueError(
                    f"{name} must have one number for each of {pairs} rotary pairs, got {len(factors)}"
                )
            if min(factors) <= 0:
                raise ValueError(f"{name} must contain only numbers above 0, got {min(factors):g}")
        return self

    def method(self, current: RopeMethod, trained_length: int) -> LongRope:
        """RoPE method of a checkpoint with these factors; a factor list that the table lacks stays the checkpoint's.

        Args:
            current: RoPE method of the checkpoint.
            trained_length: tokens that the checkpoint is trained for.

        Raises:
            RopewalkError: if the factors are for other frequencies or another original length, or the table has only
                short factors and they were found with another attention factor than the checkpoint's.
        """
        # NTK scaling is unscaled RoPE with a larger base, which factors can extend.
        plain = current.as_default() if isinstance(current, Ntk) else current
        if not isinstance(plain, Default | DynamicNtk | LongRope):
            raise RopewalkError(
                f"the checkpoint uses {current.name} scaling, but factors apply only to unscaled RoPE or longrope; "
                "give the unscaled checkpoint"
            )
        original = plain.original_max_position_embeddings if isinstance(plain, LongRope) else trained_length
        here = {
            "rotary_dim": plain.rotary_dim,
            "rope_theta": plain.rope_theta,
            "original_max_position_embeddings": original,
        }
        for key, value in here.items():
            if getattr(self.model, key) != value:
                raise RopewalkError(
                    f"the factors are for {self.model.name}, which has {key} {getattr(self.model, key):g}, but this "
                    f"model has {key} {value:g}; give factors for this model"
                )
        ones = (1.0,) * (plain.rotary_dim // 2)
        kept = plain if isinstance(plain, LongRope) else None
        long, start_tokens, attention = self.long_factor, self.start_tokens, self.attention_factor
        if long is None:
            if kept is None:
                raise RopewalkError(
                    f"the table has only short factors, and this checkpoint has no long factors (its RoPE is "
                    f"{current.name}); give either a longrope checkpoint or a table with long factors"
                )
            # A config has one attention factor for both lists, and factors are optimal only with the one of the search.
            if not math.isclose(attention, kept.attention_factor, rel_tol=SAME_FACTOR):
                raise RopewalkError(
                    f"the table has only short factors, which belong to the attention factor {attention:.6g}, but "
                    f"the checkpoint has the attention factor {kept.attention_factor:.6g}; search short factors on "
                    "this checkpoint"
                )
            long, start_tokens, attention = kept.long_factor, kept.start_tokens, kept.attention_factor
        # Without a short list anywhere, factors of 1 leave texts within the original length as they are.
        short = self.short_factor or (kept.short_factor if kept else ones)
        return LongRope(plain.rotary_dim, plain.rope_theta, short, long, attention, original, start_tokens)

    def lists(self) -> dict[str, Sequence[float]]:
        """Factor lists of the table by their label in figures."""
        lists = {"long": self.long_factor, "short": self.short_factor}
        known: dict[str, Sequence[float]] = {
            name: factors for name, factors in lists.items() if factors is not None
        }
        # A search finds one list; an imported table may have both.
        return {"found": next(iter(known.values()))} if self.search and len(known) == 1 else known

    def periods(self) -> list[float]:
        """Period of each pair ``[pairs]`` before any scaling, in tokens."""
        inv_freq = unscaled_inv_freq(self.model.rotary_dim, self.model.rope_theta)
        return [2 * math.pi / each for each in inv_freq.tolist()]

    def rule_factors(self) -> dict[str, tuple[float, ...]]:
        """Factors of the baselines by title.

        If the table does not record them, they are those of PI, NTK and YaRN for the target length; a table of short
        factors then has none.
        """
        if self.baseline_factors:
            return {TITLES.get(name, name): factors for name, factors in self.baseline_factors.items()}
        model = self.model
        original = model.original_max_position_embeddings
        if self.target_length <= original:
            return {}
        # Imported tables record no baselines; those of an unscaled model follow from the lengths alone.
        goal = goal_of(Default(model.rotary_dim, model.rope_theta), original, self.target_length)
        return {TITLES[name]: rescale_factors(method) for name, method in goal.baselines().items()}

    def shown(self) -> dict[str, Any]:
        """The table as JSON values, with the baselines' factors, remarks, and whether a config can store it."""
        return {
            **self.model_dump(mode="json"),
            "rules": {name.lower(): list(factors) for name, factors in self.rule_factors().items()},
            "fits_config": self.start_tokens == 0,
            "remarks": self.remarks(),
        }

    def remarks(self) -> list[str]:
        """Properties of the factors that affect their use, one sentence each."""
        notes = []
        if self.start_tokens:
            notes.append(
                f"The RoPE angles of the first {self.start_tokens} tokens stay unscaled (start tokens). ropewalk "
                "applies this, but a transformers config cannot store it, so an export to a plain config is refused; "
                "search with --start-tokens 0 for factors that can be exported."
            )
        for name in ("long_factor", "short_factor"):
            factors = getattr(self, name)
            if factors is not None:
                notes += _oddities(name, factors)
        original = self.model.original_max_position_embeddings
        if self.long_factor is not None and self.target_length > original:
            published = longrope_attention_factor(self.target_length / original, original)
            if not math.isclose(self.attention_factor, published, rel_tol=SAME_FACTOR):
                notes.append(
                    f"The attention factor {self.attention_factor:.6g} is not the published √(1 + ln s / ln T) = "
                    f"{published:.6g}: transformers reads it from the config as it is, vLLM only from short_mscale and "
                    "long_mscale, which ropewalk export writes."
                )
        return notes

    def cautions(self) -> list[str]:
        """Warnings if a baseline is better than the factors found, or no held-out rows tell; one sentence each."""
        notes = []
        judged = self.held_out
        own = _better(self.best.objective if self.best else None, self.baselines)
        other = None if judged is None else _better(judged.best, judged.baselines)
        if own is not None:
            # An algorithm that ran out of candidates gains nothing from a budget; it needs a larger space.
            more = (
                "a larger cap of the factors"
                if self.search and self.search.ended_by == "algorithm"
                else "a larger budget"
            )
            notes.append(
                f"Note: on the search rows themselves, {TITLES.get(own, own)} is better than the factors found; use "
                f"it, or search with {more}."
            )
        elif judged is not None and other is not None:
            why = "the search overfitted its own rows; search with more documents"
            if self.search and self.search.short_penalty:
                why = "held-out rows exclude the short penalty, so this may be the cost of preserving the short context"
            notes.append(
                f"Note: on held-out rows, {TITLES.get(other, other)} has perplexity "
                f"{perplexity_text(judged.baselines[other])} and the factors found {perplexity_text(judged.best)}: "
                f"{why}."
            )
        if self.search is not None and judged is None:
            notes.append(
                "Note: no text was held out, so the quality of the factors on other text is unknown."
            )
        return notes


def _better(best: float | None, baselines: Mapping[str, float | None]) -> str | None:
    """Name of the lowest baseline if it is lower than ``best``; a value of None means infinite."""
    lowest = min(baselines, key=lambda name: _number(baselines[name]), default=None)
    return lowest if lowest is not None and _number(baselines[lowest]) < _number(best) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def perplexity_text(value: float | None) -> str:
    """Perplexity with five significant digits; ∞ for None."""
    return "∞" if value is None else f"{value:#.5g}" if value < 1e5 else f"{value:.2e}"


def _oddities(name: str, factors: tuple[float, ...]) -> list[str]:
    """Properties that only imported factors can have: decreasing factors, and factors below 1."""
    notes = []
    falls = [pair for pair, (before, after) in enumerate(pairwise(factors), start=1) if after < before]
    if falls:
        notes.append(
            f"{name} is not ascending: pair {falls[0]} has {factors[falls[0]]:g} after {factors[falls[0] - 1]:g}"
            f"{f', and {len(falls) - 1} more pairs decrease' if len(falls) > 1 else ''}."
        )
    below = [factor for factor in factors if factor < 1]
    if below:
        notes.append(
            f"{name} has {len(below)} factor{'s' if len(below) > 1 else ''} below 1 (the smallest is {min(below):g}), "
            "so these pairs rotate faster than in training."
        )
    return notes


def perplexity(nats: float) -> float | None:
    """Perplexity ``e^nats``; None if it overflows float64."""
    return math.exp(nats) if nats < LARGEST_NATS else None


def read_factors(path: Path) -> Factors:
    """Read a factor table from a file.

    Raises:
        RopewalkError: if the file cannot be read or is not a valid factor table; the message names the mistake.
    """
    text = read_text(path)
    try:
        values: Any = parse_json(text)
    except ValueError as error:
        raise RopewalkError(
            f"{path} is not a factor table, because it cannot be read as JSON: {error}"
        ) from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise RopewalkError(
            f"{path} is not a ropewalk factor table: its format is {found!r}, expected {FORMAT!r}; convert a CSV or a "
            "config to a table with ropewalk search import"
        )
    try:
        return Factors.model_validate(values)
    except ValidationError as error:
        raise RopewalkError(f"factor table {path}: {explain(error, Factors)}") from error


def write_factors(path: Path, factors: Factors) -> None:
    """Write a factor table to a file atomically."""
    write_text(path, factors.model_dump_json(indent=2) + "\n")


def checkpoint(model: str) -> ModelConfig:
    """Config of a checkpoint: a folder, a JSON file, a Hub id or ``embedded``."""
    from ropewalk.data.read.embedded import resolve_model

    path = resolve_model(model)
    return read_model_config(model, None if path == model else path)
