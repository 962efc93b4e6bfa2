"""``ropewalk search``: find rescale factors for a longer context without training the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group_with_default
from ropewalk.cli.output import (
    JsonFlag,
    PlotFile,
    figure_of,
    print_json,
    results,
    resumable,
    run_context,
    show,
    show_result,
)
from ropewalk.io.settings import (
    COMMON,
    DOCUMENTS,
    MODEL_NAME,
    TARGET_LENGTH,
    FilePath,
    Length,
    Option,
    Settings,
)
from ropewalk.search.settings import SHORT_FACTORS, SearchConfig, SearchSettings

if TYPE_CHECKING:
    from ropewalk.search.factor_table import Factors
    from ropewalk.search.run import SearchResult


class SearchOutput(Settings):
    """Output options of a search."""

    group: ClassVar[str | None] = COMMON.group

    out: Annotated[FilePath, Option(metavar="FILE")] = Field(
        description="File to write the factor table to (.json). A log of all losses is written next to it."
    )
    resume: bool = Field(default=False, description="Resume a search from its log next to --out.")
    plot: Annotated[PlotFile, figure_of("the search's progress and the factors")] = None
    as_json: JsonFlag = False


def search(
    model: Annotated[str, Field(description=f"{MODEL_NAME}.")],
    *,
    to: Annotated[Length, COMMON, Field(description=f"{TARGET_LENGTH} {SHORT_FACTORS}")],
    text: Annotated[
        str, COMMON, Field(description=f"Documents to measure on: {DOCUMENTS}.")
    ] = "embedded:validation",
    settings: SearchSettings,
    output: SearchOutput,
) -> None:
    """Find LongRoPE's rescale factors for a longer context, or show or import a table of factors.

    A rescale factor divides the frequency of one pair of RoPE dimensions. A checkpoint with longrope has two lists:
    short factors for inputs up to its original length (the context length before extension), and long factors for
    longer inputs. The search measures candidates with the model's own weights. It trains nothing.

    Show or import factor tables: ropewalk search show FILE, ropewalk search import SOURCE

    With several processes: torchrun --nproc-per-node 4 -m ropewalk search MODEL --to 32k --out factors.json
    """
    config = SearchConfig(
        model=model,
        target_length=to,
        text=text,
        settings=settings.within(to),
        out=output.out,
        resume=output.resume,
    )

    def so_far() -> str:
        return _so_far(config.log)

    with resumable(so_far):
        # These imports take seconds; Ctrl-C must work during them too.
        from ropewalk.io.files import check_writable
        from ropewalk.parallel import joined
        from ropewalk.search.run import search as run

        with joined(settings.device, "run the same command with --resume") as world:
            if output.plot is not None:
                plot = output.plot
                # Before the search, which may take hours and would otherwise lose its figure at the end.
                world.on_rank_0(lambda: check_writable(plot))
            result = run(config, run_context(world))
            if world.is_rank_0:
                _show(result, config, output)


def _show(result: SearchResult, config: SearchConfig, output: SearchOutput) -> None:
    from ropewalk.reporting.search import describe_search

    show_result(result, output.as_json, lambda found: describe_search(found, config))
    # Draw last: if the figure cannot be written, the result is already printed.
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
        return "nothing is measured yet; run the same command to start again"
    return f"the losses measured so far are in {log}; run the same command with --resume to continue"


def show_command(
    file: Annotated[FilePath, Field(description="Factor table to show (.json).")],
    *,
    plot: Annotated[PlotFile, figure_of("the factors, and of the search if there was one")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a factor table, a .json file with one LongRoPE factor for each pair of RoPE dimensions.

    Prints the model, length and origin of the table, and its factors next to those of position interpolation (PI), NTK
    and YaRN.
    """
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
            description="CSV file that LongRoPE's code (microsoft/LongRoPE) wrote, or a config.json, model folder or "
            "Hub id with longrope factors. From a config, both lists are imported: short and long factors."
        ),
    ],
    *,
    out: Annotated[
        FilePath, Option(metavar="FILE"), Field(description="File to write the factor table to (.json).")
    ],
    model: Annotated[
        str | None,
        Field(
            description="Checkpoint that the factors are for. Required for a CSV file. Default for a config: SOURCE "
            "itself."
        ),
    ] = None,
    to: Annotated[
        Length | None,
        Field(
            description=f"{TARGET_LENGTH} Required for a CSV file. Default for a config: its max_position_embeddings."
        ),
    ] = None,
    start_tokens: Annotated[
        int,
        Field(ge=0, description="Number of initial tokens whose RoPE stays unscaled. Only for a CSV file."),
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Import LongRoPE factors from a CSV file or a model's config into a factor table, a .json file."""
    from ropewalk.reporting.search import describe_factors
    from ropewalk.search.imported_table import import_factors

    imported = import_factors(source, model, to, start_tokens, out)
    if as_json:
        print_json(imported.to_json())
        return
    show((*imported.notes, *describe_factors(imported.factors), f"file          {out}"))


app = make_group_with_default(
    "search",
    "Find LongRoPE's rescale factors for a longer context, or show or import a table of factors.",
    search,
    own_name="run",
    example="ropewalk search meta-llama/Llama-3.1-8B --to 1M --text books/ --out factors.json",
)
app.command(make_command(show_command, "show", "ropewalk search show factors.json --plot factors.png"))
app.command(
    make_command(
        import_command,
        "import",
        "ropewalk search import 128k.csv --model meta-llama/Llama-2-7b-hf --to 128k --out factors.json",
    )
)
