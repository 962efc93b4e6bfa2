"""MRCR with the published chats: OpenAI's and Google's, whose texts language models wrote.

Lengths are those of the model's own tokenizer: a length has the questions that take more than half of it, with room for
twice the right answer. (OpenAI counts prompt and answer in o200k_base, Google names its files by its own tokens.)

Sources: https://huggingface.co/datasets/openai/mrcr (MIT); google-deepmind/eval_hub, ``mrcr_v2`` (Apache-2.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial

from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.mrcr import METRICS, NEEDLES
from ropewalk.evaluation.tasks.published.rows import PublishedSettings, PublishedTask, Question
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite

OPENAI, GOOGLE = "openai_mrcr", "google_mrcr"
ORIGINS = {
    OPENAI: "the parquet files of https://huggingface.co/datasets/openai/mrcr",
    GOOGLE: "the CSV files that mrcr_v2/download.sh of https://github.com/google-deepmind/eval_hub fetches",
}
GOOGLE_PREFIX = 12
"""Random characters before Google's right texts."""
ROOM = 256
"""Fewest tokens of room for an answer."""
NEEDLES_IN_NAME = re.compile(r"(?<![0-9])([248])needle")


def openai_question(row: Row, file: str, needles: int) -> Question | None:
    """A row of OpenAI's files, whose chat is a JSON list of turns; None if it has another number of needles."""
    if row["n_needles"] != needles:
        return None
    *earlier, last = ((str(turn["role"]), str(turn["content"])) for turn in json.loads(row["prompt"]))
    answer, prefix = str(row["answer"]), str(row["random_string_to_prepend"])
    if not answer.startswith(prefix):
        raise ValueError(f"its answer does not begin with {prefix!r}")
    details = {"difficulty": needles, "prefix_characters": len(prefix)}
    return Question(last[1], (answer,), details=details, earlier=tuple(earlier), answer=answer)


def google_question(row: Row, file: str, needles: int) -> Question | None:
    """A row of Google's files, whose chat is one text; None if the file's name has another number of needles."""
    found = NEEDLES_IN_NAME.search(file)
    if found is None:
        raise ValueError(f"the name {file} says no number of needles, such as 8needle")
    if int(found[1]) != needles:
        return None
    answer = row["answer"].strip()
    details = {"difficulty": needles, "prefix_characters": GOOGLE_PREFIX}
    return Question(row["queries"], (answer,), details=details, answer=answer)


QUESTIONS: Mapping[str, Callable[..., Question | None]] = {OPENAI: openai_question, GOOGLE: google_question}


def _suite(name: str, title: str, metric: str) -> GeneratedSuite:
    binned = {f"{name}_{needles}": needles for needles in NEEDLES}
    # Google's mean "up to 128K" is over all chats, which are not divided by their lengths.
    all_up_to = {f"{task}_up_to": needles for task, needles in binned.items()}

    def tasks(settings: BenchmarkSettings) -> Mapping[str, PublishedTask]:
        path = settings.of(PublishedSettings).benchmark_data.get(name)
        return {
            task: PublishedTask(
                name,
                task,
                metric,
                ROOM,
                ORIGINS[name],
                partial(QUESTIONS[name], needles=needles),
                path,
                binned=task in binned,
                twice_the_answer=True,
            )
            for task, needles in {**binned, **all_up_to}.items()
        }

    return GeneratedSuite(
        name=name,
        title=title,
        titles={
            **{task: f"{title}, {needles} needles" for task, needles in binned.items()},
            **{task: f"{title}, {needles} needles, all up to" for task, needles in all_up_to.items()},
        },
        figure="by length",
        default=tuple(binned),
        settings={"published": PublishedSettings},
        tasks=tasks,
        metrics=METRICS,
        further={metric: tuple(other for other in METRICS if other != metric)},
        from_file=True,
    )


OPENAI_SUITE = _suite(OPENAI, "OpenAI MRCR", "mrcr")
GOOGLE_SUITE = _suite(GOOGLE, "Google MRCR v2", "google")
