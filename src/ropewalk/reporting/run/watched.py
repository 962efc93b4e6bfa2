"""Show a run while it trains: lines for a terminal, and a page that reloads itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from ropewalk.io.lengths import format_length
from ropewalk.reporting.figures.drawing import draw_for_page
from ropewalk.reporting.figures.training import training_figure
from ropewalk.reporting.page import Page, write_page
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.training.so_far import RunSoFar

LONGEST_SILENCE = 10
"""Steps' time without a step after which a run may have stopped."""


def facts_of(found: RunSoFar) -> dict[str, str]:
    """What a run does, by name."""
    facts = {"run": str(found.run), "model": found.model, "state": _state(found)}
    if not found.losses:
        return facts
    stage = f"{found.stage} of {found.stages}, " if found.stages > 1 else ""
    facts["stage"] = f"{stage}rows of {format_length(found.context)} tokens"
    facts["step"] = f"{found.step:,} of {found.steps:,}"
    finite = [loss for loss in found.losses if loss is not None]
    facts["loss"] = "not finite" if found.losses[-1] is None else f"{found.losses[-1]:.4f}"
    if finite:
        facts["loss"] += f" (first {finite[0]:.4f}, least {min(finite):.4f})"
    facts["tokens"] = f"{found.tokens:,}"
    if found.tokens_per_second:
        facts["tokens/s"] = f"{found.tokens_per_second:,.0f}"
    if found.memory is not None:
        facts["memory"] = f"{found.memory / 1e9:,.1f} GB at the peak"
    if found.seconds_left:
        longer = " or more, because later rows are longer" if found.stage < found.stages else ""
        left = timedelta(seconds=round(found.seconds_left))
        facts["time left"] = f"{left}{longer}, without evaluations"
    return facts


def _state(found: RunSoFar) -> str:
    silence = found.silent_seconds
    if found.state != "training" or silence is None or not found.tokens_per_second:
        return found.state
    of_a_step = found.tokens / max(1, len(found.losses)) / found.tokens_per_second
    if silence < max(60.0, LONGEST_SILENCE * of_a_step):
        return found.state
    return f"training; no step for {timedelta(seconds=round(silence))}: it evaluates, saves, or has stopped"


def scores_of(found: RunSoFar) -> ResultTable | None:
    """The scores so far, a row for each measurement and a column for each time; None before the first."""
    if not found.measured:
        return None
    times = list(dict.fromkeys(each.when for each in found.measured))
    values = {(each.name, each.when): each.score for each in found.measured}
    rows = tuple(
        (name, *("–" if (value := values.get((name, when))) is None else f"{value:,.4g}" for when in times))
        for name in dict.fromkeys(each.name for each in found.measured)
    )
    return ResultTable("Scores so far", ("task", *times), rows)


def describe_watched(found: RunSoFar) -> Iterator[Part]:
    """A run as lines for a terminal."""
    facts = facts_of(found)
    width = max(map(len, facts))
    for name, value in facts.items():
        yield f"{name:{width}}  {value}"
    if (table := scores_of(found)) is not None:
        yield ""
        yield table


def write_watched_page(found: RunSoFar, path: Path, seconds: float) -> None:
    """Write the page of a run, which reloads itself while the run is not finished.

    Args:
        found: the run.
        path: file to write, with the figure beside it.
        seconds: time after which it reloads.

    Raises:
        RopewalkError: if the page cannot be written.
    """
    table = scores_of(found)
    page = Page(f"{found.run.name}: {found.state}", facts_of(found), tables=() if table is None else (table,))
    if any(loss is not None for loss in found.losses):
        figure = training_figure([{"loss": loss} for loss in found.losses])
        page = replace(page, pictures=(draw_for_page(figure, path.with_suffix(".svg")),))
    if found.state != "finished":
        page = replace(page, reload_seconds=max(1, round(seconds)))
    write_page(page, path)
