"""Factor tables: JSON files with rescale factors, the checkpoint they belong to, and their origin."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ropewalk.data.read.files import read_text
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_text
from ropewalk.io.results import Result
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


class Point(_Strict):
    """Objective of one candidate as a perplexity (None if infinite), and the forwards spent when it was reached."""

    forwards: int
    objective: float | None


class SearchRecord(_Strict):
    """Settings and course of a search.

    Attributes:
        objective: the loss that the search minimised: ``perplexity`` (the loss of all tokens) or ``needle`` (the loss
            of the answers to questions about hidden numbers).
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


TABLES = (".csv", ".txt")
BORDERS = 2
"""Number of integers that files of the algorithm ``dim_piece_mono`` contain before the factors."""


@dataclass(frozen=True)
class ImportedFactors(Result):
    """A factor table imported from a CSV or a config.

    Attributes:
        factors: the table.
        notes: what the import ignored in the source, one sentence each.
        file: file that the table was written to; None if it was not written.
    """

    factors: Factors
    notes: tuple[str, ...] = ()
    file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The table, the notes and the file as JSON values."""
        file = None if self.file is None else str(self.file)
        return {**self.factors.model_dump(mode="json"), "notes": list(self.notes), "file": file}


def import_factors(
    source: str,
    model: str | None = None,
    target_length: int | None = None,
    start_tokens: int = 0,
    out: Path | None = None,
) -> ImportedFactors:
    """Import a CSV written by the LongRoPE code, or the factors of a published config, as a factor table.

    Args:
        source: CSV file, or a config.json, model folder or Hub id with longrope factors.
        model: checkpoint that the factors belong to; required for a CSV. None for a config means its own model.
        target_length: tokens that the factors are for; required for a CSV, while a config states its own.
        start_tokens: number of initial tokens whose RoPE angles stay unscaled; a CSV does not record it.
        out: file to write the table to; None writes nothing.

    Raises:
        RopewalkError: if the source has no factors or its factors do not fit the model, or ``out`` already exists.
    """
    if out is not None and out.suffix != ".json":
        raise RopewalkError(f"--out {out}: the name of a factor table must end in .json")
    if out is not None and out.exists():
        raise RopewalkError(f"{out} already exists; remove it or give another --out")
    if is_config(source):
        if start_tokens:
            raise RopewalkError(
                f"--start-tokens {start_tokens} applies to a CSV only; omit --start-tokens for a config"
            )
        imported = from_config(checkpoint(source), target_length)
        if model is not None:
            imported = for_model(imported, checkpoint(model))
    elif model is None or target_length is None:
        missing, option = ("model", "--model") if model is None else ("target length", "--to")
        raise RopewalkError(f"{source} does not state the {missing} of its factors; give {option}")
    else:
        path = Path(source).expanduser()
        imported = from_csv(path, checkpoint(model), target_length, start_tokens)
    if out is not None:
        write_factors(out, imported.factors)
    return replace(imported, file=out)


def is_config(source: str) -> bool:
    """Whether a source is a config (JSON file, model folder or Hub id) rather than a CSV."""
    path = Path(source).expanduser()
    # What is neither a file nor named like a table is taken for a Hub id.
    return path.suffix == ".json" or not (path.is_file() or path.suffix in TABLES)


def from_csv(source: Path, model: ModelConfig, target_length: int, start_tokens: int = 0) -> ImportedFactors:
    """Factor table from a CSV, for a checkpoint.

    Args:
        source: file with one factor per line (``np.savetxt(file, factors, delimiter="\\n")``), one comma-separated
            row, or one such row per layer. Two integers before the factors are the piece borders of
            ``dim_piece_mono`` and are ignored.
        model: checkpoint that the factors belong to.
        target_length: tokens; up to the original length of a longrope checkpoint the factors are short factors.
        start_tokens: n̂ that the factors were searched with; the file does not record it.

    Raises:
        RopewalkError: if the file cannot be read, a value is not a number above 0, the number of factors differs from
            the number of rotary pairs, or layers have different factors.
    """
    current = method_of(model)
    pairs = current.rotary_dim // 2
    goal = goal_of(current, model.trained_length, target_length)
    factors, notes = _the_factors(source, _rows(source), pairs)
    if start_tokens and goal.short:
        raise RopewalkError(
            f"--start-tokens {start_tokens} applies to long factors only, but factors for {target_length} tokens "
            f"(within the original length of {goal.original_length}) are short factors; omit --start-tokens"
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
    """Factor table from a config with RoPE type longrope (formerly ``su``).

    Args:
        source: the config.
        target_length: tokens; None for the config's own length, which is the only one allowed.

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
            f"the factors in {source.model} are for {length} tokens, not for {target_length}; omit --to"
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
    """An imported table reassigned to another checkpoint.

    Raises:
        RopewalkError: if that checkpoint has other frequencies or another original length.
    """
    current = method_of(model)
    # For its checks alone; the method itself is not needed.
    imported.factors.method(current, model.trained_length)
    named = imported.factors.model.model_copy(update={"name": model.model})
    return replace(imported, factors=imported.factors.model_copy(update={"model": named}))


def checkpoint(model: str) -> ModelConfig:
    """Config of a checkpoint: a folder, a JSON file, a Hub id or ``embedded``."""
    from ropewalk.data.read.embedded import resolve_model

    path = resolve_model(model)
    return read_model_config(model, None if path == model else path)


def method_of(config: ModelConfig) -> RopeMethod:
    """RoPE method of a checkpoint's full-attention layers, which factors apply to.

    Raises:
        RopewalkError: if no layer of the checkpoint has full attention.
    """
    return config.full_attention_rope


def _rows(path: Path) -> list[list[float]]:
    """Numbers of a file, one list per line."""
    lines = read_text(path).splitlines()
    rows = [[_factor(path, word) for word in line.split(",")] for line in lines if line.strip()]
    if not rows:
        raise RopewalkError(f"{path} is empty; give a file with one factor per rotary pair")
    return rows


def _factor(path: Path, word: str) -> float:
    try:
        value = float(word)
    # float() also reads nan and inf, which are refused in the same words.
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RopewalkError(
            f"{path} contains {word.strip()!r}, which is not a number; factors are numbers above 0"
        )
    return value


def _the_factors(path: Path, rows: list[list[float]], pairs: int) -> tuple[tuple[float, ...], list[str]]:
    """One factor per pair, and a note on each part of the file that was ignored."""
    notes: list[str] = []
    # A file with one number per line is one list, not one row per layer.
    values = [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows[0]
    if len(rows) > 1 and len(rows[0]) > 1:
        if any(row != rows[0] for row in rows):
            raise RopewalkError(
                f"{path} has {len(rows)} rows of factors that are not all equal; give one row for all layers of the "
                "model"
            )
        notes.append(f"{path.name} has {len(rows)} equal rows, one per layer; ropewalk used the first.")
    # LongRoPE's own files of this mode begin with two integers that are no factors.
    borders = values[:BORDERS]
    if len(values) == pairs + BORDERS and all(border.is_integer() and border >= 0 for border in borders):
        notes.append(
            f"{path.name} begins with the piece borders of dim_piece_mono, {borders[0]:g} and {borders[1]:g}; ropewalk "
            "ignored them."
        )
        values = values[BORDERS:]
    if len(values) != pairs:
        raise RopewalkError(
            f"{path} has {len(values)} factors, but the model has {pairs} rotary pairs; give one factor for each pair"
        )
    wrong = [value for value in values if value <= 0]
    if wrong:
        raise RopewalkError(f"{path} contains the factor {wrong[0]:g}; factors must be above 0")
    return tuple(values), notes
