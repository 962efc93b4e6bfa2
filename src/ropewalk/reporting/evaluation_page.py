"""The page of an evaluation: what was measured and how, figures, tables, and answers to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.evaluation.results import TaskResult
from ropewalk.io.lengths import format_length
from ropewalk.reporting.evaluation_tables import evaluation_tables
from ropewalk.reporting.page import Examples, Page, Picture, write_page
from ropewalk.reporting.shown_text import shown

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
        words = ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    else:
        words = _plain(value)
    return shown(words, MOST_IN_FACT)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return str(value)
