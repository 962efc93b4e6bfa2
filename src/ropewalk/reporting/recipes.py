"""Show the recipes that ship with ropewalk, and the check of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.text import Text

from ropewalk.io.lengths import format_length
from ropewalk.recipes import RecipeHead
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import Part, ResultTable

if TYPE_CHECKING:
    from ropewalk.dry_run.check import RecipeCheck


def describe_recipes(heads: Mapping[str, RecipeHead]) -> Iterator[Part]:
    """The shipped recipes by model, one line on each with its goal."""
    for model in sorted({head.model for head in heads.values()}, key=str.casefold):
        yield Text(model)
        for name, head in heads.items():
            if head.model == model:
                yield Text(f"  {name}, {head.goal}: {head.summary}")
    yield ""
    yield Text(
        "`ropewalk recipe show NAME` prints one; save it to a file and edit it, or override keys with --set."
    )


def describe_check(result: RecipeCheck, name: str) -> Iterator[Part]:
    """Stages of a recipe, what a run would do here, and what is missing."""
    rows = tuple(
        (
            str(number),
            format_length(stage.context),
            stage.rope,
            stage.pattern,
            f"{stage.steps:,}",
            f"{stage.rows_per_step:,}",
            f"{stage.tokens:,}",
            f"{stage.learning_rate:g}",
        )
        for number, stage in enumerate(result.stages, start=1)
    )
    columns = ("stage", "context", "RoPE", "pattern", "steps", "rows per step", "tokens", "learning rate")
    yield ResultTable(
        f"{shown(name)}: {shown(result.model)}, {result.tokens:,} training tokens",
        columns,
        rows,
        text_columns=4,
    )
    yield ""
    for line in result.resolved or ():
        yield Text(line)
    for line in result.missing:
        yield Text(f"missing: {line}")
    for line in result.warnings:
        yield Text(f"warning: {line}")
    done = "The recipe is valid" if result.resolved is None else "The recipe is valid and fits the model"
    # Without them the command ends with an error that names what is missing.
    if result.ready:
        if result.resolved is not None:
            yield Text(
                f"memory: only a lower bound was compared; ropewalk plan {shown(name)} says what a step takes"
            )
        yield Text(f"{done}. Run it: ropewalk extend {shown(name)}")
