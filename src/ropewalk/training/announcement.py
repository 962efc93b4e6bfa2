"""What a run says before it begins."""

from __future__ import annotations

from ropewalk.evaluation.store import model_digest
from ropewalk.rope import RopeMethod
from ropewalk.rope.target import recommended_base
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.methods import origin_after, takes_recommended_base


def announcement(recipe: Recipe, chosen: Plan) -> list[str]:
    """The lines that a run begins with: model, engine, processes, stages, and what to know of factor tables."""
    told = " (auto)" if recipe.engine == "auto" else ""
    lines = [
        f"model {chosen.model}, trained for {chosen.trained_length} tokens",
        f"attention engine {chosen.engine}{told} on {chosen.device}, {chosen.precision}",
    ]
    if chosen.mesh.world_size > 1:
        told = " (auto)" if recipe.parallel == "auto" else ""
        lines.append(f"{chosen.mesh.world_size} processes: {chosen.mesh}{told}")
    origin: tuple[RopeMethod, int] | None = (chosen.rope, chosen.trained_length)
    for number, (stage, method) in enumerate(zip(recipe.stages, chosen.methods, strict=True), start=1):
        base = "a base yet to be chosen" if method is None else f"rope_theta {method.rope_theta:,.0f}"
        if stage.rope.search is not None:
            base = "factors yet to be searched for"
        training = f"{stage.steps} steps of {stage.rows_per_step} rows" if stage.steps else "no training"
        lines.append(
            f"stage {number}: {stage.context} tokens, {stage.rope.method} with {base}, "
            f"pattern {stage.pattern}, positions {stage.positions}, {training}"
        )
        if origin is not None and takes_recommended_base(stage.rope):
            reason = recommended_base(*origin, stage.context).reason
            lines.append(f"stage {number}: why this base: {reason}")
        if method is None:
            # What follows from a base that is yet to be chosen is not known.
            origin = None
        elif origin is not None:
            origin = origin_after(stage, method, origin)
        else:
            origin = None if takes_recommended_base(stage.rope) else (method, stage.context)
    return [*lines, *_remarks_on_tables(recipe, chosen)]


def _remarks_on_tables(recipe: Recipe, chosen: Plan) -> list[str]:
    """What to know of the factor tables that a recipe names, before they are trained with."""
    lines = []
    named = [(number, table) for number, table in enumerate(chosen.tables, start=1) if table is not None]
    own = model_digest(chosen.model) if any(table.model.digest for _, table in named) else None
    for number, table in named:
        if own is not None and table.model.digest not in (None, own):
            lines.append(
                f"stage {number}: the factors in {recipe.stages[number - 1].rope.factors} were found on another "
                f"checkpoint ({table.model.name}) with the same frequencies; they may not be the best for this one"
            )
    return lines
