"""What ``ropewalk search`` and its kin print of a factor table, and the picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.cli.output import print_json, print_whole, results
from ropewalk.search.factor_table import perplexity_text
from ropewalk.search.goal import TITLES

if TYPE_CHECKING:
    from ropewalk.reporting import ResultTable
    from ropewalk.search.factor_table import Factors
    from ropewalk.search.run import SearchResult
    from ropewalk.search.settings import SearchConfig


def finish(result: SearchResult, config: SearchConfig, plot: Path | None, as_json: bool) -> None:
    """Print the table of a search, and draw it."""
    table = result.table
    if as_json:
        print_json(result.to_json())
    else:
        print_whole(objectives_table(table).rich())
        say("")
        print_facts(table)
        for sentence in (*table.cautions(), *table.remarks()):
            say(f"\n{sentence}")
        say("")
        fact("file", str(result.file))
        for command in _next(table, config):
            fact("next", f"ropewalk {command}")
    # After the result: a picture that cannot be written must not take it away.
    if plot is not None:
        draw(table, plot)
        if not as_json:
            fact("picture", str(plot))


def _next(table: Factors, config: SearchConfig) -> list[str]:
    """Commands that take the table: a config holds no start tokens, and a stage no short factors alone."""
    assert config.out is not None
    if table.start_tokens:
        return [f"eval {config.model} --rope {config.out} --lengths {table.target_length}"]
    export = f"export {config.model} --rope {config.out} --out {config.out.stem}-model"
    return [export] if table.long_factor is None else [f"extend recipe.yaml --rope {config.out}", export]


def objectives_table(table: Factors) -> ResultTable:
    """Perplexity of the factors and of what they had to beat, on search documents and on those held out."""
    from ropewalk.reporting import ResultTable

    assert table.best is not None
    assert table.search is not None
    judged = table.held_out
    kind = "needle perplexity" if table.search.objective == "needle" else "perplexity"
    penalty = table.search.short_penalty
    count = table.search.documents
    header = ["RoPE", f"{count // 2} search rows and their beginnings" if penalty else f"{count} search rows"]
    rows = [
        [f"factors found{_n_hat(table.start_tokens)}", perplexity_text(table.best.objective)],
        *([TITLES.get(name, name), perplexity_text(value)] for name, value in table.baselines.items()),
    ]
    if judged is not None:
        header.append(f"{judged.documents} held-out rows{', no penalty' if penalty else ''}")
        for row, value in zip(rows, (judged.best, *judged.baselines.values()), strict=True):
            row.append(perplexity_text(value))
    return ResultTable(
        f"{kind.capitalize()} at {table.target_length:,} tokens, before training{_with_penalty(penalty)}",
        tuple(header),
        tuple(map(tuple, rows)),
    )


def print_facts(table: Factors) -> None:
    """The factors and how they came to be, a line each."""
    for name in ("long_factor", "short_factor"):
        factors = getattr(table, name)
        if factors is not None:
            fact(name.replace("_", " "), ", ".join(f"{factor:.6g}" for factor in factors))
    fact("start tokens", str(table.start_tokens))
    fact("attention", f"{table.attention_factor:.6g}")
    searched = table.search
    if searched is not None:
        ended = {"budget": ", until the budget ended", "algorithm": ", until there was nothing more to ask"}
        fact(
            "search",
            f"{searched.algorithm}, seed {searched.seed}: {table.forwards:,} forwards, {searched.candidates:,} "
            f"candidates, {searched.seconds:g} s{ended.get(searched.ended_by or '', '')}",
        )


def draw(table: Factors, path: Path) -> None:
    """The search beside the factors, or the factors alone where there was none."""
    from ropewalk.reporting import draw as draw_figure
    from ropewalk.reporting.figures.search import FactorLines, SearchCurve, search_figure

    curve = None
    if any(point.objective is not None for point in table.history):
        points = [(point.forwards, point.objective) for point in table.history]
        curve = SearchCurve(points, table.baselines, table.target_length)
    original = table.model.original_max_position_embeddings
    lines = FactorLines(table.lists(), table.rule_factors(), table.periods(), original)
    title = f"{Path(table.model.name).name}: rescale factors for {table.target_length:,} tokens"
    draw_figure(search_figure(curve, lines, title), path)


def say(text: str) -> None:
    """A line on stdout, never cut."""
    results().say(text)


def fact(name: str, value: Any) -> None:
    """A named value on a line of its own."""
    say(f"{name:13} {value}")


def _n_hat(tokens: int) -> str:
    return f" (n̂ = {tokens})" if tokens else ""


def _with_penalty(weight: float) -> str:
    return f"; on search rows with {weight:g} times what is lost at the trained length" if weight else ""
