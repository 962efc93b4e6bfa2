"""AA-LCR: 100 questions about sets of documents of about 100,000 tokens, whose answers a judge reads.

Questions, documents and both prompts are those of Artificial Analysis. Their judge is Qwen3 235B A22B 2507 without
thinking; scores by another judge, or by their version 1.0 of the answers, are other ones. Questions that do not fit in
the length are not asked.

Source: https://huggingface.co/datasets/ArtificialAnalysis/AA-LCR (Apache-2.0).
"""

from __future__ import annotations

import contextlib
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ropewalk.data.read.files import read_text
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.rows import PublishedTask, Question, suite_of
from ropewalk.evaluation.tasks.suite import JUDGED, BenchmarkSettings, Judge, judged_grade
from ropewalk.io.files import is_plain

NAME = "aa_lcr"
ORIGIN = (
    "https://huggingface.co/datasets/ArtificialAnalysis/AA-LCR, a folder with AA-LCR_Dataset.csv and the folder lcr of "
    "AA-LCR_extracted-text.zip"
)
TEXTS = "lcr"
ROOM = 2048
BEFORE = "BEGIN INPUT DOCUMENTS\n\n"
DOCUMENT = "BEGIN DOCUMENT {number}:\n{text}\nEND DOCUMENT {number}"
AFTER = """

END INPUT DOCUMENTS

Answer the following question using the input documents provided above.

START QUESTION

{question}

END QUESTION
"""
JUDGE = """\
Assess whether the following CANDIDATE ANSWER is CORRECT or INCORRECT. For the CANDIDATE ANSWER to be correct, it must \
be consistent with the OFFICIAL ANSWER.

The question, for reference only: {question}
The OFFICIAL ANSWER: {official}
CANDIDATE ANSWER TO ASSESS: {candidate}

Reply only with CORRECT or INCORRECT."""
QUOTES = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
)


def question(row: Row, file: str, folder: Path) -> Question:
    """The question of a row, with its documents."""
    place = folder / TEXTS
    for name in (row["document_category"], str(row["document_set_id"])):
        if not is_plain(name):
            raise ValueError(f"{name!r} is not the name of a folder")
        place /= name
    found = {plain_name(each.name): each for each in place.iterdir()} if place.is_dir() else {}
    documents = []
    for name in filter(None, map(str.strip, row["data_source_filenames"].split(";"))):
        if plain_name(name) not in found:
            raise ValueError(f"its document {name!r} is not in {place}")
        documents.append(read_text(found[plain_name(name)]))
    numbered = [DOCUMENT.format(number=number, text=text) for number, text in enumerate(documents, 1)]
    return Question(
        "\n\n".join(numbered),
        (row["answer"],),
        BEFORE,
        AFTER.format(question=row["question"]),
        {"question": row["question"], "groups": {"category": row["document_category"]}},
    )


def plain_name(name: str) -> str:
    """A form in which the names of the table and those in the archive are equal.

    The archive writes UTF-8 without saying so, which some programs read as code page 437, and has other quotation
    marks.
    """
    with contextlib.suppress(UnicodeEncodeError, UnicodeDecodeError):
        name = name.encode("cp437").decode("utf-8")
    return unicodedata.normalize("NFC", name).translate(QUOTES)


def judge_prompt(answer: str, references: Sequence[str], details: Mapping[str, Any]) -> str:
    """What the judge reads."""
    return JUDGE.format(question=details["question"], official=references[0], candidate=answer)


def verdict(said: str) -> float | None:
    """1 if the judge says CORRECT as the first word, 0 for INCORRECT; None if it says neither."""
    first = said.lstrip(" *_`\n").upper()
    if first.startswith("CORRECT"):
        return 1.0
    return 0.0 if first.startswith("INCORRECT") else None


def _task(path: Path | None, settings: BenchmarkSettings) -> PublishedTask:
    if path is not None and not (path / TEXTS).is_dir():
        raise RopewalkError(f"{path} has no folder {TEXTS}; give the folder of {ORIGIN}")
    asked = partial(question, folder=path or Path())
    return PublishedTask(NAME, NAME, JUDGED, ROOM, ORIGIN, asked, path, documents=f"{TEXTS}/**/*.txt")


SUITE = suite_of(NAME, "AA-LCR", _task, {JUDGED: judged_grade}, judge=Judge(JUDGE, judge_prompt, verdict))
