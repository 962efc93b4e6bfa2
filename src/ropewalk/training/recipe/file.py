"""Read a recipe file with ``--set`` overrides into a Recipe; errors say what to write instead."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ropewalk.data.read.embedded import EMBEDDED
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import explain
from ropewalk.recipes import shipped_recipes
from ropewalk.training.recipe.other_names import OTHER_NAMES
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.recipe.stage import AS_A_FILE, Stage

MOST_VALUES = 100_000
"""Largest number of values in a recipe, with aliases expanded."""
MOST_DEPTH = 50
"""Largest nesting depth of brackets."""
MOST_SHOWN = 60
TOO_DEEP = "the YAML is nested too deeply; use fewer levels of lists and mappings"


def load_recipe(
    name: str | PathLike[str] | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()
) -> Recipe:
    """Read a recipe.

    Args:
        name: a YAML file, the name of a recipe that ropewalk ships, a mapping of the recipe's keys, or a recipe.
        overrides: assignments ``a.b=value`` with the value in YAML; ``stages.0.steps=20`` indexes into a list.

    Raises:
        RopewalkError: if the recipe is invalid; the message names the key, its value, and the nearest known key.
    """
    if isinstance(name, Recipe):
        return _overridden(_values_of(name), "recipe", overrides) if overrides else name
    if isinstance(name, Mapping):
        # As YAML has it, where an override needs lists and mappings that can be changed.
        return _overridden(_mutable(name), "recipe", overrides)
    if not isinstance(name, str | PathLike):
        raise RopewalkError(
            f"a recipe must be a file, the name of a shipped recipe, a mapping or a Recipe, not {type(name).__name__}"
        )
    path = Path(name)
    # With a YAML suffix it is always a file, so a mistyped path is not taken for the name of a shipped recipe.
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        shipped = shipped_recipes()
        if str(name) == EMBEDDED:
            raise RopewalkError(
                f"{EMBEDDED} is a model and no recipe; the recipe that trains this model is demo"
            )
        if str(name) not in shipped:
            raise RopewalkError(
                f"there is no recipe file {name}; give a file or one of the shipped recipes: {', '.join(shipped)}"
            )
        text = shipped[str(name)]
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RopewalkError(
                f"recipe {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
            ) from error
        except OSError as error:
            raise RopewalkError(f"cannot read recipe {path}: {error.strerror}") from error
    return parse_recipe(text, str(name), overrides)


def parse_recipe(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Parse a recipe from YAML text, with overrides as for :func:`load_recipe`; ``name`` is for error messages."""
    values = _yaml(text, f"recipe {name}")
    if not isinstance(values, dict):
        raise RopewalkError(f"recipe {name} must be a mapping of keys to values")
    return _overridden(values, f"recipe {name}", overrides)


def _overridden(values: dict[str, Any], what: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of these keys, which overrides change in place; ``what`` is for error messages."""
    for override in overrides:
        _override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        # A key of a stage may stand where no stage is.
        names = {key: f"stages.0.{key}" for key in Stage.model_fields} | OTHER_NAMES
        raise RopewalkError(f"{what}: {explain(error, Recipe, other_names=names)}") from error


def _yaml(text: str, what: str) -> Any:
    """Parse YAML.

    Args:
        text: YAML of a recipe, or of a value for ``--set``.
        what: description of the text for error messages.

    Raises:
        RopewalkError: if the text is not valid YAML, is nested too deeply or too large, or if a key is not a string or
            occurs twice.
    """
    try:
        return yaml.load(text, _StrictLoader)  # a SafeLoader
    except RopewalkError as error:
        raise RopewalkError(f"{what}: {error}") from error
    except RecursionError as error:
        raise RopewalkError(f"{what}: {TOO_DEEP}") from error
    except yaml.YAMLError as error:
        raise RopewalkError(f"{what} is not YAML: {_place_and_problem(error)}") from error


def _place_and_problem(error: yaml.YAMLError) -> str:
    """A parser's complaint in one line, without the excerpt of the text that its own message has."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader with unique string keys, and with limits on nesting and on expanded aliases."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # PyYAML's name
        # Check here, because the scanner's time is quadratic in the depth and the parser behind it is recursive.
        if self.flow_level >= MOST_DEPTH:
            raise RopewalkError(TOO_DEEP)
        super().fetch_flow_collection_start(TokenClass)

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        # Counted before anything is constructed: nested aliases expand a few lines to billions of values.
        if node is not None and _values_in(node, {}) > MOST_VALUES:
            raise RopewalkError(
                f"with all aliases expanded, there are more than {MOST_VALUES:,} values; use fewer aliases"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise RopewalkError(f"the key in line {line} is a list or a mapping; a key must be a string")
            # PyYAML alone would let the last of two equal keys win.
            if key.value in seen:
                raise RopewalkError(
                    f"the key {key.value} occurs twice, the second time in line {line}; remove one"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        # A RopewalkError is a ValueError, which the next clause would catch.
        except (RopewalkError, yaml.YAMLError):
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            # PyYAML raises these for impossible dates, numbers of 5,000 digits, and tags that do not match the value.
            raise RopewalkError(
                f"the value {str(node.value)[:MOST_SHOWN]!r} in line {node.start_mark.line + 1} is not a valid "
                f"{node.tag.rpartition(':')[2]}; if the value is text, put the value in quotes"
            ) from error
        # Escapes in YAML can write both; no path may contain a NUL, and no UTF-8 file a lone surrogate.
        if isinstance(value, str) and ("\0" in value or (not value.isascii() and not _is_utf8(value))):
            raise RopewalkError(
                f"the text {value[:MOST_SHOWN]!r} in line {node.start_mark.line + 1} contains a NUL character or an "
                "unpaired surrogate; remove it"
            )
        return value


# YAML 1.1 reads 1:30 as the number 90. These patterns leave it as text, which numeric keys refuse.
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
    "tag:yaml.org,2002:float": r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_StrictLoader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(f"(?:{_NUMBERS[tag]})$") if tag in _NUMBERS else pattern)
        for tag, pattern in resolvers
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _values_in(node: yaml.Node, known: dict[int, int]) -> int:
    """Number of values in a node, with aliases expanded.

    Raises:
        RopewalkError: if the node contains itself.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise RopewalkError(
                f"the alias in line {node.start_mark.line + 1} refers to a value that contains this alias; remove "
                "the alias"
            )
        return known[id(node)]
    # 0 marks a node that is still being counted: meeting it again means that it contains itself.
    known[id(node)] = 0
    below = node.value if isinstance(node, yaml.CollectionNode) else ()
    parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
    known[id(node)] = 1 + sum(_values_in(part, known) for part in parts)
    return known[id(node)]


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every value written out, so that later changes of defaults do not affect a repeated run."""
    return yaml.safe_dump(_values_of(recipe), sort_keys=False, allow_unicode=True)


def _values_of(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", context=AS_A_FILE)


def _mutable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _mutable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mutable(each) for each in value]
    return os.fspath(value) if isinstance(value, PathLike) else value


def override_value(text: str, option: str) -> Any:
    """Parse the YAML value of an option such as ``--set stages.0.steps``.

    Raises:
        RopewalkError: if it is not valid YAML.
    """
    return _yaml(text, f"the value of {option}")


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RopewalkError(f"--set needs key=value, got {override!r}")
    value = override_value(text, f"--set {key}")
    *parents, last = key.split(".")
    target: Any = values
    for part in parents:
        target = _child(target, part, override)
    if isinstance(target, list):
        target[_index(target, last, override)] = value
    elif isinstance(target, dict):
        target[last] = value
    else:
        raise RopewalkError(f"--set {override!r}: {'.'.join(parents)} is a value and has no keys")


def _child(target: Any, part: str, override: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, override)]
    if not isinstance(target, dict):
        raise RopewalkError(f"--set {override!r}: {target!r} is a plain value, so it has no key {part}")
    # A section that the file leaves out, or that is auto or null there, may still get keys.
    if target.get(part, "auto") in ("auto", None):
        target[part] = {}
    return target[part]


def _index(target: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(target):
        raise RopewalkError(
            f"--set {override!r}: there is no entry {part}; the list has {len(target)} entries, counted from 0"
        )
    return int(part)
