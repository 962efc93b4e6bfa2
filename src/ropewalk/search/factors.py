"""Factor tables: a JSON file that holds rescale factors, for which checkpoint they are, and how they came to be."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_text
from ropewalk.rope import Default, DynamicNtk, LongRope, Ntk, RopeMethod, longrope_attention_factor
from ropewalk.search.goal import TITLES

if TYPE_CHECKING:
    from ropewalk.search.run import Found

FORMAT: Literal["ropewalk-factors/1"] = "ropewalk-factors/1"
LARGEST_NATS = math.log(sys.float_info.max)
SAME_FACTOR = 1e-6
"""Relative: attention factors that differ by less are the same one, written with six or more digits."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FactorsModel(_Strict):
    """The checkpoint that factors belong to.

    Attributes:
        name: as the user gave it.
        digest: sha256 of its weights and config as ``model_identity`` gives it; None for imported factors.
        rotary_dim: rotated dimensions of a head.
        rope_theta: its base.
        original_max_position_embeddings: ``T``, tokens before any extension by longrope.
    """

    name: str
    digest: str | None = None
    rotary_dim: int = Field(ge=2)
    rope_theta: float = Field(gt=1)
    original_max_position_embeddings: int = Field(ge=1)


class Provenance(_Strict):
    """Where factors come from: a search, a CSV of the paper's code, or a published config."""

    kind: Literal["search", "csv", "config"]
    source: str


class Best(_Strict):
    """The result of a search: perplexity (of the objective), and where."""

    objective: float
    rescale_factors: tuple[float, ...]
    start_tokens: int = 0


class Point(_Strict):
    """The objective of a candidate, None where it is infinite, and what the search had cost by then."""

    forwards: int
    objective: float | None


class SearchRecord(_Strict):
    """What was searched and how.

    Attributes:
        objective: ``perplexity`` or ``needle``, with ``short_penalty`` if there was one.
        short_penalty: weight of the short-context penalty; 0 for none.
        algorithm, seed, budget, racing: of the search.
        documents: that each candidate was measured on.
        text: source of the documents.
        documents_sha256: of their token ids.
        largest: cap of the factors.
        start_tokens: n̂ that were searched.
        device, dtype: that it ran in.
        candidates: how many there were.
        ended_by: what ended it: the budget, or the algorithm that had nothing more to ask.
        seconds: of the run that ended it.
    """

    objective: str
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
    """Perplexity on documents that the search did not see, of the factors found and the baselines; None: infinite."""

    documents: int
    documents_sha256: str
    best: float | None
    baselines: dict[str, float | None]


class Factors(_Strict):
    """One factor table.

    Attributes:
        model: whose.
        target_length: tokens that the factors are for.
        long_factor: beyond the original length; None where only short ones are known.
        short_factor: up to the original length; None where only long ones are known.
        start_tokens: n̂ of the long factors.
        attention_factor: that they were found or published with.
        provenance: where they come from.
        best, baselines, forwards, history, search, held_out: of a search; None or empty for imported factors.
        baseline_factors: λ by pair of the baselines, as the search ran them; empty where they are not known.
        versions: of the software that made the file.
    """

    format: Literal["ropewalk-factors/1"] = FORMAT
    model: FactorsModel
    target_length: int = Field(ge=1)
    long_factor: tuple[float, ...] | None = None
    short_factor: tuple[float, ...] | None = None
    start_tokens: int = Field(0, ge=0)
    attention_factor: float = Field(gt=0)
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
            raise ValueError("neither long_factor nor short_factor is there")
        pairs = self.model.rotary_dim // 2
        lists = {"long_factor": self.long_factor, "short_factor": self.short_factor}
        lists |= {f"baseline_factors.{name}": factors for name, factors in self.baseline_factors.items()}
        for name, factors in lists.items():
            if factors is None:
                continue
            if len(factors) != pairs:
                raise ValueError(f"{name} has {len(factors)} numbers for {pairs} rotary pairs")
            if any(factor <= 0 for factor in factors):
                raise ValueError(f"{name} has a number that is not above 0")
        return self

    def method(self, current: RopeMethod, trained_length: int) -> LongRope:
        """The method that a checkpoint gets from these factors; what they do not say stays as it is there.

        Args:
            current: method of the checkpoint.
            trained_length: tokens that it is trained for.

        Raises:
            RopewalkError: if they are for a model with other frequencies or another original length, or are short
                ones that were found under another attention factor than the checkpoint has.
        """
        plain = current.as_default() if isinstance(current, Ntk) else current
        if not isinstance(plain, Default | DynamicNtk | LongRope):
            raise RopewalkError(
                f"factors on a checkpoint that is {current.name}-scaled are ambiguous; they are for unscaled RoPE or "
                "longrope"
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
                    f"the factors are for a model with {key} {getattr(self.model, key):g} ({self.model.name}), and "
                    f"this one has {value:g}"
                )
        ones = (1.0,) * (plain.rotary_dim // 2)
        kept = plain if isinstance(plain, LongRope) else None
        long, start_tokens, attention = self.long_factor, self.start_tokens, self.attention_factor
        if long is None:
            if kept is None:
                raise RopewalkError(
                    "these are short factors alone, for a checkpoint that has long ones; this one is "
                    f"{current.name}"
                )
            if not math.isclose(attention, kept.attention_factor, rel_tol=SAME_FACTOR):
                raise RopewalkError(
                    f"these are short factors alone, found under the attention factor {attention:.6g}, and this "
                    f"checkpoint has {kept.attention_factor:.6g} at every length; search short factors on it"
                )
            long, start_tokens, attention = kept.long_factor, kept.start_tokens, kept.attention_factor
        short = self.short_factor or (kept.short_factor if kept else ones)
        return LongRope(plain.rotary_dim, plain.rope_theta, short, long, attention, original, start_tokens)

    def remarks(self) -> list[str]:
        """What to know before these factors are used, a sentence each."""
        told = []
        if self.start_tokens:
            told.append(
                f"The first {self.start_tokens} tokens keep their angles (start tokens), for which a transformers "
                "config has no field: ropewalk honours it, and an export to a plain config is refused; a search with "
                "--start-tokens 0 gives factors without."
            )
        for name in ("long_factor", "short_factor"):
            factors = getattr(self, name)
            if factors is not None:
                told += _oddities(name, factors)
        original = self.model.original_max_position_embeddings
        if self.long_factor is not None and self.target_length > original:
            published = longrope_attention_factor(self.target_length / original, original)
            if not math.isclose(self.attention_factor, published, rel_tol=SAME_FACTOR):
                told.append(
                    f"The attention factor {self.attention_factor:.6g} is not the published √(1 + ln s / ln T) = "
                    f"{published:.6g}: transformers reads it from the config as it is, vLLM only from short_mscale and "
                    "long_mscale, which ropewalk export writes."
                )
        return told

    def cautions(self) -> list[str]:
        """Where the factors are no better than what needs no search, or that is not known, a sentence each."""
        told = []
        judged = self.held_out
        own = _better(self.best.objective if self.best else None, self.baselines)
        other = None if judged is None else _better(judged.best, judged.baselines)
        if own is not None:
            more = (
                "a larger cap of the factors"
                if self.search and self.search.ended_by == "algorithm"
                else "a larger budget"
            )
            told.append(
                f"Mind: on the search rows themselves {TITLES.get(own, own)} is better than the factors found; use "
                f"it, or search with {more}."
            )
        elif judged is not None and other is not None:
            why = "what the search gained belongs to its own rows; search with more documents"
            if self.search and self.search.short_penalty:
                why = "held-out rows count no penalty, so this may be what the short context costs"
            told.append(
                f"Mind: on held-out rows {TITLES.get(other, other)} has {perplexity_text(judged.baselines[other])} and "
                f"the factors found {perplexity_text(judged.best)}: {why}."
            )
        if self.search is not None and judged is None:
            told.append(
                "Mind: nothing was held out, so what the factors are worth on other text is not known."
            )
        return told


def _better(best: float | None, baselines: Mapping[str, float | None]) -> str | None:
    """The lowest baseline, if it is lower than the best; None stands for infinite."""
    lowest = min(baselines, key=lambda name: _number(baselines[name]), default=None)
    return lowest if lowest is not None and _number(baselines[lowest]) < _number(best) else None


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def perplexity_text(value: float | None) -> str:
    """A perplexity in five digits; ∞ for None."""
    return "∞" if value is None else f"{value:#.5g}" if value < 1e5 else f"{value:.2e}"


def _oddities(name: str, factors: tuple[float, ...]) -> list[str]:
    """What a search would not have made: published tables have such factors too."""
    told = []
    falls = [pair for pair, (before, after) in enumerate(pairwise(factors), start=1) if after < before]
    if falls:
        told.append(
            f"{name} does not ascend: pair {falls[0]} has {factors[falls[0]]:g} after {factors[falls[0] - 1]:g}"
            f"{f', and {len(falls) - 1} more fall' if len(falls) > 1 else ''}."
        )
    below = [factor for factor in factors if factor < 1]
    if below:
        told.append(
            f"{name} has {len(below)} factor{'s' if len(below) > 1 else ''} below 1 (the smallest is {min(below):g}), "
            "which turn faster than the model was trained with."
        )
    return told


def perplexity(nats: float) -> float | None:
    """``e^nats``; None where that is no finite number."""
    return math.exp(nats) if nats < LARGEST_NATS else None


def found_factors(
    found: Found,
    model: FactorsModel,
    *,
    objective: str,
    text: str,
    documents: tuple[int, str],
    held_out: tuple[int, str] | None,
    device: str,
    dtype: str,
    versions: Mapping[str, str],
) -> Factors:
    """The table of a search.

    Args:
        found: what it found.
        model: searched on.
        objective: ``perplexity`` or ``needle``.
        text: source of the documents, as the user gave it.
        documents, held_out: how many rows, and the sha256 of their token ids.
        device, dtype: that it ran in.
        versions: of the software.
    """
    goal, settings, result = found.goal, found.settings, found.result
    best = result.best.candidate
    nats = found.held_out
    judged = None
    if nats is not None and held_out is not None:
        named = {name: perplexity(each) for name, each in nats.items() if name != "best"}
        judged = HeldOut(
            documents=held_out[0],
            documents_sha256=held_out[1],
            best=perplexity(nats["best"]),
            baselines=named,
        )
    reached = perplexity(result.best.objective)
    if reached is None:
        raise RopewalkError(f"the best objective, {result.best.objective:g} nats a token, is no perplexity")
    return Factors(
        model=model,
        target_length=goal.target_length,
        long_factor=None if goal.short else best.rescale_factors,
        short_factor=best.rescale_factors if goal.short else None,
        start_tokens=best.start_tokens,
        attention_factor=goal.attention_factor,
        provenance=Provenance(kind="search", source=f"{settings.algorithm}, seed {settings.seed}, on {text}"),
        best=Best(objective=reached, rescale_factors=best.rescale_factors, start_tokens=best.start_tokens),
        baselines={name: perplexity(each) for name, each in found.baselines.items()},
        baseline_factors=goal.baseline_factors(),
        forwards=result.forwards,
        history=tuple(
            Point(forwards=trace.forwards, objective=perplexity(trace.measured.objective))
            for trace in result.traces
        ),
        search=SearchRecord(
            objective=objective,
            short_penalty=settings.short_penalty,
            algorithm=settings.algorithm,
            seed=settings.seed,
            budget=settings.budget,
            racing=settings.racing,
            documents=documents[0],
            text=text,
            documents_sha256=documents[1],
            largest=goal.space(settings.start_tokens, settings.largest).largest,
            start_tokens=settings.start_tokens,
            device=device,
            dtype=dtype,
            candidates=result.candidates,
            ended_by="budget" if result.spent else "algorithm",
            seconds=round(found.seconds, 1),
        ),
        held_out=judged,
        versions=dict(versions),
    )


def read_factors(path: Path) -> Factors:
    """A factor table.

    Raises:
        RopewalkError: if there is no such file, or it is none; the message says what is wrong in it.
    """
    try:
        values: Any = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RopewalkError(f"cannot read factors from {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RopewalkError(f"{path} is no JSON, so no factor table ({error})") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise RopewalkError(
            f"{path} is no factor table of ropewalk: its format is {found!r} and not {FORMAT!r}; import a CSV or a "
            "config with ropewalk search import"
        )
    try:
        return Factors.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the table"
        raise RopewalkError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from error


def write_factors(path: Path, factors: Factors) -> None:
    """Write a factor table, whole or not at all."""
    write_text(path, factors.model_dump_json(indent=2) + "\n")
