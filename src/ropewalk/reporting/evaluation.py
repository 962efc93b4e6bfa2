"""How an evaluation is shown: its tables, figures and page, derived from the results, with one place for exceptions.

A benchmark that :data:`BENCHMARKS` does not name is shown by what its results say of themselves: percentages at several
lengths as a table and a figure a task (by depth too, where there are depths), all others as one table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.evaluation.record import ComparisonResult, EvaluationResult
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.store import PREDICTIONS, read_predictions
from ropewalk.evaluation.tasks.registry import SUITES
from ropewalk.io.files import plain_name
from ropewalk.io.lengths import format_length
from ropewalk.reporting.figures.evaluation import (
    needle_figure,
    perplexity_figure,
    retention_figure,
    score_figure,
    tasks_figure,
)
from ropewalk.reporting.page import Examples, Page, Picture, write_page
from ropewalk.reporting.primitives import Figure
from ropewalk.reporting.score_tables import (
    OVERALL,
    Series,
    checkpoint_tables,
    comparison_table,
    document_tables,
    haystack_words,
    key_token_table,
    length_tables,
    perplexity_tables,
    plain_table,
    task_tables,
    task_words,
)
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import Part, ResultTable

PAGE = "report.html"
MOST_EXAMPLES = 3
"""Answers of one task and length that are shown."""
MOST_REFERENCES = 10
MOST_CHARACTERS = 300
MOST_IN_FACT = 500

# From the keys of a record, or of the settings in it, to the words of the page, in the order to be read.
FACTS = {
    "model": "Model",
    "findings": "In short",
    "digest": "Digest of the model",
    "model_sha256": "SHA-256 of the model",
    "tokenizer_sha256": "SHA-256 of the tokenizer",
    "checkpoints": "Checkpoints",
    "suites": "Suites",
    "lengths": "Lengths",
    "samples": "Samples",
    "rows": "Rows of text",
    "text": "Text",
    "seed": "Seed",
    "chat": "Chat template",
    "backend": "Backend",
    "notes": "Notes",
    "engine": "Attention engine",
    "dtype": "Dtype",
    "device": "Device",
    "exact_rope": "Exact RoPE",
    "date": "Date",
    "versions": "Versions",
}

Figures = Iterator[tuple[str, Figure]]
"""Stems of files, and what is drawn in them."""


@dataclass(frozen=True)
class Presentation:
    """What the results of a benchmark do not say of how they are shown.

    Attributes:
        title: its name in headings; the name in the results where it is empty.
        tasks: what tasks by length are called; ``*`` in a name and its title stands for the rest of the name, and
            ``{haystack}`` for the haystack that was run. Named tasks have their tables even where nothing was run.
        main: the task whose files bear the benchmark's name alone.
        tables: all its tables, from results by model and the title, in place of those that results ask for.
        figures: its figures, from the benchmark's title, the model's name and the results.
    """

    title: str = ""
    tasks: Mapping[str, str] = field(default_factory=dict)
    main: str = ""
    tables: Callable[[Series, str], list[ResultTable]] | None = None
    figures: Callable[[str, Sequence[TaskResult]], Figures] | None = None

    def task_title(self, suite: str, task: str) -> str:
        """What a task is called in the heading of a table."""
        for name, title in self.tasks.items():
            start, star, _ = name.partition("*")
            if task == name or (star and task.startswith(start)):
                return title.replace("*", task.removeprefix(start))
        return task_words(self.title or suite, task)


def _needle_grids(model: str, results: Sequence[TaskResult]) -> Figures:
    for task, same in _by_task(results).items():
        suite = same[0].suite
        yield f"{suite}-{task}", needle_figure(same, f"{model}: {suite}{haystack_words(same)}, {task}")


def _by_position(model: str, results: Sequence[TaskResult]) -> Figures:
    """Of the longest rows."""
    curves = [r for r in results if any(math.isfinite(each.perplexity) for each in r.positions)]
    if curves:
        longest = max(curves, key=lambda result: result.length or 0)
        yield (
            "perplexity",
            perplexity_figure({model: longest}, _trained(longest), f"{model}: perplexity by position"),
        )


def _no_figures(model: str, results: Sequence[TaskResult]) -> Figures:
    yield from ()


def _plain(series: Series, title: str) -> list[ResultTable]:
    return [plain_table(series, title)]


TABLES: Mapping[str, Callable[[Series, str], list[ResultTable]]] = {
    "perplexity": lambda series, title: [*perplexity_tables(series), *document_tables(series)],
    "longppl": lambda series, title: [key_token_table(series)],
}
"""Benchmarks with tables of their own."""
TABLES_OF_KIND: Mapping[str | None, Callable[[Series, str], list[ResultTable]]] = {
    "tasks": task_tables,
    "bars": _plain,
}
FIGURES_OF_KIND: Mapping[str | None, Callable[[str, Sequence[TaskResult]], Figures]] = {
    "by depth": _needle_grids,
    "by position": _by_position,
    None: _no_figures,
}
"""By a benchmark's kind of figure; all others are drawn by length."""

BENCHMARKS: dict[str, Presentation] = {
    suite.name: Presentation(
        suite.title,
        suite.titles,
        suite.main,
        TABLES.get(suite.name, TABLES_OF_KIND.get(suite.figure)),
        FIGURES_OF_KIND.get(suite.figure),
    )
    for suite in SUITES
}
"""Benchmarks in the order in which they are shown, as their suites say; others follow."""


def evaluation_tables(series: Series) -> list[ResultTable]:
    """Every table that shows these results.

    Args:
        series: results by model name. Where a table holds one model, several follow one another; otherwise they
            stand side by side.

    Returns:
        No table for a benchmark that nobody ran, at least one for every other.
    """
    tables = []
    for suite in _in_order(result for results in series.values() for result in results):
        part = {name: [r for r in results if r.suite == suite] for name, results in series.items()}
        tables += _tables_of(suite, part)
    return [*tables, *checkpoint_tables(series)]


def _tables_of(suite: str, part: Series) -> list[ResultTable]:
    known = BENCHMARKS.get(suite, Presentation())
    title = known.title or suite
    if known.tables is not None:
        return known.tables(part, title)
    every = [result for results in part.values() for result in results]
    tasks = _by_task(every)
    if not known.tasks and not _is_by_length(every):
        return [plain_table(part, title)]
    if OVERALL in tasks:
        return task_tables(part, title)
    return [
        table for task in tasks for table in length_tables(part, suite, task, known.task_title(suite, task))
    ]


def evaluation_figures(model: str, results: Sequence[TaskResult], threshold: float) -> Figures:
    """What there is to draw of one model's results, in the order to look at it.

    Args:
        model: its name, for titles.
        results: of any benchmarks.
        threshold: percent that an effective length has to reach, marked in scores by length.
    """
    for suite in _in_order(results):
        of_suite = [result for result in results if result.suite == suite]
        if any(result.status == "ok" for result in of_suite):
            known = BENCHMARKS.get(suite, Presentation())
            drawer = known.figures
            yield from (
                drawer(model, of_suite) if drawer else _by_length(model, suite, known, of_suite, threshold)
            )
    short = [r for r in results if r.length is None and r.unit == "percent"]
    if any(result.status == "ok" for result in short):
        yield "short", retention_figure({model: short}, f"{model}: short-context tasks")


def _by_length(
    model: str, suite: str, known: Presentation, results: Sequence[TaskResult], threshold: float
) -> Figures:
    """All tasks in one figure where they have an overall score, else a figure a task."""
    tasks = _by_task(results)
    measured = [result for result in results if result.status == "ok" and result.length is not None]
    if not measured or not _is_by_length(results):
        return
    if OVERALL in tasks or known.tables is task_tables:
        title = f"{model}: {known.title or suite}"
        yield suite, tasks_figure(results, _trained(measured[0]), title, threshold)
        return
    for task, same in tasks.items():
        ran = [result for result in same if result.status == "ok" and result.length is not None]
        if ran:
            is_main = task in (suite, known.main)
            title = f"{model}: {suite}{haystack_words(same)}{'' if is_main else f', {task}'}"
            figure = score_figure({model: same}, _trained(ran[0]), title, threshold)
            yield suite if is_main else f"{suite}-{task}", figure


def _in_order(results: Iterable[TaskResult]) -> list[str]:
    present = dict.fromkeys(result.suite for result in results)
    return [
        *(suite for suite in BENCHMARKS if suite in present),
        *(s for s in present if s not in BENCHMARKS),
    ]


def _by_task(results: Iterable[TaskResult]) -> dict[str, list[TaskResult]]:
    tasks: dict[str, list[TaskResult]] = {}
    for result in results:
        tasks.setdefault(result.task, []).append(result)
    return tasks


def _is_by_length(results: Sequence[TaskResult]) -> bool:
    return all(r.unit == "percent" for r in results) and any(r.length is not None for r in results)


def _trained(result: TaskResult) -> int | None:
    stated = result.details.get("max_position_embeddings")
    return None if stated is None else int(stated)


def write_evaluation_report(
    folder: Path,
    record: Mapping[str, Any],
    results: Sequence[TaskResult],
    pictures: Sequence[Picture] = (),
    examples: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """Write ``report.html``, one file that needs no other.

    Args:
        folder: where it goes.
        record: JSON values about the run; those that ``FACTS`` names head the page, here or in its
            ``settings``; all but the results are folded away at its end. ``title`` is the heading if it is there.
        results: in any order.
        pictures: PNG or SVG files, with what they show.
        examples: predictions, each with ``suite``, ``task``, ``length``, ``index``, ``references``,
            ``prediction``, ``score`` (share of 1) and perhaps ``prompt``. They are read once, and only the few
            that are shown are kept.

    Returns:
        The page.

    Raises:
        RopewalkError: if a picture cannot be read, or the page cannot be written.
    """
    model = shown(str(record.get("model", "model")), MOST_IN_FACT)
    known = {**record.get("settings", {}), **record}
    facts = {label: _fact(key, known[key]) for key, label in FACTS.items() if known.get(key) is not None}
    rest = {key: value for key, value in record.items() if key not in ("results", "title", "findings")}
    page = Page(
        shown(str(record.get("title", f"Evaluation of {model}")), MOST_IN_FACT),
        facts,
        pictures,
        evaluation_tables({model: results}),
        chosen_examples(examples),
        {"Record": json.dumps(rest, indent=2, default=str)},
    )
    write_page(page, folder / PAGE)
    return folder / PAGE


def chosen_examples(predictions: Iterable[Mapping[str, Any]], most: int = MOST_EXAMPLES) -> list[Examples]:
    """A few predictions of each task and length: the first right one and the first wrong ones.

    Args:
        predictions: as of :func:`write_evaluation_report`; of any number, read once.
        most: predictions of a task and length, at least 1.

    Returns:
        In the order in which tasks and lengths first occur.
    """
    groups: dict[tuple[str, str, int | None], _Group] = {}
    for each in predictions:
        key = each["suite"], each["task"], each["length"]
        groups.setdefault(key, _Group()).add(each, most)
    chosen = {key: group.chosen(most) for key, group in groups.items()}
    return [
        Examples(_heading(key, len(some), groups[key].count), tuple(map(_entry, some)))
        for key, some in chosen.items()
    ]


@dataclass
class _Group:
    """The predictions of one task and length, as far as they may be shown."""

    count: int = 0
    right: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    wrong: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    def add(self, prediction: Mapping[str, Any], most: int) -> None:
        kept = self.right if _is_right(prediction) else self.wrong
        if len(kept) < most:
            kept.append((self.count, prediction))
        self.count += 1

    def chosen(self, most: int) -> list[Mapping[str, Any]]:
        """One right one where there is one, wrong ones, and more right ones if those are few; in their order."""
        wrong = self.wrong[: most - bool(self.right)]
        chosen = [*self.right[: most - len(wrong)], *wrong]
        return [prediction for _, prediction in sorted(chosen, key=lambda pair: pair[0])]


def _is_right(prediction: Mapping[str, Any]) -> bool:
    return prediction["score"] is not None and prediction["score"] >= 1


def _heading(key: tuple[str, str, int | None], some: int, count: int) -> str:
    suite, task, length = key
    at = "" if length is None else f", {format_length(length)} tokens"
    return f"{shown(task if suite == task else f'{suite} {task}', 100)}{at}: {some:,} of {count:,} answers"


def _entry(prediction: Mapping[str, Any]) -> dict[str, str]:
    references = [str(each) for each in prediction["references"]]
    told = ", ".join(shown(each, 100) for each in references[:MOST_REFERENCES])
    more = len(references) - MOST_REFERENCES
    prompt = prediction.get("prompt")
    return {
        "Sample": str(prediction["index"]),
        **({"Prompt ends" if len(prompt) > MOST_CHARACTERS else "Prompt": _end(prompt)} if prompt else {}),
        "Expected": told + (f" and {more:,} more" if more > 0 else ""),
        "Answer": shown(str(prediction["prediction"]), MOST_CHARACTERS) or "(empty)",
        "Judged": _judged(prediction["score"]),
    }


def _end(prompt: str) -> str:
    return ("… " if len(prompt) > MOST_CHARACTERS else "") + shown(prompt[-MOST_CHARACTERS:], MOST_CHARACTERS)


def _judged(score: float | None) -> str:
    if score is None:
        return "not scored"
    return "right" if score >= 1 else "wrong" if score <= 0 else f"{100 * score:.3g} % right"


def _fact(key: str, value: Any) -> str:
    """A value of the record in words; what others wrote is cut and made harmless."""
    if key == "lengths" and isinstance(value, Sequence) and not isinstance(value, str):
        words = ", ".join(format_length(each) if isinstance(each, int) else str(each) for each in value)
    elif key == "checkpoints":
        words = ", ".join(str(each["name"]) for each in value)
    elif isinstance(value, Mapping):
        words = ", ".join(f"{name} {_fact_text(each)}" for name, each in value.items())
    else:
        words = _fact_text(value)
    return shown(words, MOST_IN_FACT)


def _fact_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_fact_text, value))
    return str(value)


def describe_evaluation(result: EvaluationResult, out: Path | None) -> Iterator[Part]:
    """The results as tables, what they amount to, and where the page of their folder lies."""
    for number, table in enumerate(evaluation_tables({str(result.record["model"]): result.results})):
        if number:
            yield ""
        yield table
    told = findings(result.record, result.results)
    if told:
        yield ""
        yield from told
    if out is not None:
        yield ""
        yield str(out / PAGE)


def describe_comparison(result: ComparisonResult) -> Iterator[Part]:
    """What was compared, the differences, and how many of them are more than chance."""
    yield f"A {result.a['model']} ({result.a['path']})"
    yield f"B {result.b['model']} ({result.b['path']})"
    yield ""
    yield comparison_table(result.differences)
    real = [each for each in result.differences if each.real]
    tested = sum(each.reason is None for each in result.differences)
    yield ""
    yield (
        f"{len(real)} of {tested} differences are more than chance (paired by sample; 5 % over all of them together, "
        "after Holm)"
    )


def findings(record: Mapping[str, Any], found: Sequence[TaskResult]) -> list[str]:
    """What the results amount to, a line each, and whether lengths are beyond what the model was made for."""
    beyond = {r.length: r.details["max_position_embeddings"] for r in found if r.details.get("beyond_config")}
    told = [*effective_sentences(record["summary"])]
    if beyond:
        lengths = ", ".join(f"{length:,}" for length in sorted(length for length in beyond if length))
        stated = next(iter(beyond.values()))
        told.append(f"Beyond the config's max_position_embeddings of {stated:,}: {lengths} tokens")
    return told


def effective_sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """How long a context every task was good for, a line each."""
    for each in summary["effective_length"]:
        task = (
            each["suite"] if each["task"] in (each["suite"], "overall") else f"{each['suite']} {each['task']}"
        )
        bar = f"{each['threshold']:g} %"
        if each["length"] is None:
            yield f"Effective length by {task}: none, the shortest scores {bar} or less"
        else:
            least = "at least " if each["length"] == each["longest"] else ""
            certain = each["certain"]
            if certain == each["length"]:
                told = ", certain by the intervals"
            else:
                told = f", certain to {format_length(certain)}" if certain else ", certain at no length"
            yield f"Effective length by {task}: {least}{format_length(each['length'])} (above {bar}{told})"
    averages = summary["ruler_weighted_average"]
    if averages is not None:
        yield (
            f"RULER over lengths: {averages['increasing']:.1f} with weights that rise with the length, "
            f"{averages['decreasing']:.1f} with weights that fall"
        )


def report_evaluation(out: Path, result: EvaluationResult) -> None:
    """Write the figures and the page of a result into a folder, each complete or not there."""
    record, found = result.record, result.results
    name = Path(str(record["model"])).name
    pictures = pictures_of(out, name, found, record["settings"]["threshold"])
    shown = {**record, "findings": ". ".join(findings(record, found)) or None}
    write_evaluation_report(out, shown, found, pictures, _examples(out, found))


def pictures_of(out: Path, name: str, found: Sequence[TaskResult], threshold: float) -> list[Picture]:
    """Figures where there is something to draw, in the order of the page."""
    # Imported here, for matplotlib takes a second.
    from ropewalk.reporting.drawing import draw

    # A task is named by results.json, which may have come from elsewhere.
    return [
        draw(figure, out / plain_name(f"{stem}.png", out / "results.json"))
        for stem, figure in evaluation_figures(name, found, threshold)
    ]


def _examples(out: Path, found: Sequence[TaskResult]) -> Iterator[dict[str, Any]]:
    """The predictions of these results, one after the other; the page takes a few."""
    wanted = {(result.suite, result.task, result.length) for result in found}
    for prediction in read_predictions(out / PREDICTIONS):
        if (prediction.suite, prediction.task, prediction.length) in wanted:
            yield prediction.to_json()
