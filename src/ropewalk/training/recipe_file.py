"""From a recipe file and ``--set`` overrides to a Recipe, with errors that say what to write instead."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.training.recipe import Parallel, Recipe


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name: a YAML file, or the name of a recipe that ropewalk ships.
        overrides: ``a.b=value`` each, the value in YAML; ``stages.0.steps=20`` reaches into lists.

    Raises:
        RopewalkError: naming the key, its value, and the nearest known key.
    """
    path = Path(name)
    shipped = resources.files("ropewalk.recipes")
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        known = sorted(entry.name[:-5] for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
        if str(name) not in known:
            raise RopewalkError(f"no recipe file {name}; shipped recipes are {', '.join(known)}")
        text = (shipped / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RopewalkError(f"recipe {path} is not UTF-8 (byte {error.start})") from error
        except OSError as error:
            raise RopewalkError(f"cannot read recipe {path}: {error.strerror}") from error
    return parse_recipe(text, str(name), overrides)


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The same from YAML text; ``name`` is for error messages."""
    try:
        values = yaml.load(text, _UniqueKeys)  # a SafeLoader
    except yaml.YAMLError as error:
        raise RopewalkError(f"recipe {name} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise RopewalkError(f"recipe {name} must be a mapping of keys to values")
    for override in overrides:
        _override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RopewalkError(f"recipe {name}: {describe(error)}") from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice is an error and not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise RopewalkError(
                    f"the key {key.value} stands twice, again in line {key.start_mark.line + 1}"
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every value written out, so that a run can be repeated under later defaults."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe(error: ValidationError) -> str:
    """The first few problems of a validation error in one line."""
    return "; ".join(_problem(problem) for problem in error.errors()[:3])


def _problem(problem: Any) -> str:
    # Names with an underscore are our own steps on the way, not keys.
    location = [part for part in problem["loc"] if not str(part).startswith("_")]
    key = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        known = sorted(_fields_at(Recipe, location[:-1]))
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
        return f"unknown key {key}; {hint}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if key == "parallel" and problem["type"] == "literal_error":
        message += f" or a mapping of {', '.join(Parallel.model_fields)}"
    got = "" if isinstance(problem["input"], dict | list | BaseModel) else f", got {problem['input']!r}"
    return f"{key}: {message}{got}" if key else message


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Names of the fields of the model that a location in the recipe leads to."""
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else model_in(field.annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model among what an annotation allows, such as Mixture in ``Mixture | None``; None if there is none."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RopewalkError(f"--set takes key=value, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RopewalkError(f"--set {override!r}: the value is not YAML") from error
    *parents, last = key.split(".")
    target: Any = values
    for part in parents:
        target = _child(target, part, override)
    if isinstance(target, list):
        target[_index(target, last, override)] = value
    elif isinstance(target, dict):
        target[last] = value
    else:
        raise RopewalkError(f"--set {override!r}: {'.'.join(parents)} holds a value, not keys")


def _child(target: Any, part: str, override: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, override)]
    if not isinstance(target, dict):
        raise RopewalkError(f"--set {override!r}: there is nothing below {part}")
    return target.setdefault(part, {})


def _index(target: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(target):
        raise RopewalkError(f"--set {override!r}: {part} is no index into a list of {len(target)}")
    return int(part)
