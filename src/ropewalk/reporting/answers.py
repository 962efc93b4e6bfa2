"""A folder of pages with all answers of one model, or of two side by side, which a browser opens from the disk.

A page on a disk can load scripts, but fetch nothing. So the data are scripts that call a function of the page: a small
index of all samples, by column; and the texts in chunks, which are loaded once a reader looks at them. Texts from
elsewhere are strings in those scripts, and the page never makes markup of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.excerpts import Part, gaps, needles, parts_of, unmarked
from ropewalk.evaluation.predictions import Prediction, SampleKey
from ropewalk.evaluation.prompt import turn_starts
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.score_rows import task_words
from ropewalk.evaluation.settings import ViewSettings
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.io.files import new_folder
from ropewalk.reporting.page import render
from ropewalk.reporting.shown_text import harmless, shown
from ropewalk.training.answers import Answers, ViewResult, paired, read_sides, whole_prompts

PAGE = "index.html"
CHUNK = 500
"""Samples whose texts are loaded together."""
MOST_CHARACTERS = 20_000
"""Characters kept of an answer, of thoughts, and of all references; longer texts lose their middle."""
MOST_IN_FACT = 200

Segment = str | int | list[str]
"""Of a text: the text itself, the number of characters left out, or ``needle`` or ``role`` with its text."""
Row = Sequence[Prediction | None]


def write_view(settings: ViewSettings) -> ViewResult:
    """Write the pages with the answers of one folder, or of two.

    Raises:
        RopewalkError: if a folder has no answers, two have no prompt in common, prompts cannot be made again, or the
            pages cannot be written.
    """
    sides = read_sides(settings.folder, settings.other)
    whole = whole_prompts(settings.folder, sides[0], settings.prompts) if settings.prompts else {}
    named = [settings.folder, *([] if settings.other is None else [settings.other])]
    title = f"Answers of {' and '.join(each.resolve().name for each in named)}"
    return write_answers(settings.pages, title, sides, whole)


def write_answers(
    out: Path, title: str, sides: Sequence[Answers], whole: Mapping[SampleKey, Sample] | None = None
) -> ViewResult:
    """Write the pages into a folder, which is replaced as a whole.

    Args:
        out: the folder.
        title: heading of the page.
        sides: the answers of one model, or of several.
        whole: samples whose prompts are shown in full.

    Raises:
        RopewalkError: if the folder holds something else, or cannot be written.
    """
    rows, prompts = paired(sides), dict(whole or {})
    of = [next(each for each in row if each is not None) for row in rows]
    with new_folder(_own(out)) as folder:
        templates = files("ropewalk.reporting").joinpath("templates")
        style = [
            templates.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "answers.css")
        ]
        (folder / "answers.css").write_text("".join(style), encoding="utf-8")
        script = templates.joinpath("answers.js").read_text(encoding="utf-8")
        (folder / "answers.js").write_text(script, encoding="utf-8")
        (folder / PAGE).write_text(render("answers.html.j2", title=title), encoding="utf-8")
        shown_in_full = [place for place, each in enumerate(of) if each.key in prompts]
        _write(folder / "data" / "index.js", "index", _index(sides, rows, of, shown_in_full))
        for number, start in enumerate(range(0, len(rows), CHUNK)):
            chunk = slice(start, start + CHUNK)
            texts = [_texts(row, one) for row, one in zip(rows[chunk], of[chunk], strict=True)]
            _write(folder / "data" / f"answers-{number}.js", "answers", number, texts)
            _write(
                folder / "data" / f"prompts-{number}.js",
                "prompts",
                number,
                [_prompt(row) for row in rows[chunk]],
            )
        for place in shown_in_full:
            segments = _whole(prompts[of[place].key])
            _write(folder / "data" / f"whole-{place}.js", "whole", place, segments)
    return ViewResult(out / PAGE, len(rows), sum(None not in row for row in rows), len(shown_in_full))


def _own(out: Path) -> Path:
    """The folder, if it is new, empty or has such pages; RopewalkError if replacing it would lose other files."""
    if out.is_dir() and any(out.iterdir()) and not (out / "data" / "index.js").is_file():
        raise RopewalkError(
            f"{out} holds other files, which the pages would replace; give --out a new folder"
        )
    return out


def _write(path: Path, function: str, *values: Any) -> None:
    """Write a script that calls a function of the page with JSON values.

    ASCII, so that no character of a text ends a line or a string of the script. Texts are never keys of an object,
    where ``__proto__`` would have a meaning.
    """
    path.parent.mkdir(exist_ok=True)
    given = ",".join(json.dumps(each, separators=(",", ":"), allow_nan=False) for each in values)
    path.write_text(f"{function}({given});\n", encoding="ascii")


def _index(
    sides: Sequence[Answers], rows: Sequence[Row], of: Sequence[Prediction], whole: Sequence[int]
) -> dict[str, Any]:
    """What filters and orders the samples, by column."""
    groups = [(key, sum(1 for _ in own)) for key, own in groupby(of, lambda each: each.key[:3])]
    return {
        "chunk": CHUNK,
        "groups": [
            [shown(task_words(suite, task), MOST_IN_FACT), length, count]
            for (suite, task, length), count in groups
        ],
        "sample": [each.index for each in of],
        "tokens": [each.prompt_tokens for each in of],
        "depth": _column([_depth(each) for each in of]),
        "difficulty": _column([_difficulty(each) for each in of]),
        "whole": whole,
        "sides": [_side(side.name, [row[place] for row in rows]) for place, side in enumerate(sides)],
    }


def _side(name: str, answers: Row) -> dict[str, Any]:
    return {
        "name": shown(name, MOST_IN_FACT),
        "score": [None if each is None or not each.has_score else round(each.score, 4) for each in answers],
        "new": [None if each is None else each.new_tokens for each in answers],
        "finished": [None if each is None else each.finished for each in answers],
    }


def _column(values: list[Any]) -> list[Any] | None:
    return None if all(each is None for each in values) else values


def _depth(prediction: Prediction) -> float | None:
    """Share of the text before the needle; None without a needle, or with several."""
    depths = prediction.details.get("depths", ())
    depth = prediction.details.get("depth", depths[0] if len(depths) == 1 else None)
    return round(depth, 4) if isinstance(depth, int | float) else None


def _difficulty(prediction: Prediction) -> str | float | None:
    found = prediction.details.get("difficulty")
    return found if found is None or isinstance(found, int | float) else shown(str(found), MOST_IN_FACT)


def _texts(row: Row, of: Prediction) -> list[Any]:
    """References and, for each side, the answer, the thoughts before it, and the scores by other metrics."""
    expected = _cut("\n".join(of.references))
    return [expected, [None if each is None else _answer(each) for each in row]]


def _answer(prediction: Prediction) -> list[Any]:
    suite = BY_NAME.get(prediction.suite)
    further = suite.further.get(prediction.metric, ()) if isinstance(suite, GeneratedSuite) else ()
    scores = [[prediction.metric, round(prediction.score, 4)]] if further else []
    scores += [[each, round(replace(prediction, metric=each).scored_again().score, 4)] for each in further]
    return [_cut(prediction.answer), _cut(prediction.thoughts), scores]


def _cut(text: str) -> list[Segment]:
    """A text, without its middle if it is long."""
    if len(text) <= MOST_CHARACTERS:
        return [harmless(text)] if text else []
    half = MOST_CHARACTERS // 2
    return [harmless(text[:half]), len(text) - 2 * half, harmless(text[-half:])]


def _prompt(row: Row) -> list[Any]:
    """Length in characters and excerpt of a prompt, and other facts about the sample."""
    of = next((each for each in row if each is not None and each.prompt), None)
    any_side = next(each for each in row if each is not None)
    facts = [
        [shown(name, MOST_IN_FACT), shown(each if isinstance(each, str) else json.dumps(each), MOST_IN_FACT)]
        for name, each in any_side.details.items()
        if name not in ("depth", "difficulty", "spans")
    ]
    if of is None or of.prompt_characters is None:
        return [None, [], facts]
    spans = of.details.get("spans", ())
    if not spans:
        # The first place of a reference is in one of the parts.
        spans = next(
            (
                [(start + begun, start + ended) for begun, ended in found]
                for start, text, _ in of.prompt
                if (found := needles(text, of.references))
            ),
            [],
        )
    return [of.prompt_characters, list(_segments(of.prompt, of.prompt_characters, spans)), facts]


def _whole(sample: Sample) -> list[Segment]:
    """All of a prompt."""
    text = sample.whole
    parts = parts_of(text, [(0, len(text))], turn_starts(sample.earlier, sample.text))
    spans = needles(text, sample.references, sample.details.get("spans", ()))
    return list(_segments(parts, len(text), spans))


def _segments(parts: Sequence[Part], characters: int, spans: Sequence[Sequence[int]]) -> Iterator[Segment]:
    for number, ((start, text, role), left_out) in enumerate(gaps(parts, characters)):
        if not number and start:
            yield start
        if role:
            yield ["role", shown(role, MOST_IN_FACT)]
        place = len(text) - len(unmarked(text, role))
        for first, last in sorted((begun - start, ended - start) for begun, ended in spans):
            begun, ended = max(first, place), min(last, len(text))
            if begun < ended:
                if text[place:begun]:
                    yield harmless(text[place:begun])
                yield ["needle", harmless(text[begun:ended])]
                place = ended
        if text[place:]:
            yield harmless(text[place:])
        if left_out:
            yield left_out
