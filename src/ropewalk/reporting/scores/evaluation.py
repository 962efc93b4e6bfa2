"""Show an evaluation: figures and the report page, and what the terminal says.

:data:`~ropewalk.evaluation.tasks.registry.SUITES` names the benchmarks in their order, with their titles and their kind
of figure. Any other benchmark gets a figure per task if its scores are percentages at several lengths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.evaluation.predictions import read_predictions
from ropewalk.evaluation.prompt import answer_in
from ropewalk.evaluation.record import PREDICTIONS, ComparisonResult, EvaluationResult
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import (
    OVERALL,
    ScoreRow,
    by_suite,
    by_task,
    haystack_words,
    is_by_length,
    score_rows,
)
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import EVERY_ROW
from ropewalk.io.files import plain_name
from ropewalk.io.lengths import format_length
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.figures.evaluation import (
    depth_curve_figure,
    difficulty_figure,
    needle_figure,
    perplexity_figure,
    retention_figure,
    score_figure,
    tasks_figure,
)
from ropewalk.reporting.page import Examples, Page, Picture, write_page
from ropewalk.reporting.scores.tables import comparison_table, evaluation_tables
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import Part

PAGE = "report.html"
MOST_EXAMPLES = 3
"""Number of example answers shown per task and length."""
EVERY_ANSWER = "ropewalk eval view, with the folder of this page, shows every answer in a browser"
MOST_REFERENCES = 10
MOST_CHARACTERS = 300
MOST_IN_FACT = 500

# Keys of a record, or of its settings, and their labels on the page, in reading order.
FACTS = {
    "model": "Model",
    "tokenizer": "Tokenizer",
    "tokens": "Tokens",
    "findings": "Summary",
    "answers": "Answers",
    "digest": "Digest of the model",
    "model_sha256": "SHA-256 of the model",
    "tokenizer_sha256": "SHA-256 of the tokenizer",
    "checkpoints": "Checkpoints",
    "suites": "Suites",
    "lengths": "Lengths",
    "samples": "Samples",
    "rows": "Sequences",
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


def evaluation_figures(
    model: str, results: Sequence[TaskResult], threshold: float
) -> Iterator[tuple[str, Figure]]:
    """Build the figures of one model's results, in reading order, by the stem of their file.

    Args:
        model: model name for titles.
        results: results of any benchmarks.
        threshold: score in percent that defines the effective length; marked in figures of scores by length.
    """
    rows = score_rows({model: results})
    for name, own in by_suite(rows).items():
        # A suite that did not run has its reasons in the table; an empty figure would add nothing.
        if any(row.ran for row in own):
            yield from _suite_figures(name, f"{model}: ", own, threshold)
    # Tasks without a length are short-context tasks, drawn together whatever their suite.
    short = [row for row in rows if row.length is None and row.unit == "percent"]
    if any(row.ran for row in short):
        yield "short", retention_figure(short, f"{model}: short-context tasks")


def _suite_figures(
    name: str, model: str, rows: Sequence[ScoreRow], threshold: float
) -> Iterator[tuple[str, Figure]]:
    suite = BY_NAME.get(name)
    kind = suite.figure if suite else "by length"
    tasks = {task: own for task, own in by_task(rows).items() if any(row.ran for row in own)}
    if kind == "by position":
        if own := longest_by_position(name, rows):
            yield name, perplexity_figure(own, _trained(own), f"{model}perplexity by position")
    elif kind == "by depth":
        # Behind a server, the teacher-forced task of the suite does not run.
        for task, own in tasks.items():
            yield f"{name}-{task}", needle_figure(own, f"{model}{name}{haystack_words(own)}, {task}")
    elif kind in ("by length", "tasks") and is_by_length(rows):
        yield from _breakdowns(name, model, tasks)
        measured = [row for row in rows if row.ran and row.length is not None]
        # All tasks share a figure if they have an overall score.
        if measured and (OVERALL in tasks or kind == "tasks"):
            title = f"{model}{(suite and suite.title) or name}"
            yield name, tasks_figure(rows, _trained(measured), title, threshold)
            return
        for task, own in tasks.items():
            if any(row in measured for row in own):
                is_main = task in (name, suite.main if suite else "")
                title = f"{model}{name}{haystack_words(own)}{'' if is_main else f', {task}'}"
                # A threshold that is a share of the base score differs from task to task.
                line = threshold if suite is None or suite.base_length is None else None
                figure = score_figure(own, _trained(own), title, line)
                yield name if is_main else f"{name}-{task}", figure


def _breakdowns(
    name: str, model: str, tasks: Mapping[str, Sequence[ScoreRow]]
) -> Iterator[tuple[str, Figure]]:
    """Figures by length and difficulty, and by depth, of tasks that have such scores.

    Tasks with one difficulty each, such as MRCR's numbers of needles, share a figure.
    """
    levels = {task: {row.difficulty for row in own} - {None} for task, own in tasks.items()}
    # Further metrics of the same answers, named task.metric, would be mixed with them.
    single = [task for task, found in levels.items() if len(found) == 1 and "." not in task]
    if len({level for task in single for level in levels[task]}) > 1:
        together = [row for task in single for row in tasks[task]]
        yield f"{name}-difficulty", difficulty_figure(together, f"{model}{name} by difficulty")
    for task, own in tasks.items():
        words = f"{model}{name if task == name else f'{name}, {task}'}"
        if len(levels[task]) > 1 and "." not in task:
            yield f"{name}-{task}-difficulty", difficulty_figure(own, f"{words} by difficulty")
        if "." not in task and any(row.facts.get("fifths") for row in own):
            yield f"{name}-{task}-depth", depth_curve_figure(own, f"{words} by depth")


def longest_by_position(name: str, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Scores of a suite by position at the longest length with any; none if its figure is of another kind."""
    suite = BY_NAME.get(name)
    known = [row for row in rows if row.cell is not None and math.isfinite(row.value)]
    if not known or suite is None or suite.figure != "by position":
        return []
    longest = max(row.length or 0 for row in known)
    return [row for row in rows if row.task == name and (row.length or 0) == longest]


def _trained(rows: Sequence[ScoreRow]) -> int | None:
    """Largest length that the config of the model states; None if no score says it."""
    stated = (row.facts.get("max_position_embeddings") for row in rows if row.ran)
    return next((int(each) for each in stated if each is not None), None)


def write_evaluation_report(
    folder: Path,
    record: Mapping[str, Any],
    results: Sequence[TaskResult],
    pictures: Sequence[Picture] = (),
    examples: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """Write ``report.html``, a self-contained page.

    Args:
        folder: output folder.
        record: JSON values about the run. Keys in ``FACTS``, here or in its ``settings``, appear at the top of the
            page; all values except the results are collapsed at its end. ``title`` replaces the default heading.
        results: results in any order.
        pictures: PNG or SVG files with their text alternatives.
        examples: predictions, each with ``suite``, ``task``, ``length``, ``index``, ``references``, ``prediction``,
            ``score`` (from 0 to 1) and optionally ``prompt``. They are read once, and only those shown are kept.

    Returns:
        Path of the page.

    Raises:
        RopewalkError: if an image cannot be read, or the page cannot be written.
    """
    model = shown(str(record.get("model", "model")), MOST_IN_FACT)
    # The record's own keys take precedence over its settings.
    known = {**record.get("settings", {}), **record}
    facts = {label: _fact(key, known[key]) for key, label in FACTS.items() if known.get(key) is not None}
    rest = {
        key: value for key, value in record.items() if key not in ("results", "title", "findings", "answers")
    }
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
    """Choose example predictions of each task and length: the first correct one and the first wrong ones.

    Args:
        predictions: predictions as in :func:`write_evaluation_report`, read once.
        most: number of predictions per task and length, at least 1.

    Returns:
        Examples in the order in which tasks and lengths first occur.
    """
    # One pass over the predictions, so that a file of any size is read without holding it.
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
    """Candidates for the examples of one task and length."""

    count: int = 0
    right: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    wrong: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    def add(self, prediction: Mapping[str, Any], most: int) -> None:
        kept = self.right if _is_right(prediction) else self.wrong
        # Bounded: a run may have millions of predictions, and only a few are shown.
        if len(kept) < most:
            kept.append((self.count, prediction))
        self.count += 1

    def chosen(self, most: int) -> list[Mapping[str, Any]]:
        """At most one correct prediction and wrong ones; more correct ones if there are few wrong ones. In order."""
        # One place is kept for a correct answer, if there is any.
        wrong = self.wrong[: most - bool(self.right)]
        chosen = [*self.right[: most - len(wrong)], *wrong]
        return [prediction for _, prediction in sorted(chosen, key=lambda pair: pair[0])]


def _is_right(prediction: Mapping[str, Any]) -> bool:
    return prediction["score"] is not None and prediction["score"] >= 1


def _heading(key: tuple[str, str, int | None], some: int, count: int) -> str:
    suite, task, length = key
    at = "" if length is None else f", {length:,} tokens"
    return f"{shown(task if suite == task else f'{suite} {task}', 100)}{at}: {some:,} of {count:,} answers"


def _entry(prediction: Mapping[str, Any]) -> dict[str, str]:
    references = [str(each) for each in prediction["references"]]
    expected = ", ".join(shown(each, 100) for each in references[:MOST_REFERENCES])
    more = len(references) - MOST_REFERENCES
    prompt, text = prediction.get("prompt"), str(prediction["prediction"])
    # Thoughts that did not end are shown, because they say why there is no answer.
    answer = answer_in(text, prediction.get("thoughts_opened")) or text
    return {
        "Sample": str(prediction["index"]),
        **({"End of prompt" if len(prompt) > MOST_CHARACTERS else "Prompt": _end(prompt)} if prompt else {}),
        "Expected": expected + (f" and {more:,} more" if more > 0 else ""),
        "Answer": shown(answer, MOST_CHARACTERS) or "(empty)",
        "Verdict": judged(prediction["score"]),
    }


def _end(prompt: str) -> str:
    # The end of a prompt contains the question.
    return ("… " if len(prompt) > MOST_CHARACTERS else "") + shown(prompt[-MOST_CHARACTERS:], MOST_CHARACTERS)


def judged(score: float | None) -> str:
    """Verdict on an answer with a score from 0 to 1."""
    if score is None:
        return "not scored"
    return "correct" if score >= 1 else "wrong" if score <= 0 else f"{100 * score:.3g} % correct"


def _fact(key: str, value: Any) -> str:
    """Format a value of the record as text. Untrusted text is shortened and made safe to show."""
    if key == "lengths" and isinstance(value, Sequence) and not isinstance(value, str):
        words = ", ".join(format_length(each) if isinstance(each, int) else str(each) for each in value)
    elif key == "tokens":
        words = str(value["source"])
    elif key == "samples" and value == EVERY_ROW:
        words = "all questions"
    elif key == "samples" and isinstance(value, Mapping):
        words = ", ".join(f"{name} {_fact('samples', each)}" for name, each in value.items())
    elif key == "checkpoints":
        words = ", ".join(str(each["name"]) for each in value)
    elif isinstance(value, Mapping):
        words = ", ".join(f"{name} {_fact_text(each)}" for name, each in value.items())
    else:
        words = _fact_text(value)
    return shown(words, MOST_IN_FACT)


def _fact_text(value: Any) -> str:
    # bool is a subclass of int, so test it first.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_fact_text, value))
    return str(value)


def describe_evaluation(result: EvaluationResult, out: Path | None) -> Iterator[Part]:
    """The results as tables, a summary in sentences, and the path of the report page."""
    backend = result.record.get("backend", {})
    if "address" in backend:
        # The command names a server, and perhaps not its model.
        where = backend.get("addresses", [backend["address"]])
        what = f"server{'s' if len(where) > 1 else ''} {', '.join(where)}"
        yield shown(f"{result.record['model']} on the {what}", MOST_IN_FACT)
        yield ""
    for number, table in enumerate(evaluation_tables({str(result.record["model"]): result.results})):
        if number:
            yield ""
        yield table
    notes = findings(result.record, result.results)
    if notes:
        yield ""
        yield from notes
    if out is not None:
        yield ""
        yield str(out / PAGE)


def describe_comparison(result: ComparisonResult) -> Iterator[Part]:
    """The models compared, their differences, and the number of significant ones."""
    yield f"A {result.a['model']} ({result.a['path']})"
    yield f"B {result.b['model']} ({result.b['path']})"
    yield ""
    yield comparison_table(result.differences)
    if result.notes:
        yield ""
        yield from result.notes
    # Differences without a test (a missing side, no common samples) count in neither number.
    real = [each for each in result.differences if each.real]
    tested = sum(each.reason is None for each in result.differences)
    yield ""
    if not tested:
        yield "no difference could be computed, for the reasons in the table"
        return
    yield (
        f"{len(real)} of {tested} differences are significant (paired by sample, family-wise error rate 5 %, Holm "
        "correction)"
    )


def findings(record: Mapping[str, Any], found: Sequence[TaskResult]) -> list[str]:
    """Summarize the results, one line each, and name lengths beyond the config's max_position_embeddings."""
    beyond = {r.length: r.details["max_position_embeddings"] for r in found if r.details.get("beyond_config")}
    notes = [*effective_sentences(record["summary"])]
    tokens = record.get("tokens") or {}
    if tokens.get("approximate"):
        notes.append(
            "Lengths are approximate: tokens are estimated from words, groups of three digits and marks, at "
            f"{tokens['tokens_per_piece']:.2f} tokens each in mixed text, scaled for each task by the server's count "
            "of one prompt"
        )
    if beyond:
        lengths = ", ".join(f"{length:,}" for length in sorted(length for length in beyond if length))
        stated = next(iter(beyond.values()))
        notes.append(f"Beyond the config's max_position_embeddings of {stated:,}: {lengths} tokens")
    return notes


def effective_sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """The effective length by each task, one line each."""
    for each in summary["effective_length"]:
        task = (
            each["suite"] if each["task"] in (each["suite"], "overall") else f"{each['suite']} {each['task']}"
        )
        bar = f"{each['threshold']:g} %"
        above, below = f"above {bar}", f"{bar} or less"
        if "base" in each:
            base, low, high = each["base"]
            bar = f"85 % of the base score, which is {base:.0f} % ({low:.0f}–{high:.0f})"
            above, below = f"at least {bar}", f"less than {bar}"
        if each["length"] is None:
            all_wrong = "base" in each and not each["base"][0]
            where = "all short lengths is 0 %" if all_wrong else f"the shortest length is {below}"
            yield f"Effective length by {task}: none; the score at {where}"
        else:
            # Nothing longer was measured, so the effective length may be larger.
            least = "at least " if each["length"] == each["longest"] else ""
            certain = each["certain"]
            if certain == each["length"]:
                confirmation = "; the 95 % intervals confirm it"
            else:
                confirmed = f"{certain:,}" if certain else "no length"
                confirmation = f"; the 95 % intervals confirm {confirmed}"
            yield f"Effective length by {task}: {least}{each['length']:,} ({above}{confirmation})"
    averages = summary["ruler_weighted_average"]
    if averages is not None:
        yield (
            f"RULER weighted average over lengths: {averages['increasing']:.1f} with weights increasing with length, "
            f"{averages['decreasing']:.1f} with weights decreasing"
        )


def report_evaluation(out: Path, result: EvaluationResult) -> None:
    """Write the figures and the report page of a result into a folder, each file atomically."""
    record, found = result.record, result.results
    name = Path(str(record["model"])).name
    pictures = pictures_of(out, name, found, record["settings"]["threshold"])
    # None leaves the fact out of the page.
    answers = EVERY_ANSWER if (out / PREDICTIONS).is_file() else None
    shown = {**record, "findings": ". ".join(findings(record, found)) or None, "answers": answers}
    write_evaluation_report(out, shown, found, pictures, _examples(out, found))


def pictures_of(out: Path, name: str, found: Sequence[TaskResult], threshold: float) -> list[Picture]:
    """Draw the figures of a result, in the order of the page."""
    # Imported here because matplotlib takes a second to import.
    from ropewalk.reporting.figures.drawing import draw_for_page

    # Task names come from results.json, which may be untrusted, so they must not escape the folder.
    return [
        draw_for_page(figure, out / plain_name(f"{stem}.png", out / "results.json"))
        for stem, figure in evaluation_figures(name, found, threshold)
    ]


def _examples(out: Path, found: Sequence[TaskResult]) -> Iterator[dict[str, Any]]:
    """Iterate over the predictions of these results; the page keeps a few."""
    wanted = {(result.suite, result.task, result.length) for result in found}
    for prediction in read_predictions(out / PREDICTIONS):
        if (prediction.suite, prediction.task, prediction.length) in wanted:
            # Its last part ends with the question.
            score = prediction.score if prediction.has_score else None
            prompt = prediction.prompt[-1][1] if prediction.prompt else ""
            yield {**prediction.to_json(), "prompt": prompt, "score": score}
