"""Tables of two evaluations against each other, and of one over several checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ropewalk.evaluation.results import TaskResult
from ropewalk.io.lengths import format_length
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import (
    MISSING,
    ResultTable,
    Series,
    interval,
    marks_of,
    note_lines,
    number,
    of_model,
)

if TYPE_CHECKING:
    from ropewalk.evaluation.comparison import Difference

SMALLEST_P = 0.001


def comparison_table(differences: Sequence[Difference], names: tuple[str, str] = ("A", "B")) -> ResultTable:
    """Paired differences of two evaluations: B less A.

    Args:
        differences: from ``ropewalk.evaluation.comparison.compare``: percentage points, or percent of A's
            perplexity.
        names: of A and B.
    """
    marks = marks_of(map(_note, differences))
    units = dict.fromkeys(each.unit for each in differences)
    words = {"percent": "in percentage points", "perplexity": "in percent of the perplexity"}
    measure = " or ".join(words[unit] for unit in units)
    corrected = "real: adjusted p below 0.05, corrected (Holm) for all differences that were tested together"
    return ResultTable(
        f"{names[1]} less {names[0]}{f' {measure}' if measure else ''}, paired by sample, with 95 % interval",
        ("task", "length", "samples", *names, "change", "95 %", "p", "adjusted", "real"),
        tuple(_comparison_row(each, marks) for each in differences),
        notes=(corrected, *note_lines(marks)),
    )


def _comparison_row(each: Difference, marks: Mapping[str, str]) -> tuple[str, ...]:
    style: Callable[[float], str] = one_decimal if each.unit == "percent" else number
    real = MISSING if each.reason or math.isnan(each.p_adjusted) else "yes" if each.real else "no"
    return (
        task_words(each.suite, each.task),
        MISSING if each.length is None else format_length(each.length),
        f"{each.n:,}" if each.n else MISSING,
        style(each.score_a),
        style(each.score_b),
        difference_words(each),
        interval(each.ci95, signed),
        _p_words(each.p_value),
        _p_words(each.p_adjusted),
        real + marks.get(_note(each), ""),
    )


def _note(each: Difference) -> str:
    return f"not compared: {shown(each.reason)}" if each.reason else ""


def difference_words(each: Difference) -> str:
    """``+3.2``, in percent ``-1.4 %`` for a perplexity."""
    ending = " %" if each.unit == "perplexity" and not math.isnan(each.difference) else ""
    return signed(each.difference) + ending


def checkpoint_tables(series: Series) -> list[ResultTable]:
    """Means over checkpoints, and how far the checkpoints lie apart; a table a model."""
    tables = []
    for name, results in series.items():
        averaged = [result for result in results if result.details.get("checkpoints")]
        if not averaged:
            continue
        names = dict.fromkeys(shown(each["name"]) for r in averaged for each in r.details["checkpoints"])
        tables.append(
            ResultTable(
                f"Means over {len(names)} checkpoints{of_model(name, series)}, each asked all samples",
                ("task", "length", "samples", "unit", "mean", "sd", "lowest to highest"),
                tuple(map(_checkpoint_row, averaged)),
                notes=(f"checkpoints: {', '.join(names)}",),
            )
        )
    return tables


def _checkpoint_row(result: TaskResult) -> tuple[str, ...]:
    style: Callable[[float], str] = one_decimal if result.unit == "percent" else number
    spread = result.details.get("spread", {})
    return (
        task_words(result.suite, result.task),
        MISSING if result.length is None else format_length(result.length),
        f"{result.n:,}",
        "%" if result.unit == "percent" else result.unit,
        style(result.score),
        style(_or_nan(spread.get("sd"))),
        interval((_or_nan(spread.get("min")), _or_nan(spread.get("max"))), style),
    )


def task_words(suite: str, task: str) -> str:
    """The task, behind its suite where that is not plain."""
    return task if task == suite or (suite == "ruler" and task != "overall") else f"{suite} {task}"


def one_decimal(value: float) -> str:
    """As ``93.8``; a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:.1f}"


def signed(value: float) -> str:
    """As ``+3.2``; a dash where there is none."""
    return MISSING if math.isnan(value) else f"{value:+.1f}"


def _p_words(value: float) -> str:
    if math.isnan(value):
        return MISSING
    return f"<{SMALLEST_P:g}" if value < SMALLEST_P else f"{value:.3f}"


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)
