"""Effect of a run: paired differences between the results before and after it, and one sentence about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.comparison import ScoreDifference, compare
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import OVERALL, task_words
from ropewalk.reporting.scores.tables import comparison_table, difference_words, listed
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import ResultTable, interval, number, one_decimal, signed


def run_results(summary: Mapping[str, Any]) -> dict[str, list[TaskResult]]:
    """Results before and after training, from a summary."""
    return {when: [TaskResult.from_json(value) for value in summary[when]] for when in ("before", "after")}


def run_differences(summary: Mapping[str, Any]) -> list[ScoreDifference]:
    """Differences between the results before and after training, paired by sample; empty if nothing was measured."""
    results = run_results(summary)
    try:
        return compare(results["before"], results["after"])
    except RopewalkError:
        return []


def difference_tables(differences: Sequence[ScoreDifference]) -> list[ResultTable]:
    """The table of the differences, if there are any."""
    return [comparison_table(differences, ("before", "after"))] if differences else []


FEWEST_SAMPLES = 6
"""With fewer, the permutation test cannot give a p-value below 0.05: the least of 5 pairs is 2 in 32."""


def conclusion(trained: int, context: int, differences: Sequence[ScoreDifference]) -> str:
    """What became better and worse by more than chance, as far as it was measured, and what had too few samples.

    Args:
        trained, context: context before and after the run, in tokens.
        differences: result of :func:`run_differences`.
    """
    tested = [each for each in differences if each.reason is None]
    what = f"the context was extended from {trained:,} to {context:,} tokens"
    if trained == context:
        what = f"training at {context:,} tokens"
    if not differences:
        return f"Nothing was measured both before and after {what}."
    if not tested:
        reason = shown(str(differences[0].reason))
        return f"No score after {what} can be compared with that before: {reason}."
    real = sorted((each for each in tested if each.real), key=_order)
    better, worse = [d for d in real if _is_better(d)], [d for d in real if not _is_better(d)]
    # The first improvement of each unit and the first deterioration are named; the others are counted, and a
    # single other is named too.
    named = [*_first_of_each_unit(better), *worse[:1]]
    if not named:
        return (
            f"After {what}, no score differs by more than chance ({len(tested)} compared).{_too_few(tested)}"
        )
    clauses = [f"{_change(each)} ({_size(each, number == 0)})" for number, each in enumerate(named)]
    rest = len(tested) - len(named)
    if rest:
        # `named` has one of `worse` if there is any; all others in it are improvements.
        improved = len(better) - len(named) + bool(worse)
        worsened = len(worse) - bool(worse)
        kept = rest - improved - worsened
        counts = ((improved, "improved"), (worsened, "got worse"), (kept, "did not change"))
        if rest == 1:
            (other,) = (each for each in tested if each not in named)
            others = f"{_name(other)} {next(verb for count, verb in counts if count)}"
        else:
            others = (
                f"of {rest} other scores, {listed([f'{count} {verb}' for count, verb in counts if count])}"
            )
        clauses.append(f"{others} by more than chance")
    return f"After {what}, {'; '.join(clauses)}.{_too_few(tested)}"


def _too_few(tested: Sequence[ScoreDifference]) -> str:
    """A sentence on scores that could not have differed by more than chance, whatever they are."""
    few = [each for each in tested if each.n < FEWEST_SAMPLES]
    if not few:
        return ""
    # The longest first: it is what the run was made for.
    first, others = min(few, key=_order), len(few) - 1
    more = f" and {others} other score{'s' * (others > 1)}" if others else ""
    return (
        f" No difference in {_name(first)}{more} could be more than "
        f"chance, because fewer than {FEWEST_SAMPLES} samples were measured ({first.n})."
    )


def _name(each: ScoreDifference) -> str:
    """``passkey at 1,024 tokens``."""
    at = "" if each.length is None else f" at {each.length:,} tokens"
    return f"{shown(task_words(each.suite, each.task), 100)}{at}"


def _is_better(each: ScoreDifference) -> bool:
    # A lower perplexity is better.
    return each.difference > 0 if each.unit == "percent" else each.difference < 0


def _order(each: ScoreDifference) -> tuple[Any, ...]:
    """The longest inputs first, a mean over tasks before its tasks, then the largest difference."""
    return -(each.length or 0), each.task != OVERALL, -abs(each.difference)


def _first_of_each_unit(differences: Sequence[ScoreDifference]) -> list[ScoreDifference]:
    found: dict[str, ScoreDifference] = {}
    for each in differences:
        found.setdefault(each.unit, each)
    return list(found.values())


def _change(each: ScoreDifference) -> str:
    """``passkey at 1,024 tokens rose from 29 % to 100 %``."""
    style = number if each.unit == "perplexity" else lambda score: f"{one_decimal(score)} %"
    verb = "rose" if each.difference > 0 else "fell"
    return f"{_name(each)} {verb} from {style(each.score_a)} to {style(each.score_b)}"


def _size(each: ScoreDifference, first: bool) -> str:
    unit = " points" if each.unit == "percent" else ""
    return f"{difference_words(each)}{unit}, {'95 % interval ' if first else ''}{interval(each.ci95, signed)}"
