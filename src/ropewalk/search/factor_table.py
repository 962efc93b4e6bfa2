"""Factor tables: JSON files of rescale factors, with their checkpoint and their origin."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_text
from ropewalk.io.results import Result
from ropewalk.models.config import ModelConfig
from ropewalk.models.config_file import read_model_config
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

    @classmethod
    def of(cls, name: str, goal: Goal, digest: str | None = None) -> FactorsModel:
        """The checkpoint that a search with this goal begins with."""
        return cls(
            name=name,
            digest=digest,
            rotary_dim=goal.current.rotary_dim,
            rope_theta=goal.current.rope_theta,
            original_max_position_embeddings=goal.original_length,
        )


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
            if any(factor <= 0 for factor in factors):
                raise ValueError(f"{name} must contain only numbers above 0")
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
                f"the checkpoint uses {current.name} scaling, but factors apply only to unscaled RoPE or longrope; "
                "give the checkpoint before it was scaled"
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
                    f"the factors are for a model with {key} {getattr(self.model, key):g} ({self.model.name}), but "
                    f"this model has {value:g}"
                )
        ones = (1.0,) * (plain.rotary_dim // 2)
        kept = plain if isinstance(plain, LongRope) else None
        long, start_tokens, attention = self.long_factor, self.start_tokens, self.attention_factor
        if long is None:
            if kept is None:
                raise RopewalkError(
                    "the table has only short factors, which need a checkpoint with long factors; this checkpoint's "
                    f"RoPE is {current.name}"
                )
            if not math.isclose(attention, kept.attention_factor, rel_tol=SAME_FACTOR):
                raise RopewalkError(
                    f"the table has only short factors, found with the attention factor {attention:.6g}, but the "
                    f"checkpoint has {kept.attention_factor:.6g}; search short factors on this checkpoint"
                )
            long, start_tokens, attention = kept.long_factor, kept.start_tokens, kept.attention_factor
        short = self.short_factor or (kept.short_factor if kept else ones)
        return LongRope(plain.rotary_dim, plain.rope_theta, short, long, attention, original, start_tokens)

    def lists(self) -> dict[str, Sequence[float]]:
        """The factor lists that a table has, by what people call them."""
        lists = {"long": self.long_factor, "short": self.short_factor}
        known: dict[str, Sequence[float]] = {
            name: factors for name, factors in lists.items() if factors is not None
        }
        return {"found": next(iter(known.values()))} if self.search and len(known) == 1 else known

    def periods(self) -> list[float]:
        """``[pairs]`` tokens that each pair takes for a full turn, before any scaling."""
        inv_freq = unscaled_inv_freq(self.model.rotary_dim, self.model.rope_theta)
        return [2 * math.pi / each for each in inv_freq.tolist()]

    def rule_factors(self) -> dict[str, tuple[float, ...]]:
        """Factors of what the search had to beat, as it ran them, by what people call them.

        A table that does not say them gets those of PI, NTK and YaRN from the original to the target length, and none
        up to the original length.
        """
        if self.baseline_factors:
            return {TITLES.get(name, name): factors for name, factors in self.baseline_factors.items()}
        model = self.model
        original = model.original_max_position_embeddings
        if self.target_length <= original:
            return {}
        goal = goal_of(Default(model.rotary_dim, model.rope_theta), original, self.target_length)
        return {TITLES[name]: rescale_factors(method) for name, method in goal.baselines().items()}

    def shown(self) -> dict[str, Any]:
        """The table as JSON values, with its rules' factors, whether a plain config can hold it, and remarks."""
        return {
            **self.model_dump(mode="json"),
            "rules": {name.lower(): list(factors) for name, factors in self.rule_factors().items()},
            "fits_config": self.start_tokens == 0,
            "remarks": self.remarks(),
        }

    def remarks(self) -> list[str]:
        """What to know before these factors are used, a sentence each."""
        told = []
        if self.start_tokens:
            told.append(
                f"The RoPE angles of the first {self.start_tokens} tokens stay unscaled (start tokens). ropewalk "
                "applies this, but a transformers config cannot store it, so an export to a plain config is refused; "
                "search with --start-tokens 0 for factors that can be exported."
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
                f"Note: on the search rows themselves, {TITLES.get(own, own)} is better than the factors found; use "
                f"it, or search with {more}."
            )
        elif judged is not None and other is not None:
            why = "the search overfitted its own rows; search with more documents"
            if self.search and self.search.short_penalty:
                why = "held-out rows exclude the short penalty, so this may be the cost of preserving the short context"
            told.append(
                f"Note: on held-out rows, {TITLES.get(other, other)} has perplexity "
                f"{perplexity_text(judged.baselines[other])} and the factors found {perplexity_text(judged.best)}: "
                f"{why}."
            )
        if self.search is not None and judged is None:
            told.append("Note: no text was held out, so the quality of the factors on other text is unknown.")
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
            f"{name} is not ascending: pair {falls[0]} has {factors[falls[0]]:g} after {factors[falls[0] - 1]:g}"
            f"{f', and {len(falls) - 1} more pairs decrease' if len(falls) > 1 else ''}."
        )
    below = [factor for factor in factors if factor < 1]
    if below:
        told.append(
            f"{name} has {len(below)} factor{'s' if len(below) > 1 else ''} below 1 (the smallest is {min(below):g}), "
            "so these pairs rotate faster than in training."
        )
    return told


def perplexity(nats: float) -> float | None:
    """``e^nats``; None where that is no finite number."""
    return math.exp(nats) if nats < LARGEST_NATS else None


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
        raise RopewalkError(f"{path} is not a factor table, because it is not JSON: {error}") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise RopewalkError(
            f"{path} is not a ropewalk factor table: its format is {found!r}, expected {FORMAT!r}; import a CSV or a "
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


TABLES = (".csv", ".txt")
BORDERS = 2
"""Whole numbers that files of the algorithm ``dim_piece_mono`` have before their factors."""


@dataclass(frozen=True)
class ImportedFactors(Result):
    """A table that was made of something else.

    Attributes:
        factors: the table.
        notes: what was done to the source to get it, a sentence each.
        file: that it lies in; None where it was not written.
    """

    factors: Factors
    notes: tuple[str, ...] = ()
    file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The table, the notes, and where it lies."""
        file = None if self.file is None else str(self.file)
        return {**self.factors.model_dump(mode="json"), "notes": list(self.notes), "file": file}


def import_factors(
    source: str,
    model: str | None = None,
    target_length: int | None = None,
    start_tokens: int = 0,
    out: Path | None = None,
) -> ImportedFactors:
    """A factor table of a CSV that the paper's code wrote, or of the factors in a published config.

    Args:
        source: a CSV file, or a config.json, model folder or Hub id with longrope factors.
        model: whose factors they are; needed for a CSV; a config is of its own model if None.
        target_length: tokens that they are for; needed for a CSV, and a config states it itself.
        start_tokens: first tokens that keep their angles; a CSV does not say.
        out: file that the table is written to, if any.

    Raises:
        RopewalkError: if the source holds no factors, or none for this model; or a file is in the way.
    """
    if out is not None and out.suffix != ".json":
        raise RopewalkError(f"--out {out}: the name of a factor table must end in .json")
    if out is not None and out.exists():
        raise RopewalkError(f"{out} already exists; remove it or give another --out")
    if is_config(source):
        if start_tokens:
            raise RopewalkError(f"--start-tokens {start_tokens} applies to a CSV only; omit it for a config")
        imported = from_config(checkpoint(source), target_length)
        if model is not None:
            imported = for_model(imported, checkpoint(model))
    elif model is None or target_length is None:
        missing = "--model" if model is None else "--to"
        raise RopewalkError(f"{source} contains only numbers; give {missing}")
    else:
        path = Path(source).expanduser()
        imported = from_csv(path, checkpoint(model), target_length, start_tokens)
    if out is not None:
        write_factors(out, imported.factors)
    return replace(imported, file=out)


def is_config(source: str) -> bool:
    """Whether a source is a config (a JSON file, a model folder, a hub id), and not a table of numbers."""
    path = Path(source).expanduser()
    return path.suffix == ".json" or not (path.is_file() or path.suffix in TABLES)


def from_csv(source: Path, model: ModelConfig, target_length: int, start_tokens: int = 0) -> ImportedFactors:
    """The factors of a CSV, for a checkpoint.

    Args:
        source: one factor a line (``np.savetxt(file, factors, delimiter="\\n")``), one row with commas between, or
            such a row for every layer. Two whole numbers before the factors are the piece borders of
            ``dim_piece_mono``, which are no part of them.
        model: whose factors they are.
        target_length: tokens; up to the original length of a longrope checkpoint they are its short factors.
        start_tokens: n̂ that they were searched with; the file does not say.

    Raises:
        RopewalkError: if the file cannot be read, a value is no positive number, the count is not that of the
            checkpoint's rotary pairs, or layers have different factors.
    """
    current = method_of(model)
    pairs = current.rotary_dim // 2
    goal = goal_of(current, model.trained_length, target_length)
    factors, notes = _the_factors(source, _rows(source), pairs)
    if start_tokens and goal.short:
        raise RopewalkError(
            f"start tokens apply to long factors only, and {target_length} tokens are within the original length; omit "
            "them"
        )
    table = Factors(
        model=FactorsModel.of(model.model, goal),
        target_length=target_length,
        long_factor=None if goal.short else factors,
        short_factor=factors if goal.short else None,
        start_tokens=start_tokens,
        attention_factor=goal.attention_factor,
        provenance=Provenance(kind="csv", source=source.name),
    )
    return ImportedFactors(table, tuple(notes))


def from_config(source: ModelConfig, target_length: int | None = None) -> ImportedFactors:
    """The factors of a config of type longrope (also spelled ``su``): both lists, its lengths and attention factor.

    Args:
        source: as read.
        target_length: tokens, if the user states them; must be the config's.

    Raises:
        RopewalkError: if the config has no factors, or is for another length.
    """
    method = method_of(source)
    if not isinstance(method, LongRope):
        raise RopewalkError(
            f"{source.model} has no rescale factors: its RoPE is {method.name}, not longrope; give a longrope config"
        )
    length = source.trained_length
    if target_length not in (None, length):
        raise RopewalkError(
            f"the factors in {source.model} are for {length} tokens, not for {target_length}; omit the length"
        )
    table = Factors(
        model=FactorsModel(
            name=source.model,
            rotary_dim=method.rotary_dim,
            rope_theta=method.rope_theta,
            original_max_position_embeddings=method.original_max_position_embeddings,
        ),
        target_length=length,
        long_factor=method.long_factor,
        short_factor=method.short_factor,
        attention_factor=method.attention_factor,
        provenance=Provenance(kind="config", source=source.model),
    )
    return ImportedFactors(table, ())


def for_model(imported: ImportedFactors, model: ModelConfig) -> ImportedFactors:
    """A table that is handed to another checkpoint.

    Raises:
        RopewalkError: if that one has other frequencies or another original length.
    """
    current = method_of(model)
    imported.factors.method(current, model.trained_length)
    named = imported.factors.model.model_copy(update={"name": model.model})
    return replace(imported, factors=imported.factors.model_copy(update={"model": named}))


def checkpoint(model: str) -> ModelConfig:
    """The config of a folder, of a JSON file, of a hub id, or of the embedded checkpoint."""
    from ropewalk.data.read.embedded import resolve_model

    path = resolve_model(model)
    return read_model_config(model, None if path == model else path)


def method_of(config: ModelConfig) -> RopeMethod:
    """The one RoPE method of a checkpoint.

    Raises:
        RopewalkError: if its layer types have methods of their own.
    """
    return config.full_attention_rope


def _rows(path: Path) -> list[list[float]]:
    """The numbers of a file, line by line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"cannot read factors from {path} ({error})") from error
    rows = [[_factor(path, word) for word in line.split(",")] for line in lines if line.strip()]
    if not rows:
        raise RopewalkError(f"{path} is empty; give a file with one factor per rotary pair")
    return rows


def _factor(path: Path, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RopewalkError(
            f"{path} contains {word.strip()!r}, which is not a number; factors are numbers above 0"
        )
    return value


def _the_factors(path: Path, rows: list[list[float]], pairs: int) -> tuple[tuple[float, ...], list[str]]:
    """One factor a pair, and what was left out."""
    notes: list[str] = []
    # One number a line is one row.
    values = [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows[0]
    if len(rows) > 1 and len(rows[0]) > 1:
        if any(row != rows[0] for row in rows):
            raise RopewalkError(
                f"{path} has {len(rows)} different rows, one per layer; a model needs one list for all layers"
            )
        notes.append(f"{path.name} has {len(rows)} equal rows, one per layer; ropewalk used the first.")
    borders = values[:BORDERS]
    if len(values) == pairs + BORDERS and all(border.is_integer() and border >= 0 for border in borders):
        notes.append(
            f"{path.name} begins with the piece borders of dim_piece_mono, {borders[0]:g} and {borders[1]:g}; ropewalk "
            "ignored them."
        )
        values = values[BORDERS:]
    if len(values) != pairs:
        raise RopewalkError(f"{path} has {len(values)} factors, but the model has {pairs} rotary pairs")
    wrong = [value for value in values if value <= 0]
    if wrong:
        raise RopewalkError(f"{path} contains the factor {wrong[0]:g}; factors must be above 0")
    return tuple(values), notes
