"""``ropewalk extend``: extend a model's context by a recipe. This is the program's main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, print_json, resumable, run_context, show, show_result
from ropewalk.io.settings import COMMON, FACTOR_TABLE, RECIPE_NAME, FilePath, Option, Overrides
from ropewalk.recipes import shipped_recipes

AFTER_LOSS = (
    "resume from the last checkpoint with --resume, or run the same command again if nothing was trained yet"
)
"""What to do after a process of the run was lost; the end of the error message."""


def extend(
    recipe: Annotated[
        str,
        Field(description=f"{RECIPE_NAME}: {', '.join(shipped_recipes())}."),
    ],
    *,
    overrides: Annotated[Overrides, COMMON] = (),
    rope: Annotated[
        tuple[FilePath, ...],
        Option(metavar="FILE", repeated=True),
        Field(
            description=f"{FACTOR_TABLE}. The stage whose context length equals the table's target length uses the "
            "table."
        ),
    ] = (),
    resume: Annotated[
        bool,
        COMMON,
        Field(description="Resume the run in the recipe's output folder from its last checkpoint."),
    ] = False,
    from_stage: Annotated[
        int | None,
        Field(
            description="With --resume: train again from the start of this stage, counted from 1. The existing "
            "checkpoints and results of this and all later stages are moved to the subfolder earlier/ of the output "
            "folder. Default: continue from the last checkpoint."
        ),
    ] = None,
    until_stage: Annotated[
        int | None,
        Field(
            description="Stop after this stage, counted from 1; --resume continues with the next stage. Default: train "
            "all stages."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        COMMON,
        Field(
            description="Train nothing. Simulate one step of each stage, and show whether this machine has enough "
            "memory. `ropewalk plan` does the same for GPUs that you do not have."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Extend a model's context: evaluate, change RoPE, train, evaluate again, save.

    A run trains in one or more stages. Each stage has its own context length and RoPE.

    With several processes: torchrun --nproc-per-node 4 -m ropewalk extend recipe.yaml
    """
    if dry_run:
        _show_dry_run(recipe, overrides, rope, as_json)
        return
    # Filled once the recipe is read, since Ctrl-C may come earlier.
    output: list[Path] = []

    def so_far() -> str:
        if not output:
            return "nothing has started yet; run the same command to start again"
        # Only now: an import that a signal has interrupted cannot be repeated.
        from ropewalk.training.folder import left_off

        return left_off(output[0])

    # The imports take seconds, during which users press Ctrl-C too.
    with resumable(so_far):
        from ropewalk.parallel import joined
        from ropewalk.reporting.run.training import describe_run, describe_stop, reported
        from ropewalk.training import extend as run
        from ropewalk.training import extend_until, load_recipe
        from ropewalk.training.stage_rope.given import with_tables

        with joined(advice=AFTER_LOSS) as world:
            # Read once and sent to all, so that every rank has the same recipe even if the file changes meanwhile.
            read = world.on_rank_0(lambda: with_tables(load_recipe(recipe, list(overrides)), rope))
            output.append(Path(read.output).expanduser())
            context = run_context(world)
            if until_stage is not None and until_stage != len(read.stages):
                stopped = extend_until(read, until_stage, context, resume, from_stage)
                if world.is_rank_0:
                    print_json(stopped.to_json()) if as_json else show(describe_stop(stopped))
                return
            result = run(read, context, resume, from_stage)
            if not world.is_rank_0:
                return
        # After the processes have parted, because figures and model card need rank 0 alone.
        result = reported(result)
        show_result(result, as_json, describe_run)


def _show_dry_run(recipe: str, overrides: Overrides, rope: tuple[Path, ...], as_json: bool) -> None:
    from ropewalk.dry_run.run import plan_here
    from ropewalk.parallel.world import world_from_environment
    from ropewalk.reporting.dry_run import describe_planned_run
    from ropewalk.training import load_recipe
    from ropewalk.training.stage_rope.given import with_tables

    world = world_from_environment()
    if not world.is_rank_0:
        # Rank 0 plays a rank of the mesh alone.
        return
    read = with_tables(load_recipe(recipe, list(overrides)), rope)
    result = plan_here(read, world, run_context())
    show_result(result, as_json, describe_planned_run)


app = make_command(
    extend, "extend", "ropewalk extend recipe.yaml --set stages.0.context=32k --set output=runs/32k"
)
