"""``ropewalk extend``: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.options import JsonFlag
from ropewalk.cli.output import notes, on_interrupt, print_json, results
from ropewalk.io.settings import FilePath, Option, Overrides
from ropewalk.recipes import shipped_recipes

GO_ON = "go on from the last checkpoint with --resume, or with the same command if nothing was trained yet"


def extend(
    recipe: Annotated[
        str,
        Field(description=f"A recipe in YAML, or the name of a shipped one: {', '.join(shipped_recipes())}."),
    ],
    *,
    overrides: Annotated[
        Overrides, Field(description="Change a key of the recipe: stages.0.steps=20; may be given again.")
    ] = (),
    rope: Annotated[
        tuple[FilePath, ...],
        Option(metavar="FILE", repeated=True),
        Field(description="A factor table, for the stage of its length; may be given again."),
    ] = (),
    resume: Annotated[bool, Field(description="Go on with the run in the output folder.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Extend a model's context: measure, change RoPE, train, measure again, save.

    Over several processes: torchrun --nproc-per-node 4 -m ropewalk extend recipe.yaml
    """
    output: list[Path] = []

    def so_far() -> str:
        from ropewalk.training.run_folder import left_off

        return left_off(output[0]) if output else "nothing has begun yet; the same command starts again"

    # The imports take seconds, in which people press Ctrl-C too.
    with on_interrupt(so_far):
        from ropewalk.cli.progress import ConsoleReporter
        from ropewalk.models.config_file import read_config_file
        from ropewalk.parallel import joined
        from ropewalk.rope.config import notes_on
        from ropewalk.training import extend as run
        from ropewalk.training import load_recipe
        from ropewalk.training.measurement import describe_short_context
        from ropewalk.training.report import run_tables, write_run_report
        from ropewalk.training.stage_rope.tables import with_tables

        with joined(go_on=GO_ON) as world:
            read = world.lead(lambda: with_tables(load_recipe(recipe, list(overrides)), rope))
            output.append(Path(read.output).expanduser())
            summary = run(read, resume=resume, reporter=ConsoleReporter(notes), world=world)
            if not world.leads:
                return
    files = write_run_report(Path(summary["output"]))
    readers = notes_on(read_config_file(summary["model"]))
    if as_json:
        print_json({**summary, "files": [str(path) for path in files], "readers": readers})
        return
    console = results()
    for table in run_tables(summary):
        console.print()
        console.print(table.rich())
    console.print()
    facts = [("model", summary["model"])]
    if summary["short_context"] is not None:
        facts.append(("short", describe_short_context(summary["short_context"])))
    facts += [("report" if path.suffix == ".html" else "picture", str(path)) for path in files]
    facts += [("readers", each) for each in readers]
    facts += [
        ("next", f"AutoModelForCausalLM.from_pretrained({summary['model']!r}) loads it in plain transformers")
    ]
    for name, value in facts:
        console.say(f"{name:8} {value}")


app = make_command(
    extend, "extend", "ropewalk extend recipe.yaml --set stages.0.context=32k --set output=runs/32k"
)
