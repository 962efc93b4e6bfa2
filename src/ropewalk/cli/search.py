"""``ropewalk search``: rescale factors for a longer context, found on a checkpoint without training it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.default_command import DefaultCommand
from ropewalk.cli.evaluate import DTYPES
from ropewalk.cli.options import PlotOption, check_plot
from ropewalk.cli.output import JsonOption, on_interrupt
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import parse_length

RUN = "run"
"""The command that ``ropewalk search MODEL`` means."""
ANY_START_TOKENS = "search"
OBJECTIVES = ("perplexity", "needle")
BUDGET, DOCUMENTS = 500, 5


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    from ropewalk.cli import search_tables

    group = typer.Typer(
        cls=DefaultCommand,
        help="Search rescale factors (LongRoPE) for a longer context; show and import tables of them.",
    )
    example = (
        "Example: ropewalk search meta-llama/Llama-3.1-8B --to 1M --text books/ --out factors.json   "
        "See also: ropewalk search show --help, ropewalk search import --help"
    )
    group.command(RUN, epilog=example, hidden=True)(search_command)
    search_tables.register(group)
    app.add_typer(group, name="search")


WHAT, SPACE, HOW, OUT = "What", "Where to search", "How", "Output"


def search_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a Hub id, or embedded.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Tokens to search for: 2048, 32k, 1M; up to the original length of a longrope checkpoint its short "
            "factors.",
            rich_help_panel=WHAT,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The factor table (.json); a log grows beside it.", rich_help_panel=OUT
        ),
    ],
    text: Annotated[
        str, typer.Option(help="Documents: as for ropewalk data pack.", rich_help_panel=WHAT)
    ] = "embedded:validation",
    documents: Annotated[
        int,
        typer.Option(help="Rows of text that a candidate is measured on.", min=1, rich_help_panel=WHAT),
    ] = DOCUMENTS,
    held_out: Annotated[
        int,
        typer.Option(
            help="Most rows of other documents to judge the result by.", min=0, rich_help_panel=WHAT
        ),
    ] = DOCUMENTS,
    objective: Annotated[
        str,
        typer.Option(
            help="perplexity, of all tokens; needle, of answers that lie far back in the text.",
            rich_help_panel=WHAT,
        ),
    ] = OBJECTIVES[0],
    short_penalty: Annotated[
        float,
        typer.Option(
            help="Weight of the loss that is added at the trained length; 0 for none.", rich_help_panel=WHAT
        ),
    ] = 0.0,
    start_tokens: Annotated[
        str,
        typer.Option(
            help="First tokens that keep their angles: a number, or search; a config can hold 0 alone.",
            rich_help_panel=SPACE,
        ),
    ] = "0",
    largest: Annotated[
        float | None,
        typer.Option(help="Largest factor; 1.25 times the extension if not given.", rich_help_panel=SPACE),
    ] = None,
    attention_factor: Annotated[
        float | None,
        typer.Option(help="Of all candidates; the published formula if not given.", rich_help_panel=SPACE),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="cma-es, or the paper's evolution; what measured best if not given.", rich_help_panel=HOW
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="Forwards: one is a candidate on a row.", min=1, rich_help_panel=HOW)
    ] = BUDGET,
    racing: Annotated[
        bool,
        typer.Option(help="Drop candidates that are behind after their first rows.", rich_help_panel=HOW),
    ] = True,
    batch: Annotated[
        int, typer.Option(help="Candidates in one forward pass.", min=1, rich_help_panel=HOW)
    ] = 1,
    prefill_chunk: Annotated[
        str | None,
        typer.Option(help="Tokens of a pass: 4096, 8k; a row at once if not given.", rich_help_panel=HOW),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all chance.", min=0, rich_help_panel=HOW)] = 0,
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of the parameters: {', '.join(DTYPES)}.", rich_help_panel=HOW)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto takes cuda where there is one, else cpu.", rich_help_panel=HOW)
    ] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the log beside --out.", rich_help_panel=OUT)
    ] = False,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search rescale factors for a longer context: several candidates, the same weights, the same rows of text.

    Tables of factors: ropewalk search show FILE, ropewalk search import SOURCE

    Over several processes: torchrun --nproc-per-node 4 -m ropewalk search MODEL --to 32k --out factors.json
    """
    from ropewalk.cli.search_run import Request, run
    from ropewalk.parallel import joined
    from ropewalk.search.algorithms import DEFAULT_ALGORITHM
    from ropewalk.search.run import SearchSettings

    def asked() -> Request:
        check_plot(plot)
        if objective not in OBJECTIVES:
            raise RopewalkError(f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if dtype not in DTYPES:
            raise RopewalkError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
        settings = SearchSettings(
            algorithm=algorithm or DEFAULT_ALGORITHM,
            budget=budget,
            seed=seed,
            start_tokens=_start_tokens(start_tokens, parse_length(to)),
            racing=racing,
            largest=largest,
            short_penalty=short_penalty,
            batch=batch,
            prefill_chunk=None if prefill_chunk is None else parse_length(prefill_chunk),
        )
        return Request(
            model,
            text,
            parse_length(to),
            objective,
            documents,
            held_out,
            settings,
            attention_factor,
            dtype,
            device,
            out,
            resume,
            plot,
            as_json,
        )

    with on_interrupt(lambda: _so_far(out)), joined(device, "go on with --resume") as world:
        # Every process reads the same command; what is wrong with it is said once.
        run(world.lead(asked), world)


def _so_far(out: Path) -> str:
    from ropewalk.cli.search_run import log_file

    log = log_file(out)
    if not (log.is_file() and log.stat().st_size):
        return "nothing is measured yet; the same command starts again"
    return f"the losses measured so far lie in {log}; the same command with --resume goes on from there"


def _start_tokens(said: str, length: int) -> tuple[int, ...]:
    """A number as the only choice, or those of the paper's list that leave something of the length to scale."""
    from ropewalk.search.space import START_TOKENS

    if said == ANY_START_TOKENS:
        return tuple(each for each in START_TOKENS if each < length)
    if not (said.isascii() and said.isdigit()):
        raise RopewalkError(
            f"--start-tokens {said!r} is neither a number of tokens from 0 on nor {ANY_START_TOKENS}"
        )
    return (int(said),)
