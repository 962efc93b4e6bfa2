"""``ropewalk compare``: run the cells of a grid, or read finished runs, and test the differences."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, resumable, run_context, show_result
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
            description="Folder for the runs, results, figures and a report page. Run the same command again to "
            "resume. Required for a recipe."
        ),
    ] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Compare variants of a training run: run a recipe with several settings and seeds, or read finished runs.

    Each combination of the values of --vary is a cell. Cells differ only in these values: runs with the same seed have
    the same order of training sequences and the same evaluation samples. Each run has its own folder under cells/ in
    the folder of --out. If a run fails, the others continue.
    """

    def so_far() -> str:
        return "the runs so far are kept; run the same command again to resume them"

    # The runs are processes of their own; ended in an orderly way, each keeps its last checkpoint.
    with resumable(so_far):
        from ropewalk.experiments.run import compare as run
        from ropewalk.reporting.scores.experiments import describe_experiment, report_experiment

        result = run(settings, run_context(output=out))
        files = () if out is None else report_experiment(result, out)
    show_result(result, as_json, lambda found: describe_experiment(found, files))
    # After the report: a failed run must set the exit status, but not hide what the others measured.
    if result.failures:
        raise RunFailure(
            f"{len(result.failures)} of the runs failed; remove the cause and run the same command again: "
            "finished runs are kept"
        )


app = make_command(
    compare,
    "compare",
    "ropewalk compare demo --vary stages.*.learning_rate=5e-4,1e-3 --seeds 3 --out rates",
)
