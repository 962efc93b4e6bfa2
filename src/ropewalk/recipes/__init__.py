"""Recipes that ship with the program, one YAML file each."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib import resources

from ropewalk.errors import RopewalkError

SCHEMA = "recipe.schema.json"
"""File with the JSON Schema of recipes, which ``scripts/recipe_reference.py`` writes."""
SCHEMA_LINE = (
    "# yaml-language-server: "
    f"$schema=https://raw.githubusercontent.com/ropewalk/ropewalk/main/src/ropewalk/recipes/{SCHEMA}\n"
)
"""First line of a recipe, by which editors find the schema."""


@dataclass(frozen=True)
class RecipeHead:
    """What the comment at the top of a shipped recipe says.

    Attributes:
        model: the models that it is for.
        goal: what it makes of them.
        summary: what it does, its first sentence.
    """

    model: str
    goal: str
    summary: str


def head_of(text: str) -> RecipeHead:
    """Read the head of a shipped recipe: the line ``# Model: … Goal: ….``, and the sentence after it.

    Raises:
        ValueError: if the line is missing.
    """
    lines = text.removeprefix(SCHEMA_LINE).splitlines()
    found = re.fullmatch(r"# Model: (.+)\. Goal: (.+)\.", lines[0])
    if found is None:
        raise ValueError(f"a shipped recipe begins with its model and goal, not with {lines[0]!r}")
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    comment = " ".join(line.lstrip("# ").strip() for line in lines[1:end])
    return RecipeHead(found[1], found[2], comment.partition(". ")[0].rstrip("."))


def shipped_recipes() -> dict[str, str]:
    """The YAML text of each recipe by its name, in the order of the names."""
    files = sorted(
        (entry for entry in resources.files(__name__).iterdir() if entry.name.endswith(".yaml")),
        key=lambda entry: entry.name,
    )
    return {entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8") for entry in files}


def schema_text() -> str:
    """The JSON Schema of recipes."""
    return resources.files(__name__).joinpath(SCHEMA).read_text(encoding="utf-8")


def recipe_text(name: str) -> str:
    """The YAML text of one recipe.

    Raises:
        RopewalkError: if ropewalk ships no recipe of this name; the message suggests the nearest name, or lists all.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        meant = f"did you mean {near[0]}?" if near else f"choose from {', '.join(recipes)}"
        raise RopewalkError(f"ropewalk has no recipe {name!r}; {meant}")
    return recipes[name]
