"""Show a comparison of runs: its conclusion, a table of cells, the differences, figures and the report page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from ropewalk.experiments.run import Cell, ExperimentResult
from ropewalk.reporting.evaluation import evaluation_tables
from ropewalk.reporting.figures.evaluation import difference_figure, score_figure
from ropewalk.reporting.figures.primitives import Figure
from ropewalk.reporting.page import Page, Picture, write_page
from ropewalk.reporting.score_tables import comparison_table, task_words
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MOST_LINES
from ropewalk.reporting.tables import Part, ResultTable

REPORT = "report.html"


def cost_table(cells: Sequence[Cell]) -> ResultTable:
    """Seeds, hours and speed of each cell."""
    rows = tuple(
        (
            shown(cell.name),
            str(len(cell.seeds)),
            "" if cell.hours is None else f"{cell.hours:.2f}",
            "" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}",
        )
        for cell in cells
    )
    return ResultTable(
        "Cells and what a run of each cost", ("cell", "seeds", "hours of training", "tokens per second"), rows
    )


def experiment_tables(result: ExperimentResult) -> list[ResultTable]:
    """All tables: scores by cell, differences of each cell, cost."""
    series = {shown(cell.name): list(cell.results) for cell in result.cells}
    reference = shown(result.cells[0].name)
    tables = evaluation_tables(series)
    for name, found in result.differences.items():
        if found:
            tables.append(comparison_table(list(found), (reference, shown(name))))
    return [*tables, cost_table(result.cells)]


def experiment_figures(result: ExperimentResult) -> dict[str, Figure]:
    """One figure of scores by length for each task, and one of differences for each cell, by file name."""
    figures: dict[str, Figure] = {}
    tasks = dict.fromkeys(
        (each.suite, each.task)
        for cell in result.cells
        for each in cell.results
        if each.length is not None and each.status == "ok"
    )
    # Beyond this, lines cannot be told apart; the tables show every cell.
    if len(result.cells) <= MOST_LINES:
        for suite, task in tasks:
            series = {
                shown(cell.name): [each for each in cell.results if (each.suite, each.task) == (suite, task)]
                for cell in result.cells
            }
            title = f"{task_words(suite, task)}, mean over seeds"
            figures[f"{suite}-{task}.png"] = score_figure(series, title=title)
    for number, (name, found) in enumerate(result.differences.items(), start=1):
        if any(each.reason is None for each in found):
            names = (shown(result.cells[0].name), shown(name))
            # Numbered, because names of cells may contain characters that files may not.
            figures[f"difference-{number}.png"] = difference_figure(
                found, f"{names[1]} against {names[0]}", names
            )
    return figures


def report_experiment(result: ExperimentResult, out: Path) -> tuple[Path, ...]:
    """Write the figures and the report page into the experiment's folder; returns the files, the page first."""
    # Imported here because matplotlib takes a second to import.
    from ropewalk.reporting.figures.drawing import draw

    pictures: list[Picture] = [
        draw(figure, out / name) for name, figure in experiment_figures(result).items()
    ]
    facts: dict[str, object] = {
        "Conclusion": result.conclusion,
        "Reference": result.cells[0].name,
        "Cells": ", ".join(f"{cell.name} ({len(cell.seeds)} seeds)" for cell in result.cells),
    }
    if result.unfinished:
        facts["Not finished"] = f"{result.unfinished} runs"
    if result.failures:
        facts["Failed"] = "; ".join(
            f"{each.cell}, seed {each.seed}: {each.reason}" for each in result.failures
        )
    page = out / REPORT
    write_page(
        Page(f"Comparison of {len(result.cells)} cells", facts, pictures, experiment_tables(result)), page
    )
    return (page, *(picture.path for picture in pictures))


def describe_experiment(result: ExperimentResult, files: Sequence[Path]) -> Iterator[Part]:
    """The conclusion, then tables, failures and files."""
    yield Text(result.conclusion)
    for table in experiment_tables(result):
        yield ""
        yield table
    yield ""
    for each in result.failures:
        yield Text(f"failed   {each.cell}, seed {each.seed}: {shown(each.reason)} (log: {each.log})")
    if result.unfinished:
        yield Text(f"{result.unfinished} runs are not finished; the same command goes on with them")
    for path in files:
        yield Text(f"{'report' if path.suffix == '.html' else 'picture':8} {path}")
