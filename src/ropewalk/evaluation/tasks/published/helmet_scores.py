"""HELMET's scores without a judge: right answers in an answer, and the NDCG of a ranking.

Only the first line of an answer counts: HELMET ends an answer with its line.

Source: princeton-nlp/HELMET at 4526dfb, ``utils.py`` (MIT).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.evaluation.samples import NO_DETAILS
from ropewalk.evaluation.tasks.icl import normalised_words

CUT = 10
_RANKING = re.compile(r"\d+(?:\s*>\s*\d+)*")
_BEFORE = re.compile("^answer:", re.IGNORECASE)


def substring_match(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the first line contains a right answer, without regard to case, punctuation and articles, else 0."""
    line = answer.strip().partition("\n")[0]
    said = [f"answer:{line}", _BEFORE.sub("", line.strip())]
    texts = [" ".join(normalised_words(each)) for each in said]
    return float(any(" ".join(normalised_words(each)) in text for each in references for text in texts))


def ndcg_at_10(answer: str, references: Sequence[str], details: Mapping[str, Any]) -> float:
    """NDCG at 10 of the longest ranking ``3 > 1 > 2`` in the first line, to five digits as published.

    ``details["relevance"]`` has the relevance of each document that has one, by its id.
    """
    line = re.sub(r"[\[\]:]", "", answer.strip().partition("\n")[0]).lower().replace("id", "")
    ranking = max(_RANKING.findall(line), key=len, default="")
    ranked = list(dict.fromkeys(each.strip() for each in ranking.split(">")))
    relevance: Mapping[str, int] = details["relevance"]
    best = gain(sorted(relevance.values(), reverse=True), CUT)
    return round(gain([relevance.get(each, 0) for each in ranked], CUT) / best, 5) if best else 0.0


def gain(relevances: Sequence[int], cut: int) -> float:
    """Discounted cumulative gain at ``cut`` of the relevances of a ranking, as trec_eval computes it."""
    return sum(each / math.log2(place) for place, each in enumerate(relevances[:cut], start=2))
