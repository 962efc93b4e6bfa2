"""The grid of an experiment: every combination of the varied values, each with every seed, as recipes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ropewalk.errors import RopewalkError
from ropewalk.experiments.cell_names import cell_names
from ropewalk.io.files import parse_json
from ropewalk.rope.methods.base import trainable_methods
from ropewalk.training import load_recipe
from ropewalk.training.recipe.file import override_value
from ropewalk.training.recipe.recipe import Recipe

# With the digest behind it, well below the 255 bytes that file systems allow for a name.
LONGEST_NAME = 80
REFUSED = {
    "seed": "give the number of seeds with --seeds",
    "output": "each run gets its own folder inside --out",
}
SCIENTIFIC = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}")
SMALLEST_BASE = 1000
"""Smallest number that is a base where the RoPE of a stage is expected; a smaller one may be meant as a factor."""
MOST_RUNS = 1000
"""Most runs of one grid; more is a mistake in --vary."""


@dataclass(frozen=True)
class Varied:
    """One key that a grid varies.

    Attributes:
        key: as the user wrote it, perhaps with ``*`` for every entry of a list.
        values: its values, the reference first.
    """

    key: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, text: str) -> Varied:
        """Parse ``KEY=VALUE,...``; a comma inside brackets or quotes belongs to the value.

        A number such as ``1e4``, which YAML reads as text, is a number. As RoPE of a stage, a number is a base.

        Raises:
            RopewalkError: if there is no key, fewer than two values, a value occurs twice, or a base is none.
        """
        key, separator, values = text.partition("=")
        if not separator or not key.strip():
            raise RopewalkError(f"--vary needs KEY=VALUE,VALUE, got {text!r}")
        # Read as one YAML list, so that YAML itself decides which commas separate values.
        found = override_value(f"[{values}]", f"--vary {key}")
        if not isinstance(found, list) or len(found) < 2:
            raise RopewalkError(
                f"--vary {text!r} has fewer than two values, so there is nothing to compare; separate values by commas"
            )
        found = [_rope_of(key.strip(), _with_numbers(value)) for value in found]
        # Compared as JSON, because 1, 1.0 and True are equal in Python but different values in a recipe.
        written = [json.dumps(value) for value in found]
        if twice := next((value for value in written if written.count(value) > 1), None):
            raise RopewalkError(f"--vary {text!r} has the value {twice} twice; give each value once")
        return cls(key.strip(), tuple(found))

    def assignments(self, value: Any, recipe: Mapping[str, Any]) -> list[str]:
        """Overrides that give the key a value in a recipe, one for each entry that ``*`` stands for."""
        keys: list[list[str]] = [[]]
        for part in self.key.split("."):
            if part != "*":
                keys = [[*key, part] for key in keys]
                continue
            keys = [[*key, str(n)] for key in keys for n in range(_length(recipe, key, self.key))]
        return [f"{'.'.join(key)}={json.dumps(value)}" for key in keys]


def _with_numbers(value: Any) -> Any:
    """The value with texts such as ``1e4`` as numbers, so that Python's 10000.0 makes the same comparison."""
    if isinstance(value, dict):
        return {key: _with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value


def _rope_of(key: str, value: Any) -> Any:
    """The value, or the RoPE with this base if the key is the RoPE of a stage and the value a number.

    Raises:
        RopewalkError: if the number may be a factor, or a base is the name of a method.
    """
    parts = key.split(".")
    if parts[-2:] == ["rope", "rope_theta"] and isinstance(value, str) and value in trainable_methods():
        raise RopewalkError(
            f"--vary {key}: {value!r} is a RoPE method and not a base; vary both with --vary "
            f"'{key.removesuffix('.rope_theta')}=1e4,{value}', in which a number is a base"
        )
    if parts[-1] != "rope" or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if value < SMALLEST_BASE:
        raise RopewalkError(
            f"--vary {key}: {value:g} may be a base or a factor; write {{method: theta, rope_theta: {value:g}}} or "
            f"{{method: yarn, factor: {value:g}}}"
        )
    return {"method": "theta", "rope_theta": value}


def _length(recipe: Mapping[str, Any], key: Sequence[str], written: str) -> int:
    """Number of entries of the list that ``*`` stands for."""
    value: Any = recipe
    for part in key:
        value = value[int(part)] if isinstance(value, list) else (value or {}).get(part)
    if not isinstance(value, list):
        raise RopewalkError(
            f"--vary {written}: * stands for the entries of a list, but {'.'.join(key)} is not a list"
        )
    return len(value)


@dataclass(frozen=True)
class Run:
    """One run of a grid.

    Attributes:
        cell: name of its cell, as tables and figures show it; its folder has a name of its own.
        seed: seed of the run.
        folder: output folder.
        recipe: its recipe.
    """

    cell: str
    seed: int
    folder: Path
    recipe: Recipe

    @property
    def file(self) -> Path:
        """The recipe file, beside the run's folder."""
        return self.folder.with_suffix(".yaml")

    @property
    def log(self) -> Path:
        """Log file of what the run printed, beside its folder."""
        return self.folder.with_suffix(".log")


@dataclass(frozen=True)
class Grid:
    """All runs of an experiment, cell by cell, the reference first.

    Attributes:
        recipe: name or file of the recipe.
        varied: the keys that vary.
        seeds: the seeds.
        runs: the runs.
        base: the recipe without what varies, for comparison with an earlier grid in the same folder.
    """

    recipe: str
    varied: tuple[Varied, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    base: Mapping[str, Any]

    @property
    def cells(self) -> list[str]:
        """Names of the cells, the reference first."""
        return list(dict.fromkeys(run.cell for run in self.runs))

    def record(self) -> dict[str, Any]:
        """JSON values that describe the grid."""
        return {
            "recipe": self.recipe,
            "base": self.base,
            "vary": {varied.key: list(varied.values) for varied in self.varied},
            "seeds": list(self.seeds),
        }


def read_grid(file: Path) -> Grid:
    """Read the grid of a comparison from the file in its folder that :meth:`Grid.record` is in.

    Raises:
        RopewalkError: if the file is damaged.
    """
    try:
        record = parse_json(file.read_text(encoding="utf-8"), strict=True)
        seeds = record["seeds"]
        vary = [f"{key}={json.dumps(values)[1:-1]}" for key, values in record["vary"].items()]
        base = {**record["base"], "seed": seeds[0], "output": str(file.parent)}
    except OSError as error:
        raise RopewalkError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RopewalkError(
            f"{file} is damaged ({error}); delete the file, and run the command of the comparison again"
        ) from error
    return make_grid(base, vary, len(seeds), (), file.parent)


def make_grid(
    recipe: str | Mapping[str, Any],
    vary: Sequence[str],
    seeds: int,
    overrides: Sequence[str],
    output: Path,
) -> Grid:
    """Build all recipes of a grid.

    Args:
        recipe: file or name of a shipped recipe, or the keys of one.
        vary: ``KEY=VALUE,...`` for each varied key.
        seeds: number of seeds; they count from the recipe's own.
        overrides: overrides for every cell.
        output: folder of the experiment.

    Raises:
        RopewalkError: if a recipe of the grid is not valid; the message names the value.
    """
    base = load_recipe(recipe, overrides)
    values = base.model_dump(mode="json")
    varied = tuple(Varied.parse(text) for text in vary)
    for each in varied:
        if each.key in REFUSED:
            raise RopewalkError(f"--vary cannot change the key {each.key!r}; {REFUSED[each.key]}")
        if [other.key for other in varied].count(each.key) > 1:
            raise RopewalkError(
                f"--vary {each.key} is given twice; give all values of this key in one --vary"
            )
    for number, stage in enumerate(base.stages):
        if stage.seed is not None and seeds > 1:
            raise RopewalkError(
                f"the recipe sets stages.{number}.seed to {stage.seed}, so the {seeds} runs of --seeds would have the "
                f"same seed in this stage; leave stages.{number}.seed out of the recipe, or give --seeds 1"
            )
    numbers = tuple(base.seed + n for n in range(seeds))
    combinations = list(itertools.product(*(each.values for each in varied)))
    if len(combinations) * seeds > MOST_RUNS:
        raise RopewalkError(
            f"--vary and --seeds give {len(combinations) * seeds:,} runs, but at most {MOST_RUNS:,} are allowed; give "
            "fewer values or seeds"
        )
    folders = _folder_names(varied, combinations)
    names = cell_names([each.key for each in varied], combinations, folders)
    runs = []
    for name, folder_name, combination in zip(names, folders, combinations, strict=True):
        assigned = [
            each
            for key, value in zip(varied, combination, strict=True)
            for each in key.assignments(value, values)
        ]
        for seed in numbers:
            folder = output / "cells" / folder_name / f"seed-{seed}"
            # Quoted, because an override is parsed as YAML and a path may contain its special characters.
            own = [f"seed={seed}", f"output={json.dumps(str(folder))}"]
            if not base.data.rows and base.data.cache is None:
                # All runs share packed rows: what does not vary is packed once, and is the same for all.
                own.append(f"data.cache={json.dumps(str(output / 'data'))}")
            try:
                runs.append(Run(name, seed, folder, load_recipe(recipe, [*overrides, *assigned, *own])))
            except RopewalkError as error:
                # The recipe alone was right.
                said = str(error).removeprefix(f"recipe {recipe}: ").replace("--set", "--vary")
                raise RopewalkError(f"--vary {' --vary '.join(assigned)}: {said}") from error
    fixed = {key: value for key, value in values.items() if key not in ("seed", "output")}
    return Grid(recipe if isinstance(recipe, str) else "recipe", varied, numbers, tuple(runs), fixed)


def _folder_names(varied: Sequence[Varied], combinations: Sequence[tuple[Any, ...]]) -> list[str]:
    """Names that are readable and safe as folders; a name that is too long or not unique ends in a digest."""
    lasts = [each.key.rpartition(".")[2] for each in varied]
    keys = [last if lasts.count(last) == 1 else each.key for last, each in zip(lasts, varied, strict=True)]
    plain = [
        ",".join(f"{key}={_word(value)}" for key, value in zip(keys, combination, strict=True))
        for combination in combinations
    ]
    # A folder named ".." would lie elsewhere, and a leading dash reads as an option.
    safe = [re.sub(r"[^A-Za-z0-9._=,+-]+", "-", name).strip("-.") for name in plain]
    found = []
    for name, combination in zip(safe, combinations, strict=True):
        # Different values may become equal once unsafe characters are replaced.
        if len(name) > LONGEST_NAME or safe.count(name) > 1:
            digest = hashlib.sha256(json.dumps(combination).encode()).hexdigest()[:8]
            name = f"{name[:LONGEST_NAME]}-{digest}"
        found.append(name)
    return found


def _word(value: Any) -> str:
    """A value as a word of a name."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0].strip("{} ")
