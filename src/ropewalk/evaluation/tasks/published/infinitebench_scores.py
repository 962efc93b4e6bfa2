"""InfiniteBench's scores of answers, those of the authors with their faults, and corrected ones beside them.

Source: OpenBMB/InfiniteBench at 88b3daa, ``src/compute_scores.py`` (MIT).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.evaluation.samples import NO_DETAILS, Metric

LETTERS = "ABCD"


def _words(answer: str, separators: str) -> list[str]:
    return answer.translate(dict.fromkeys(map(ord, separators), " ")).split()


def integer(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the first digits of the answer are the reference, else 0."""
    found = re.search(r"[0-9]+", answer)
    return float(found is not None and found[0] == references[0])


def word(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the reference is a word of the answer, else 0."""
    return float(references[0] in _words(answer, "\n:\"'.,?!{}"))


def name(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the first reference is a word of the answer in capitals, else 0; so no name of two words is ever right."""
    return float(references[0] in [each.upper() for each in _words(answer, "\n:\"'.,?!{}")])


def any_name(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer contains all words of any reference in a row, else 0."""
    said, *names = (
        f" {' '.join(_words(text.upper(), string.punctuation))} " for text in (answer, *references)
    )
    return float(any(each in said for each in names))


def number(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the first number of the answer is the reference, else 0; no sign is read."""
    found = re.search(r"[0-9]+(\.[0-9]+)?", answer)
    return float(found is not None and float(found[0]) == float(references[0]))


def returned(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the last word of the answer is the reference, else 0."""
    try:
        return float(int(_words(answer, "\n.`'\":")[-1]) == int(references[0]))
    except (IndexError, ValueError):
        return 0.0


def values(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Share of the right values before the first wrong one; no sign is read."""
    right = json.loads(references[0])
    # As texts: an answer may have a number of more digits than Python converts.
    said = [each.lstrip("0") or "0" for each in re.findall(r"[0-9]+", answer)]
    matches = (said[place : place + 1] == [str(each)] for place, each in enumerate(right))
    return next((place for place, match in enumerate(matches) if not match), len(right)) / len(right)


def f1(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """The largest F1 of words with a reference, without case, punctuation and articles."""
    return max(_f1(_english(answer), _english(each)) for each in references)


def f1_chinese(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """The largest F1 of characters with a reference, without case, punctuation and white space."""
    return max(_f1(_chinese(answer), _chinese(each)) for each in references)


def _english(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()


def _chinese(text: str) -> str:
    return "".join(text.lower().translate(_NO_PUNCTUATION | _NO_CHINESE_PUNCTUATION).split())


_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_NO_CHINESE_PUNCTUATION = dict.fromkeys(
    map(
        ord,
        "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
    )
)


def _f1(said: Sequence[str], right: Sequence[str]) -> float:
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / (len(said) + len(right)) if common else 0.0


def choice(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer has the right letter or option where the authors look for it, else 0.

    An answer that begins with one of the letters is a choice of this letter, even "Based on".
    """
    said = answer.strip()
    if said[:1] and said[0] in LETTERS:
        return float(said[0] in references)
    if said in references:
        return 1.0
    words = _words(said, "\n\"'.,?!{}")
    after = _after(" ".join(words), ("answer is:", "answer:", "answer is", "option is"))
    if after is not None:
        return float(after.startswith(tuple(references)))
    return float(next((each for each in words if each in LETTERS), None) in references)


def function(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer has the right letter or function where the authors look for it, else 0.

    A letter alone is not right.
    """
    said = answer.strip()
    if said.startswith((f"{references[1]}.", f"{references[1]}:")):
        return 1.0
    text = re.sub(r"[\n`'\"*-]|[Oo]ption", " ", said)
    after = _after(re.sub(" +", " ", text), ("answer is:", "is:", "answer:", "correct option is:"))
    return float(after is not None and after.startswith(tuple(references)))


_STATED = re.compile(
    r"(?:(?:answer|option|choice|error|function)(?: \w+){0,4} is:?|[Aa]nswer:|^)\W*(?:[Oo]ption )?([ABCD])\b(?! [a-z])"
)


def letter(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the last letter that the answer states is right, at its beginning or as in "the error is B", else 0."""
    stated = _STATED.findall(answer)
    return float(bool(stated) and stated[-1] == references[1])


def _after(text: str, prefixes: Sequence[str]) -> str | None:
    """What follows the first of these prefixes that occurs, without a character between them; None if none does."""
    for prefix in prefixes:
        _, found, after = text.partition(prefix)
        if found:
            return after[1:]
    return None


def summary(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """ROUGE-Lsum of the nearest reference, as the metric ``rouge`` of Hugging Face's evaluate computes it."""
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(["rougeLsum"], use_stemmer=False).score_multi(references, answer)
    return float(scores["rougeLsum"].fmeasure)


METRICS: Mapping[str, Metric] = {
    f"infinitebench_{each.__name__}": each
    for each in (
        *(integer, word, choice, summary, f1, f1_chinese, name, number, values, returned, function),
        *(letter, any_name),
    )
}
FURTHER: Mapping[str, tuple[str, ...]] = {
    "infinitebench_choice": ("infinitebench_letter",),
    "infinitebench_function": ("infinitebench_letter",),
    "infinitebench_name": ("infinitebench_any_name",),
}
