"""Show a search for rescale factors and its factor table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.figures.search import FactorLines, SearchCurve, search_figure
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.search.factor_table import Factors, perplexity_text
from ropewalk.search.goal import TITLES
from ropewalk.search.run import SearchResult
from ropewalk.search.settings import SearchConfig


def describe_search(result: SearchResult, config: SearchConfig) -> Iterator[Part]:
    """Perplexity of the factors, the factors themselves, and the commands that use the table."""
    table = result.table
    yield objectives_table(table)
    yield ""
    yield from _facts(table)
    yield from _sentences(table)
    yield ""
    yield _fact("file", str(result.file))
    for command in _next(table, config):
        yield _fact("next", f"ropewalk {command}")


def _next(table: Factors, config: SearchConfig) -> list[str]:
    """Commands that use the table."""
    assert config.out is not None
    # transformers' config has no field for start tokens, so such a table cannot be exported.
    if table.start_tokens:
        return [f"eval {config.model} --rope {config.out} --lengths {table.target_length}"]
    export = f"export {config.model} --rope {config.out} --out {config.out.stem}-model"
    # A stage of a recipe needs long factors.
    return [export] if table.long_factor is None else [f"extend recipe.yaml --rope {config.out}", export]


def objectives_table(table: Factors) -> ResultTable:
    """Perplexity of the factors and of the baselines, on search documents and on held-out ones."""
    assert table.best is not None
    assert table.search is not None
    judged = table.held_out
    kind = "needle perplexity" if table.search.objective == "needle" else "perplexity"
    penalty = table.search.short_penalty
    count = table.search.documents
    # With a penalty, each sequence is also measured at the trained length, so documents count twice.
    header = [
        "RoPE",
        f"{count // 2} search sequences and their beginnings" if penalty else f"{count} search sequences",
    ]
    rows = [
        [f"factors found{_n_hat(table.start_tokens)}", perplexity_text(table.best.objective)],
        *([TITLES.get(name, name), perplexity_text(value)] for name, value in table.baselines.items()),
    ]
    if judged is not None:
        header.append(f"{judged.documents} held-out sequences{', no penalty' if penalty else ''}")
        for row, value in zip(rows, (judged.best, *judged.baselines.values()), strict=True):
            row.append(perplexity_text(value))
    return ResultTable(
        f"{kind.capitalize()} at {table.target_length:,} tokens, before training{_with_penalty(penalty)}",
        tuple(header),
        tuple(map(tuple, rows)),
    )


def describe_factors(table: Factors) -> Iterator[Part]:
    """The model and length of a factor table, its origin, and its factors beside PI, NTK and YaRN."""
    model = table.model
    yield _fact("model", model.name)
    yield _fact(
        "RoPE",
        f"{model.rotary_dim // 2} pairs, base {model.rope_theta:,.10g}, original length "
        f"{model.original_max_position_embeddings:,} tokens",
    )
    yield _fact("target", f"{table.target_length:,} tokens")
    yield _fact("origin", f"{table.provenance.kind}: {table.provenance.source}")
    yield _fact("start tokens", str(table.start_tokens))
    yield _fact("attention", f"factor {table.attention_factor:.6g}")
    yield from _critical(table)
    fits = "no, because of the start tokens" if table.start_tokens else "yes"
    yield _fact("exportable", f"{fits} (transformers config, rope_type longrope)")
    yield ""
    yield _factors_table(table)
    if table.best is not None and table.search is not None:
        yield ""
        yield objectives_table(table)
    yield from _sentences(table)


def _facts(table: Factors) -> Iterator[Part]:
    """The factors, their settings and the search, one line each."""
    for name in ("long_factor", "short_factor"):
        factors = getattr(table, name)
        if factors is not None:
            yield _fact(name.replace("_", " "), ", ".join(f"{factor:.6g}" for factor in factors))
    yield _fact("start tokens", str(table.start_tokens))
    yield _fact("attention", f"factor {table.attention_factor:.6g}")
    yield from _critical(table)
    searched = table.search
    if searched is not None:
        ended = {"budget": "; stopped by the budget", "algorithm": "; the algorithm ended by itself"}
        yield _fact(
            "search",
            f"{searched.algorithm}, seed {searched.seed}: {table.forwards:,} forward passes, {searched.candidates:,} "
            f"candidates, {searched.seconds:g} s{ended.get(searched.ended_by or '', '')}",
        )


def factors_figure(table: Factors) -> Figure:
    """Draw the search beside the factors, or the factors alone if the table has no search."""
    curve = None
    if any(point.objective is not None for point in table.history):
        points = [(point.forwards, point.objective) for point in table.history]
        curve = SearchCurve(points, table.baselines, table.target_length)
    original = table.model.original_max_position_embeddings
    pair = None if table.critical_pair is None else table.critical_pair.found
    lines = FactorLines(table.lists(), table.rule_factors(), table.periods(), original, pair)
    title = f"{Path(table.model.name).name}: rescale factors for {table.target_length:,} tokens"
    return search_figure(curve, lines, title)


def _factors_table(table: Factors) -> ResultTable:
    columns = {**table.lists(), **table.rule_factors()}
    turns = table.periods()
    rows = [
        (str(pair), f"{turn:,.0f}", *(f"{factors[pair]:.4g}" for factors in columns.values()))
        for pair, turn in enumerate(turns)
    ]
    return ResultTable(
        "Rescale factors by rotary pair; period: tokens per full turn before scaling",
        ("pair", "period", *columns),
        tuple(rows),
        text_columns=0,
    )


def _sentences(table: Factors) -> Iterator[Part]:
    for sentence in (*table.cautions(), *table.remarks()):
        yield ""
        yield sentence


def _critical(table: Factors) -> list[str]:
    """The critical pair beside the theoretical one, if the search looked for it."""
    name = "critical pair"
    return (
        []
        if table.critical_pair is None
        else [_fact(name, str(table.critical_pair).removeprefix(f"{name} "))]
    )


def _fact(name: str, value: Any) -> str:
    """Format a name and a value as one line."""
    return f"{name:13} {value}"


def _n_hat(tokens: int) -> str:
    return f" (n̂ = {tokens})" if tokens else ""


def _with_penalty(weight: float) -> str:
    return (
        f"; on search sequences, plus {weight:g} times the loss increase at the trained length"
        if weight
        else ""
    )
