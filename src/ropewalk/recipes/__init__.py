"""Recipes that ship with the program, one YAML file each."""

from __future__ import annotations

from importlib import resources


def shipped_recipes() -> dict[str, str]:
    """The YAML text of each recipe by its name, in the order of the names."""
    files = sorted(
        (entry for entry in resources.files(__name__).iterdir() if entry.name.endswith(".yaml")),
        key=lambda entry: entry.name,
    )
    return {entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8") for entry in files}
