"""Show a comparison of runs: its conclusion, a table of cells, the differences, figures and the report page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from ropewalk.experiments.run import Cell, ExperimentResult
from ropewalk.reporting.figures.drawing import Figure, canvas, complete, panel_title
from ropewalk.reporting.figures.evaluation import difference_figure, draw_scores
from ropewalk.reporting.page import Page, Picture, write_page
from ropewalk.reporting.scores.evaluation import evaluation_tables
from ropewalk.reporting.scores.tables import comparison_table, task_words
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import HEIGHT_INCHES, MOST_LINES
from ropewalk.reporting.tables import Part, ResultTable

REPORT = "report.html"
GIB = 2**30


def cost_table(cells: Sequence[Cell]) -> ResultTable:
    """Seeds, hours, speed and peak memory of each cell."""
    # A column says what was measured: the memory of a GPU and of a process cannot be compared.
    memory = [
        (words, found)
        for words, found in (
            ("peak GPU memory (GiB)", [cell.gpu_memory for cell in cells]),
            ("peak memory of the process (GiB)", [cell.process_memory for cell in cells]),
        )
        if any(found)
    ]
    rows = tuple(
        (
            shown(cell.name),
            str(len(cell.seeds)),
            "" if cell.hours is None else f"{cell.hours:.2f}",
            "" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}",
            *("" if not found[number] else f"{(found[number] or 0) / GIB:.2f}" for _, found in memory),
        )
        for number, cell in enumerate(cells)
    )
    header = ("cell", "seeds", "hours of training", "tokens per second", *(words for words, _ in memory))
    return ResultTable("Cells and what a run of each cost", header, rows)


def experiment_tables(result: ExperimentResult) -> list[ResultTable]:
    """All tables: scores by cell, differences of each cell, cost."""
    series = {shown(cell.name): list(cell.results) for cell in result.cells}
    reference = shown(result.reference)
    tables = evaluation_tables(series)
    for name, found in result.differences.items():
        if found:
            tables.append(comparison_table(list(found), (reference, shown(name))))
    return [*tables, cost_table(result.cells)]


def experiment_figures(result: ExperimentResult) -> dict[str, Figure]:
    """One figure of scores by length for each suite, and one of differences for each cell, by file name."""
    figures: dict[str, Figure] = {}
    tasks: dict[str, list[str]] = {}
    for each in (each for cell in result.cells for each in cell.results):
        if (
            each.length is not None
            and each.status == "ok"
            and each.task not in tasks.setdefault(each.suite, [])
        ):
            tasks[each.suite].append(each.task)
    # Beyond this, lines cannot be told apart; the tables show every cell.
    if len(result.cells) <= MOST_LINES:
        for suite, own in tasks.items():
            figures[f"{suite}.png"] = _suite_figure(result.cells, suite, own)
    for number, (name, found) in enumerate(result.differences.items(), start=1):
        if any(each.reason is None for each in found):
            names = (shown(result.reference), shown(name))
            # Numbered, because names of cells may contain characters that files may not.
            figures[f"difference-{number}.png"] = difference_figure(
                found, f"{names[1]} against {names[0]}", names
            )
    return figures


def _suite_figure(cells: Sequence[Cell], suite: str, tasks: Sequence[str]) -> Figure:
    """Scores by length of every cell, one panel for each task of a suite."""
    panels = canvas(len(tasks), height=len(tasks) * HEIGHT_INCHES)
    captions, told, keys = dict[str, None](), list[str](), list[Any]()
    for axes, task in zip(panels, tasks, strict=True):
        series = {
            shown(cell.name): [one for one in cell.results if (one.suite, one.task) == (suite, task)]
            for cell in cells
        }
        caption, parts, keyed = draw_scores(axes, series)
        captions[caption] = None
        keys += keyed
        name = task_words(suite, task)
        told += [f"{name} {part}" if len(tasks) > 1 else part for part in parts]
        if len(tasks) > 1:
            panel_title(axes, name)
    title = f"{suite if len(tasks) > 1 else task_words(suite, tasks[0])}, mean over seeds"
    return complete(panels, title, " ".join(captions), told, keys=keys)


def _limit(result: ExperimentResult) -> str:
    """A limit of the statistics, where it applies to what the comparison announces; otherwise empty."""
    announces = any(each.real for found in result.differences.values() for each in found)
    if not announces or len(result.cells) < 3 or all(len(cell.seeds) < 2 for cell in result.cells):
        return ""
    return (
        "Cells share their estimate of how much seeds vary. If seeds vary four times as much in one cell as in the "
        "others, about 5 % of comparisons without any effect announce one, and 8 % if that cell is the reference."
    )


def report_experiment(result: ExperimentResult, out: Path) -> tuple[Path, ...]:
    """Write the figures and the report page into the experiment's folder; returns the files, the page first."""
    # Imported here because matplotlib takes a second to import.
    from ropewalk.reporting.figures.drawing import draw_for_page

    pictures: list[Picture] = [
        draw_for_page(figure, out / name) for name, figure in experiment_figures(result).items()
    ]
    facts: dict[str, object] = {
        "Reference": result.reference,
        "Cells": ", ".join(f"{cell.name} ({len(cell.seeds)} seeds)" for cell in result.cells),
    }
    if limit := _limit(result):
        facts["Limit"] = limit
    if result.unfinished:
        facts["Not finished"] = f"{result.unfinished} runs"
    if result.failures:
        facts["Failed"] = "; ".join(
            f"{each.cell}, seed {each.seed}: {each.reason}" for each in result.failures
        )
    page = out / REPORT
    title = f"Comparison of {len(result.cells)} cells"
    write_page(Page(title, facts, pictures, experiment_tables(result), lead=result.conclusion), page)
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
        yield Text(f"{result.unfinished} runs are not finished; run the same command again to resume them")
    for path in files:
        yield Text(f"{'report' if path.suffix == '.html' else 'picture':8} {path}")
