"""JSON Schema of recipes as people write them, by which an editor completes and checks keys."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from ropewalk.training.recipe.recipe import Recipe

KEYWORDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""Limits of numbers that pydantic writes under its own names where a validator of ours comes before."""


class _AsWritten(GenerateJsonSchema):
    """Takes into the schema what validators accept besides a field's own type."""

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        inner = super().function_before_schema(schema)
        written = getattr(schema["function"]["function"], "written", ())
        return {"anyOf": [inner, *map(dict, written)]} if written else inner

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        found = super().model_schema(schema)
        mapping, *others = found.pop("anyOf", [{}])
        return {"anyOf": [{**mapping, **found}, *others]} if others else {**mapping, **found}


def recipe_schema() -> dict[str, Any]:
    """The schema, of draft 2020-12, which is a file beside the recipes that ropewalk ships.

    It accepts every recipe that :func:`~ropewalk.training.recipe.file.parse_recipe` accepts, except for parameters of
    RoPE methods that other packages register. Not every mistake that is refused there breaks the schema.
    """
    found: dict[str, Any] = _renamed(Recipe.model_json_schema(schema_generator=_AsWritten))
    return {"$schema": GenerateJsonSchema.schema_dialect, **found, "title": "Recipe of ropewalk"}


def _renamed(part: Any) -> Any:
    if isinstance(part, list):
        return [_renamed(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        KEYWORDS.get(key, key) if isinstance(value, int | float) else key: _renamed(value)
        for key, value in part.items()
    }
