"""RULERv2's scores: references that are in an answer or near to it, and letters in a box.

Sources: NVIDIA/NeMo-Skills, ``evaluator/ruler.py`` (``eval_ruler2``); NVIDIA-NeMo/Skills at 8b18f39,
``evaluator/mcq.py`` (both Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.evaluation.backends.protocol import END_OF_THOUGHTS
from ropewalk.evaluation.samples import NO_DETAILS, Metric

ANSWER = "Answer:"
_COPIED = re.compile(r"Document \d+:(?:.*\n)+?\n")
"""A document that the answer repeats before it answers."""
_BOX = "\\boxed"
_ANSWER_LETTER = re.compile(
    r"[*_]{0,2}Answer[*_]{0,2}\s*:[\s*_]{0,2}\s*([A-Z])(?![a-zA-Z0-9])", re.IGNORECASE
)


def word_error_rate(said: str, right: str) -> float:
    """Levenshtein distance of the words of two texts, divided by the number of words of the right one.

    Raises:
        ZeroDivisionError: if the right text has no words.
    """
    heard, words = said.split(), right.split()
    row = list(range(len(words) + 1))
    for n, word in enumerate(heard, start=1):
        diagonal, row[0] = row[0], n
        for at, other in enumerate(words, start=1):
            diagonal, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, diagonal + (word != other))
    return row[-1] / len(words)


def _said(answer: str) -> str:
    return answer.rpartition(END_OF_THOUGHTS)[2].rpartition(ANSWER)[2]


def _near(said: str, references: Sequence[str]) -> list[float]:
    """For each reference 1 if the text contains it, ignoring case, else 1 minus the word error rate, at least 0."""
    lower = said.lower()
    return [
        1.0 if each in lower else max(1 - word_error_rate(lower, each), 0.0)
        for each in (reference.lower() for reference in references)
    ]


def found_or_near(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Mean over the references of 1 if the answer contains it, ignoring case, else 1 minus the word error rate.

    Only what follows the last end of thoughts and the last ``Answer:`` counts. The error rate changes nothing for
    references of one word, which an answer without errors contains.
    """
    return sum(_near(_said(answer), references)) / len(references)


def last_paragraph(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """:func:`found_or_near` of what follows the last empty line of the answer."""
    return found_or_near(_said(answer).rpartition("\n\n")[2], references)


def best_reference(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """The reference that is nearest to the answer, without the documents that the answer copies."""
    return max(_near(_COPIED.sub("", _said(answer)), references))


def boxed_letter(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    r"""1 if the last ``\boxed{}`` of the answer has the right letter, or the last ``Answer:`` if there is no box."""
    boxed = _boxed(answer)
    if boxed is None:
        letters = _ANSWER_LETTER.findall(answer)
    else:
        letters = [boxed] if len(boxed) == 1 else re.findall(r"\b[A-J]\b", boxed)
    return float(letters[-1:] == [references[0]])


def _boxed(text: str) -> str | None:
    """What the last box has between its braces; None without a box, or if its brace is not closed."""
    _, found, rest = text.rpartition(_BOX)
    if not found or not rest.startswith("{"):
        return None
    opened = 0
    for at, character in enumerate(rest):
        opened += (character == "{") - (character == "}")
        if opened == 0:
            return rest[1:at]
    return None


METRICS: Mapping[str, Metric] = {
    "ruler2": found_or_near,
    "ruler2_last_paragraph": last_paragraph,
    "ruler2_best": best_reference,
    "ruler2_letter": boxed_letter,
}
