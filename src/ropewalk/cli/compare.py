"""``ropewalk compare``: run the cells of a grid, or read finished runs, and test the differences."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, ended_by_sigterm, notes, on_interrupt, print_json, show
from ropewalk.errors import RunFailure
from ropewalk.experiments.settings import CompareSettings
from ropewalk.io.settings import COMMON, Folder


def compare(
    settings: CompareSettings,
    *,
    out: Annotated[
        Folder | None,
        COMMON,
        Field(
            description="Folder of the runs, their results, figures and report page. Run again with the same folder to "
            "resume. Needed for a recipe."
        ),
    ] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Compare choices: run a recipe with varied keys and seeds, or read finished runs.

    Every combination of the varied values is a cell, and each cell is run with every seed. The order of rows and the
    evaluation samples depend on the seed alone, not on the cell. Each run has its own folder under OUT/cells. If one
    fails, the others go on; run the same command again to resume what was interrupted.
    """

    def so_far() -> str:
        return "the runs so far are kept; run the same command again to resume them"

    # The runs are processes of their own; ended in an orderly way, each keeps its last checkpoint.
    with on_interrupt(so_far), ended_by_sigterm("compare", f"but {so_far()}"):
        from ropewalk.cli.progress import ConsoleReporter
        from ropewalk.experiments.run import run
        from ropewalk.parallel.context import RunContext
        from ropewalk.reporting.experiments import describe_experiment, report_experiment

        result = run(settings, RunContext(output=out, reporter=ConsoleReporter(notes)))
        files = () if out is None else report_experiment(result, out)
    if as_json:
        print_json(result.to_json())
    else:
        show(describe_experiment(result, files))
    # After the report: a failed run must set the exit status, but not hide what the others measured.
    if result.failures:
        raise RunFailure(
            f"{len(result.failures)} of the runs failed; remove the cause and run the same command again: "
            "finished runs are kept"
        )


app = make_command(
    compare,
    "compare",
    "ropewalk compare demo --vary stages.*.pattern=full,intra_document,anchor --seeds 3 --out patterns",
)
