"""``ropewalk search``: rescale factors for a longer context, found on a checkpoint without training it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group_with_default
from ropewalk.cli.output import JsonFlag, PlotFile, notes, on_interrupt, print_json, results, show
from ropewalk.io.settings import FilePath, Length, Option, Settings
from ropewalk.search.settings import WHAT, SearchConfig, SearchSettings

if TYPE_CHECKING:
    from ropewalk.search.factor_table import Factors
    from ropewalk.search.run import SearchResult


class SearchOutput(Settings):
    """What a search writes and prints."""

    group: ClassVar[str | None] = "Output"

    out: Annotated[FilePath, Option(metavar="FILE")] = Field(
        description="The factor table (.json); a log grows beside it."
    )
    resume: bool = Field(False, description="Go on with the log beside --out.")
    plot: PlotFile = None
    as_json: JsonFlag = False


def search(
    model: Annotated[str, Field(description="A checkpoint's folder, a Hub id, or embedded.")],
    settings: SearchSettings,
    output: SearchOutput,
    *,
    to: Annotated[
        Length,
        WHAT,
        Field(
            description="Tokens to search for: 2048, 32k, 1M; up to the original length of a longrope checkpoint its "
            "short factors."
        ),
    ],
    text: Annotated[
        str, WHAT, Field(description="Documents: as for ropewalk data pack.")
    ] = "embedded:validation",
) -> None:
    """Search rescale factors for a longer context: several candidates, the same weights, the same rows of text.

    Tables of factors: ropewalk search show FILE, ropewalk search import SOURCE

    Over several processes: torchrun --nproc-per-node 4 -m ropewalk search MODEL --to 32k --out factors.json
    """
    config = SearchConfig(
        model=model,
        target_length=to,
        text=text,
        settings=settings.within(to),
        out=output.out,
        resume=output.resume,
    )
    with on_interrupt(lambda: _so_far(config.log)):
        # The imports take seconds, in which people press Ctrl-C too.
        from ropewalk.cli.progress import ConsoleReporter
        from ropewalk.io.files import check_writable
        from ropewalk.parallel import joined
        from ropewalk.parallel.context import RunContext
        from ropewalk.search.run import search as run

        with joined(settings.device, "go on with --resume") as world:
            if output.plot is not None:
                plot = output.plot
                world.on_rank_0(lambda: check_writable(plot))
            result = run(config, RunContext(world, reporter=ConsoleReporter(notes)))
            if world.is_rank_0:
                _show(result, config, output)


def _show(result: SearchResult, config: SearchConfig, output: SearchOutput) -> None:
    from ropewalk.reporting.search import describe_search

    if output.as_json:
        print_json(result.to_json())
    else:
        show(describe_search(result, config))
    # After the result: a picture that cannot be written must not take it away.
    _draw(result.table, output.plot, output.as_json)


def _draw(table: Factors, plot: Path | None, as_json: bool) -> None:
    from ropewalk.reporting import draw
    from ropewalk.reporting.search import factors_figure

    if plot is not None:
        draw(factors_figure(table), plot)
        if not as_json:
            results().say(f"picture       {plot}")


def _so_far(log: Path | None) -> str:
    assert log is not None
    if not (log.is_file() and log.stat().st_size):
        return "nothing is measured yet; the same command starts again"
    return f"the losses measured so far lie in {log}; the same command with --resume goes on from there"


def show_command(
    file: Annotated[FilePath, Field(description="A factor table.")],
    *,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a table of rescale factors: for which model and length, beside PI, NTK and YaRN, and how it came to be."""
    from ropewalk.reporting.search import describe_factors
    from ropewalk.search.factor_table import read_factors

    table = read_factors(file)
    if as_json:
        print_json(table.shown())
    else:
        show(describe_factors(table))
    _draw(table, plot, as_json)


def import_command(
    source: Annotated[
        str,
        Field(
            description="A CSV of the paper's code, or a config.json, model folder or Hub id with longrope factors."
        ),
    ],
    *,
    out: Annotated[FilePath, Option(metavar="FILE"), Field(description="The factor table (.json).")],
    model: Annotated[
        str | None, Field(description="Whose factors they are; a config is of its own model if not given.")
    ] = None,
    to: Annotated[
        Length | None, Field(description="Tokens that they are for; a config states it itself.")
    ] = None,
    start_tokens: Annotated[
        int, Field(ge=0, description="First tokens that keep their angles; a CSV does not say.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Make a factor table of a CSV that the paper's code wrote, or of the factors in a published config."""
    from ropewalk.reporting.search import describe_factors
    from ropewalk.search.factor_table import import_factors

    imported = import_factors(source, model, to, start_tokens, out)
    if as_json:
        print_json(imported.to_json())
        return
    show((*imported.notes, *describe_factors(imported.factors), f"file          {out}"))


app = make_group_with_default(
    "search",
    "Search rescale factors (LongRoPE) for a longer context; show and import tables of them.",
    search,
    own_name="run",
    example="ropewalk search meta-llama/Llama-3.1-8B --to 1M --text books/ --out factors.json   "
    "See also: ropewalk search show --help, ropewalk search import --help",
)
app.command(make_command(show_command, "show", "ropewalk search show factors.json --plot factors.png"))
app.command(
    make_command(
        import_command,
        "import",
        "ropewalk search import 128k.csv --model meta-llama/Llama-2-7b-hf --to 128k --out factors.json",
    )
)
