"""``ropewalk search show`` and ``ropewalk search import``: tables of rescale factors, from here and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import print_json, print_whole
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import FilePath, Length, Option

if TYPE_CHECKING:
    from ropewalk.reporting import ResultTable
    from ropewalk.search.factors import Factors
    from ropewalk.search.imports import Imported


def show(
    file: Annotated[FilePath, Field(description="A factor table.")],
    *,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a table of rescale factors: for which model and length, beside PI, NTK and YaRN, and how it came to be."""
    from ropewalk.cli import search_output
    from ropewalk.search.factors import read_factors

    table = read_factors(file)
    rules = search_output.rule_factors(table)
    if as_json:
        print_json(
            {
                **table.model_dump(mode="json"),
                "rules": {name.lower(): list(factors) for name, factors in rules.items()},
                "fits_config": table.start_tokens == 0,
                "remarks": table.remarks(),
            }
        )
    else:
        _print(table, rules)
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
    from ropewalk.search.factors import write_factors

    if out.suffix != ".json":
        raise RopewalkError(f"--out {out} is a factor table, whose name ends in .json")
    if out.exists():
        raise RopewalkError(f"{out} exists already; remove it or give another --out")
    imported = _imported(source, model, to, start_tokens)
    write_factors(out, imported.factors)
    if as_json:
        print_json(
            {**imported.factors.model_dump(mode="json"), "notes": list(imported.notes), "file": str(out)}
        )
        return
    for note in imported.notes:
        search_output.say(note)
    _print(imported.factors, search_output.rule_factors(imported.factors))
    search_output.fact("file", str(out))


def _imported(source: str, model: str | None, length: int | None, start_tokens: int) -> Imported:
    from ropewalk.search.imports import checkpoint, for_model, from_config, from_csv, is_config

    if is_config(source):
        if start_tokens:
            raise RopewalkError(f"--start-tokens {start_tokens} is for a CSV; a config has none")
        imported = from_config(checkpoint(source), length)
        return imported if model is None else for_model(imported, checkpoint(model))
    if model is None or length is None:
        missing = "--model" if model is None else "--to"
        raise RopewalkError(f"{source} says nothing but numbers; give {missing}")
    return from_csv(Path(source).expanduser(), checkpoint(model), length, start_tokens)


def _print(table: Factors, rules: dict[str, tuple[float, ...]]) -> None:
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
    print_whole(_factors_table(table, rules).rich())
    if table.best is not None and table.search is not None:
        say("")
        print_whole(search_output.objectives_table(table).rich())
    for sentence in (*table.cautions(), *table.remarks()):
        say(f"\n{sentence}")


def _factors_table(table: Factors, rules: dict[str, tuple[float, ...]]) -> ResultTable:
    from ropewalk.cli import search_output
    from ropewalk.reporting import ResultTable

    columns = {**search_output.factor_lists(table), **rules}
    turns = search_output.periods(table)
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
