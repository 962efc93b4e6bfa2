"""How an answer is judged: pure functions from text to a share of 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean_prediction(text: str) -> str:
    """An answer as RULER judges it: stripped, control characters made newlines, stripped again.

    Source: NVIDIA/RULER at c3f5e3b, ``scripts/eval``.
    """
    return _CONTROL.sub("\n", text.strip()).strip()


def share_of_references(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that the answer holds, in any case of letters (RULER's ``all``)."""
    said = clean_prediction(prediction).lower()
    return sum(reference.lower() in said for reference in references) / len(references)


def any_reference(prediction: str, references: Sequence[str]) -> float:
    """1 if the answer holds any reference, in any case of letters (RULER's ``part``)."""
    said = clean_prediction(prediction).lower()
    return float(any(reference.lower() in said for reference in references))


def first_integer(prediction: str, references: Sequence[str]) -> float:
    """1 if the first integer of the answer is the reference (passkey, LongEval of base models)."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and _same_integer(found[0], references[0]))


def last_integer(prediction: str, references: Sequence[str]) -> float:
    """1 if the last integer of the answer is the reference (LongEval of chat models)."""
    found = re.findall(r"[0-9]+", prediction)
    return float(bool(found) and _same_integer(found[-1], references[0]))


def _same_integer(said: str, meant: str) -> bool:
    # As text: Python refuses to turn thousands of digits into a number, and a model may say them.
    return said.lstrip("0") == meant.lstrip("0")


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "all": share_of_references,
    "part": any_reference,
    "first integer": first_integer,
    "last integer": last_integer,
}
