"""From a recipe file and ``--set`` overrides to a Recipe, with errors that say what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import explain
from ropewalk.recipes import shipped_recipes
from ropewalk.training.recipe.recipe import Recipe

MOST_VALUES = 100_000
"""Of a recipe, with what its aliases repeat."""
MOST_DEPTH = 50
"""Brackets within each other."""
MOST_SHOWN = 60
TOO_DEEP = "it is nested too deeply: no key of a recipe needs so many brackets"


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name: a YAML file, or the name of a recipe that ropewalk ships.
        overrides: ``a.b=value`` each, the value in YAML; ``stages.0.steps=20`` reaches into lists.

    Raises:
        RopewalkError: naming the key, its value, and the nearest known key.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        shipped = shipped_recipes()
        if str(name) not in shipped:
            raise RopewalkError(f"no recipe file {name}; shipped recipes are {', '.join(shipped)}")
        text = shipped[str(name)]
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
    values = _yaml(text, f"recipe {name}")
    if not isinstance(values, dict):
        raise RopewalkError(f"recipe {name} must be a mapping of keys to values")
    for override in overrides:
        _override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RopewalkError(f"recipe {name}: {explain(error, Recipe)}") from error


def _yaml(text: str, what: str) -> Any:
    """The value that YAML stands for.

    Args:
        text: of a recipe, or of a value for ``--set``.
        what: it is, for messages.

    Raises:
        RopewalkError: if it is no YAML, nested too deeply or too large, or a key is no text or stands twice.
    """
    try:
        return yaml.load(text, _StrictLoader)  # a SafeLoader
    except RopewalkError as error:
        raise RopewalkError(f"{what}: {error}") from error
    except RecursionError as error:
        raise RopewalkError(f"{what}: {TOO_DEEP}") from error
    except yaml.YAMLError as error:
        raise RopewalkError(f"{what} is not YAML: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader for recipes: every key is a text that stands once, and aliases cannot fill the memory."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # PyYAML's name
        # Before the scanner, whose time grows with the square of the depth, and the recursion after it.
        if self.flow_level >= MOST_DEPTH:
            raise RopewalkError(TOO_DEEP)
        super().fetch_flow_collection_start(TokenClass)

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _values_in(node, {}) > MOST_VALUES:
            raise RopewalkError(
                f"it stands for more than {MOST_VALUES:,} values; write it without so many aliases"
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise RopewalkError(f"the key in line {line} is a list or a mapping; a key is a word")
            if key.value in seen:
                raise RopewalkError(f"the key {key.value} stands twice, again in line {line}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (RopewalkError, yaml.YAMLError):
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            # What PyYAML raises for a day that no month has, a number of 5,000 digits, or a tag that does not fit.
            raise RopewalkError(
                f"the value {str(node.value)[:MOST_SHOWN]!r} in line {node.start_mark.line + 1} is no "
                f"{node.tag.rpartition(':')[2]}; quote it if it is meant as text"
            ) from error
        if isinstance(value, str) and ("\0" in value or (not value.isascii() and not _is_utf8(value))):
            raise RopewalkError(
                f"the text {value[:MOST_SHOWN]!r} in line {node.start_mark.line + 1} holds a NUL or half of a character"
            )
        return value


# YAML 1.1 reads 1:30 as ninety; here it is a text, which no number's key takes.
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
    """How many values a node stands for, each alias counted as all that it repeats.

    Raises:
        RopewalkError: if it holds itself.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise RopewalkError(f"the alias in line {node.start_mark.line + 1} stands for what it is part of")
        return known[id(node)]
    known[id(node)] = 0
    below = node.value if isinstance(node, yaml.CollectionNode) else ()
    parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
    known[id(node)] = 1 + sum(_values_in(part, known) for part in parts)
    return known[id(node)]


def dump_recipe(recipe: Recipe) -> str:
    """YAML with every value written out, so that a run can be repeated under later defaults."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RopewalkError(f"--set takes key=value, got {override!r}")
    value = _yaml(text, f"the value of --set {key}")
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
