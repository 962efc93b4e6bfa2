"""Factor tables from elsewhere: the CSV files that the paper's code writes and ships, and published configs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.models.config import ModelConfig
from ropewalk.models.config_file import read_model_config
from ropewalk.rope import LongRope, RopeMethod
from ropewalk.search.factors import Factors, FactorsModel, Provenance
from ropewalk.search.goal import Goal, goal_of

TABLES = (".csv", ".txt")
BORDERS = 2
"""Whole numbers that files of the algorithm ``dim_piece_mono`` have before their factors."""


@dataclass(frozen=True)
class Imported:
    """A table, and what was done to the source to get it, a sentence each."""

    factors: Factors
    notes: tuple[str, ...]


def is_config(source: str) -> bool:
    """Whether a source is a config (a JSON file, a model folder, a hub id), and not a table of numbers."""
    path = Path(source).expanduser()
    return path.suffix == ".json" or not (path.is_file() or path.suffix in TABLES)


def from_csv(source: Path, model: ModelConfig, target_length: int, start_tokens: int = 0) -> Imported:
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
            f"start tokens belong to the long factors, and {target_length} tokens are short ones"
        )
    table = Factors(
        model=_model(model.model, goal),
        target_length=target_length,
        long_factor=None if goal.short else factors,
        short_factor=factors if goal.short else None,
        start_tokens=start_tokens,
        attention_factor=goal.attention_factor,
        provenance=Provenance(kind="csv", source=source.name),
    )
    return Imported(table, tuple(notes))


def from_config(source: ModelConfig, target_length: int | None = None) -> Imported:
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
            f"{source.model} has no rescale factors: its RoPE is {method.name}, and not longrope"
        )
    length = source.trained_length
    if target_length not in (None, length):
        raise RopewalkError(
            f"the factors in {source.model} are for {length} tokens, and not for {target_length}"
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
    return Imported(table, ())


def for_model(imported: Imported, model: ModelConfig) -> Imported:
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
    return config.one_rope("rescale factors are one list for all layers")


def _model(name: str, goal: Goal) -> FactorsModel:
    return FactorsModel(
        name=name,
        rotary_dim=goal.current.rotary_dim,
        rope_theta=goal.current.rope_theta,
        original_max_position_embeddings=goal.original_length,
    )


def _rows(path: Path) -> list[list[float]]:
    """The numbers of a file, line by line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RopewalkError(f"cannot read factors from {path} ({error})") from error
    rows = [[_factor(path, word) for word in line.split(",")] for line in lines if line.strip()]
    if not rows:
        raise RopewalkError(f"{path} is empty, and no table of factors")
    return rows


def _factor(path: Path, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RopewalkError(f"{path} holds {word.strip()!r}, which is no number; factors are numbers above 0")
    return value


def _the_factors(path: Path, rows: list[list[float]], pairs: int) -> tuple[tuple[float, ...], list[str]]:
    """One factor a pair, and what was left out."""
    notes: list[str] = []
    # One number a line is one row.
    values = [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows[0]
    if len(rows) > 1 and len(rows[0]) > 1:
        if any(row != rows[0] for row in rows):
            raise RopewalkError(
                f"{path} has {len(rows)} rows that differ: factors for each layer, and a model has one list for all"
            )
        notes.append(f"{path.name} has {len(rows)} equal rows, one a layer: the first was taken.")
    borders = values[:BORDERS]
    if len(values) == pairs + BORDERS and all(border.is_integer() and border >= 0 for border in borders):
        notes.append(
            f"{path.name} begins with the whole numbers {borders[0]:g} and {borders[1]:g}, the piece borders of "
            "dim_piece_mono, which were left out."
        )
        values = values[BORDERS:]
    if len(values) != pairs:
        raise RopewalkError(f"{path} has {len(values)} factors, and the model has {pairs} rotary pairs")
    wrong = [value for value in values if value <= 0]
    if wrong:
        raise RopewalkError(f"{path} holds the factor {wrong[0]:g}; factors are numbers above 0")
    return tuple(values), notes
