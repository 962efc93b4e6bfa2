"""Show a comparison of runs: its conclusion, a table of cells, the differences, figures and the report page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from rich.text import Text

from ropewalk.evaluation.score_rows import ScoreRow, by_suite, by_task, score_rows
from ropewalk.evaluation.student import student_quantile
from ropewalk.experiments.run import Cell, ExperimentResult
from ropewalk.experiments.settings import GRID
from ropewalk.io.files import parse_json
from ropewalk.io.lengths import duration
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.figures.evaluation import difference_figure, perplexity_figure, score_figure
from ropewalk.reporting.page import Page, Picture, write_page
from ropewalk.reporting.scores.evaluation import longest_by_position
from ropewalk.reporting.scores.tables import comparison_table, evaluation_tables
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MOST_LINES
from ropewalk.reporting.tables import Part, ResultTable, counted
from ropewalk.training.folder import SUMMARY

REPORT = "report.html"
GIB = 2**30
COST_NOTES = (
    "tokens: in the rows of all training steps, mean over seeds; time: of these steps, mean over seeds, without "
    "evaluation, packing and checkpoints; tokens per second: tokens of all seeds over their time",
    "times hold for this machine as it was: other programs, or several runs at a time, make them longer",
)
FEW_SEEDS = 3
"""Largest number of seeds whose mean has an interval of more than four standard errors to each side."""


def cost_table(cells: Sequence[Cell]) -> ResultTable:
    """Seeds, tokens, time, speed and peak memory of each cell."""
    # A column says what was measured: the memory of a GPU and of a process cannot be compared.
    memory = [
        (words, found)
        for words, found in (
            ("peak GPU memory (GiB)", [cell.gpu_memory for cell in cells]),
            ("peak memory of the process (GiB)", [cell.process_memory for cell in cells]),
        )
        if any(found)
    ]
    several = any(len(cell.seeds) > 1 for cell in cells)
    rows = tuple(
        (
            shown(cell.name),
            str(len(cell.seeds)),
            "" if cell.tokens is None else f"{cell.tokens:,.0f}",
            _time(cell.hours),
            *([_times(cell)] if several else []),
            "" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}",
            *("" if not found[number] else f"{(found[number] or 0) / GIB:.2f}" for _, found in memory),
        )
        for number, cell in enumerate(cells)
    )
    header = (
        *("cell", "seeds", "tokens", "time"),
        *(["lowest to highest"] if several else []),
        "tokens per second",
        *(words for words, _ in memory),
    )
    return ResultTable("Cells and what the training of a run cost", header, rows, notes=COST_NOTES)


def _time(hours: float | None) -> str:
    return "" if hours is None else duration(3600 * hours)


def _times(cell: Cell) -> str:
    """Shortest and longest time of a cell's runs."""
    ends = _time(cell.fewest_hours), _time(cell.most_hours)
    return f"{ends[0]} to {ends[1]}" if all(ends) and len(cell.seeds) > 1 else ""


def experiment_tables(result: ExperimentResult) -> list[ResultTable]:
    """All tables: scores by cell, differences of each cell, cost."""
    series = {shown(cell.name): list(cell.results) for cell in result.cells}
    reference = shown(result.reference)
    notes = _seed_notes(result.cells)
    tables = [replace(each, notes=(*each.notes, *notes)) for each in evaluation_tables(series)]
    for name, found in result.differences.items():
        if found:
            tables.append(comparison_table(list(found), (reference, shown(name)), over_seeds=True))
    return [*tables, cost_table(result.cells)]


def _seed_notes(cells: Sequence[Cell]) -> list[str]:
    """Lines on what intervals of means over few seeds mean, and the bands of figures."""
    counts = [len(cell.seeds) for cell in cells if len(cell.seeds) > 1]
    if not counts:
        return []
    lines = ["bands of figures by position: lowest to highest seed, which is not the interval"]
    if (fewest := min(counts)) <= FEW_SEEDS:
        errors = student_quantile(fewest - 1)
        lines.insert(
            0,
            f"{fewest} seeds: the interval reaches {errors:.1f} standard errors to each side, so it says little; use "
            "the differences below, which compare runs with the same seed",
        )
    return lines


def experiment_figures(result: ExperimentResult) -> dict[str, Figure]:
    """One figure of scores by length for each suite, and one of differences for each cell, by file name."""
    figures: dict[str, Figure] = {}
    over = ", mean over seeds" if any(len(cell.seeds) > 1 for cell in result.cells) else ""
    rows = score_rows({shown(cell.name): cell.results for cell in result.cells})
    measured = {(row.suite, row.task) for row in rows if row.ran and row.length is not None}
    # Beyond this, lines cannot be told apart; the tables show every cell.
    if len(result.cells) <= MOST_LINES:
        for suite, own in by_suite(row for row in rows if (row.suite, row.task) in measured).items():
            figures |= _suite_figures(suite, own, over)
    for number, (name, found) in enumerate(result.differences.items(), start=1):
        if any(each.reason is None for each in found):
            names = (shown(result.reference), shown(name))
            # Numbered, because names of cells may contain characters that files may not.
            figures[f"difference-{number}.png"] = difference_figure(
                found, f"{names[1]} against {names[0]}", names
            )
    return figures


def _suite_figures(suite: str, rows: Sequence[ScoreRow], over: str) -> dict[str, Figure]:
    """Figures of one suite: scores by length, and perplexity by position where it was measured."""
    figures, rest = {}, list(rows)
    if by_position := longest_by_position(suite, rows):
        figures[f"{suite}-by-position.png"] = perplexity_figure(
            by_position, title=f"{suite} by position{over}"
        )
        # One length alone is a point, of which the figure by position says more.
        if len({row.length for row in rows if row.task == suite}) == 1:
            rest = [row for row in rows if row.task != suite]
    if rest:
        words = suite if len(by_task(rest)) > 1 else rest[0].name
        figures[f"{suite}.png"] = score_figure(rest, title=f"{words}{over}")
    return figures


def _limit(result: ExperimentResult) -> str:
    """A limit of the statistics, where it applies to what the comparison announces; otherwise empty."""
    announces = any(each.real for found in result.differences.values() for each in found)
    if not announces or len(result.cells) < 3 or all(len(cell.seeds) < 2 for cell in result.cells):
        return ""
    return (
        "Cells share their estimate of how much seeds vary. If seeds vary four times as much in one cell as in the "
        "others, about 5 % of comparisons without any effect announce one, and 8 % if that cell is the reference."
    )


def _details(result: ExperimentResult) -> dict[str, str]:
    """What made the results, as far as it is known: the recipe with the values and seeds, and versions of software."""
    details = {}
    if result.output is not None and (grid := result.output / GRID).is_file():
        record = parse_json(grid.read_text(encoding="utf-8"))
        details["Recipe, values and seeds"] = yaml.safe_dump(record, sort_keys=False, allow_unicode=True)
    summaries = [folder / SUMMARY for cell in result.cells for folder in cell.folders]
    versions = dict.fromkeys(
        json.dumps(parse_json(file.read_text(encoding="utf-8")).get("versions", {}), indent=2)
        for file in summaries
        if file.is_file()
    )
    # More than one if runs were added after an update, or on another machine.
    for number, text in enumerate(versions, start=1):
        details["Versions" if len(versions) == 1 else f"Versions {number}"] = text
    return details


def report_experiment(result: ExperimentResult, out: Path) -> tuple[Path, ...]:
    """Write the figures and the report page into the experiment's folder; returns the files, the page first.

    Each figure is a PNG and, for print, an SVG.
    """
    # Imported here because matplotlib takes a second to import.
    from ropewalk.reporting.figures.drawing import draw, draw_for_page

    figures = {out / name: figure for name, figure in experiment_figures(result).items()}
    pictures: list[Picture] = [draw_for_page(figure, path) for path, figure in figures.items()]
    for path, figure in figures.items():
        draw(figure, path.with_suffix(".svg"))
    facts: dict[str, object] = {
        "Reference": result.reference,
        "Cells": ", ".join(f"{cell.name} ({counted([len(cell.seeds)], 'seed')})" for cell in result.cells),
    }
    if limit := _limit(result):
        facts["Limit"] = limit
    if result.unfinished:
        facts["Not finished"] = counted([result.unfinished], "run")
    if result.failures:
        facts["Failed"] = "; ".join(
            f"{each.cell}, seed {each.seed}: {each.reason}" for each in result.failures
        )
    page = out / REPORT
    title = f"Comparison of {len(result.cells)} cells"
    tables, details = experiment_tables(result), _details(result)
    write_page(Page(title, facts, pictures, tables, lead=result.conclusion, details=details), page)
    return (page, *(picture.path for picture in pictures))


def describe_experiment(result: ExperimentResult, files: Sequence[Path]) -> Iterator[Part]:
    """The conclusion, then tables, failures and files."""
    yield Text(result.conclusion)
    for table in experiment_tables(result):
        yield ""
        yield table
    yield ""
    if limit := _limit(result):
        yield Text(limit)
    for each in result.failures:
        yield Text(f"failed   {each.cell}, seed {each.seed}: {shown(each.reason)} (log: {each.log})")
    if result.unfinished:
        one = result.unfinished == 1
        yield Text(
            f"{counted([result.unfinished], 'run')} {'is' if one else 'are'} not finished; run the same command "
            f"again to resume {'it' if one else 'them'}"
        )
    for path in files:
        yield Text(f"report   {path}" if path.suffix == ".html" else f"picture  {path} (and .svg)")
