"""``ropewalk search show`` and ``ropewalk search import``: tables of rescale factors, from here and elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import print_json, print_whole
from ropewalk.io.settings import FilePath, Length, Option

if TYPE_CHECKING:
    from ropewalk.reporting import ResultTable
    from ropewalk.search.factor_table import Factors


def show(
    file: Annotated[FilePath, Field(description="A factor table.")],
    *,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a table of rescale factors: for which model and length, beside PI, NTK and YaRN, and how it came to be."""
    from ropewalk.cli import search_output
    from ropewalk.search.factor_table import read_factors

    table = read_factors(file)
    if as_json:
        print_json(table.shown())
    else:
        _print(table)
    if plot is not None:
        search_output.draw(table, plot)
        if not as_json:
            search_output.fact("picture", str(plot))


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
    from ropewalk.cli import search_output
    from ropewalk.search.factor_table import import_factors

    imported = import_factors(source, model, to, start_tokens, out)
    if as_json:
        print_json(imported.to_json())
        return
    for note in imported.notes:
        search_output.say(note)
    _print(imported.factors)
    search_output.fact("file", str(out))


def _print(table: Factors) -> None:
    from ropewalk.cli import search_output
    from ropewalk.cli.search_output import fact, say

    model = table.model
    fact("model", model.name)
    fact(
        "RoPE",
        f"{model.rotary_dim // 2} pairs, base {model.rope_theta:,.10g}, original length "
        f"{model.original_max_position_embeddings:,} tokens",
    )
    fact("target", f"{table.target_length:,} tokens")
    fact("from", f"{table.provenance.kind}: {table.provenance.source}")
    fact("start tokens", str(table.start_tokens))
    fact("attention", f"{table.attention_factor:.6g}")
    fits = "no, for its start tokens" if table.start_tokens else "yes"
    fact("plain config", f"{fits} (transformers, rope_type longrope)")
    say("")
    print_whole(_factors_table(table).rich())
    if table.best is not None and table.search is not None:
        say("")
        print_whole(search_output.objectives_table(table).rich())
    for sentence in (*table.cautions(), *table.remarks()):
        say(f"\n{sentence}")


def _factors_table(table: Factors) -> ResultTable:
    from ropewalk.reporting import ResultTable

    columns = {**table.lists(), **table.rule_factors()}
    turns = table.periods()
    rows = [
        (str(pair), f"{turn:,.0f}", *(f"{factors[pair]:.4g}" for factors in columns.values()))
        for pair, turn in enumerate(turns)
    ]
    return ResultTable(
        "Rescale factors by pair; period: tokens for a full turn before scaling",
        ("pair", "period", *columns),
        tuple(rows),
        text_columns=0,
    )
