"""The page with every prompt of a run's evaluations and its answers before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ropewalk.evaluation.answered_samples import AnsweredSample, gaps, read_answers
from ropewalk.evaluation.predictions import SampleKey
from ropewalk.evaluation.score_rows import task_words
from ropewalk.io.files import write_text
from ropewalk.reporting.page import render
from ropewalk.reporting.scores.evaluation import judged
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import counted

SAMPLES = "samples.html"
MOST_ON_PAGE = 4_000_000
"""Characters of prompts and answers that a page should hold; with more samples, less of each is shown."""
MOST_OF_A_TEXT, LEAST_OF_A_TEXT = 3000, 200
WHEN = ("before", "after")

_Parts = list[tuple[str, int]]
"""Parts of a text, each with the number of characters left out after it."""


@dataclass(frozen=True)
class ShownSample:
    """One sample as it is shown.

    Attributes:
        index: number of the sample within its task and length.
        summary: verdicts before and after.
        verdict: words by which samples are selected: ``better``, ``worse``, ``wrong``.
        tokens, characters: length of the prompt.
        prompt, expected: parts of the texts.
        answers: parts of the answers, by heading.
    """

    index: int
    summary: str
    verdict: str
    tokens: int
    characters: int
    prompt: _Parts
    expected: _Parts
    answers: Mapping[str, _Parts]


@dataclass(frozen=True)
class Group:
    """The samples of one task and length."""

    title: str
    samples: Sequence[ShownSample]


def write_samples_page(output: Path) -> Path | None:
    """Write ``samples.html`` into a run's folder.

    Returns:
        Its path; None if the run has no prompts with answers.

    Raises:
        RopewalkError: if a file cannot be read or written, or a line of it is damaged.
    """
    answers: dict[SampleKey, dict[str, AnsweredSample]] = {}
    for when in WHEN:
        for each in read_answers(output, when):
            answers.setdefault(each.prediction.key, {})[when] = each
    if not answers:
        return None
    # A sample has four texts: the prompt, the expected answer, and the answers before and after.
    most = min(MOST_OF_A_TEXT, max(LEAST_OF_A_TEXT, MOST_ON_PAGE // (4 * len(answers))))
    groups: dict[tuple[str, str, int], list[dict[str, AnsweredSample]]] = {}
    # By index; sorting is stable, so tasks and lengths keep their order.
    for (suite, task, length, _), found in sorted(answers.items(), key=lambda pair: pair[0][3]):
        groups.setdefault((suite, task, length), []).append(found)
    shown_groups = [_group(key, found, most) for key, found in groups.items()]
    about = (
        f"{counted([len(answers)], 'sample')}. Open one to see its prompt, the expected answer, and the answers before "
        "and after training. Long texts lose their middle; predictions-before.jsonl and predictions-after.jsonl in the "
        "run's folder have the whole answers."
    )
    script = files("ropewalk.reporting").joinpath("templates/samples.js").read_text(encoding="utf-8")
    page = render(
        "samples.html.j2",
        title="Prompts and answers before and after",
        about=about,
        groups=shown_groups,
        script=script,
    )
    write_text(output / SAMPLES, page)
    return output / SAMPLES


def _group(key: tuple[str, str, int], found: Sequence[Mapping[str, AnsweredSample]], most: int) -> Group:
    suite, task, length = key
    scores = []
    for when in WHEN:
        own = [each[when].prediction.score for each in found if when in each]
        if own:
            scores.append(f"{100 * sum(own) / len(own):.1f} % correct {when}")
    name = shown(task_words(suite, task), 100)
    title = f"{name} at {length:,} tokens: {counted([len(found)], 'sample')}, {', '.join(scores)}"
    return Group(title, [_sample(each, most) for each in found])


def _sample(found: Mapping[str, AnsweredSample], most: int) -> ShownSample:
    # The prompt is the same before and after.
    last = found[max(found, key=WHEN.index)]
    scores = {when: found[when].prediction.score for when in WHEN if when in found}
    verdicts = []
    if len(scores) == len(WHEN) and scores["before"] != scores["after"]:
        verdicts.append("better" if scores["after"] > scores["before"] else "worse")
    # Without an answer after training, there is none that is wrong.
    if scores.get("after", 1) < 1:
        verdicts.append("wrong")
    answers = {
        f"Answer {when}, {judged(score)}": _cut(
            found[when].prediction.answer or found[when].prediction.prediction or "(empty)", most
        )
        for when, score in scores.items()
    }
    return ShownSample(
        last.prediction.index,
        ", ".join(f"{judged(score)} {when}" for when, score in scores.items()),
        " ".join(verdicts),
        last.prediction.prompt_tokens,
        last.prompt_characters,
        [part for text, left_out in gaps(last) for part in _cut(text, most, left_out)],
        _cut(", ".join(last.prediction.references), most),
        answers,
    )


def _cut(text: str, most: int, left_out: int = 0) -> _Parts:
    """A text without its middle if it has more than ``most`` characters; ``left_out`` are those after it."""
    if len(text) <= most:
        return [(text, left_out)]
    return [(text[: most - most // 2], len(text) - most), (text[-(most // 2) :], left_out)]
