"""Factor tables from a CSV that the LongRoPE code wrote, or from a published config."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.data.read.files import read_text
from ropewalk.errors import RopewalkError
from ropewalk.io.results import Result
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import (
    LongRope,
)
from ropewalk.search.factor_table import Factors, FactorsModel, Provenance, checkpoint, write_factors
from ropewalk.search.goal import goal_of

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
    current = model.full_attention_rope
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
    method = source.full_attention_rope
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
    current = model.full_attention_rope
    # For its checks alone; the method itself is not needed.
    imported.factors.method(current, model.trained_length)
    named = imported.factors.model.model_copy(update={"name": model.model})
    return replace(imported, factors=imported.factors.model_copy(update={"model": named}))


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
