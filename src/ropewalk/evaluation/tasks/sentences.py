"""Where sentences of prose end, decided from one word and the next.

A word ends a sentence if it ends in a full stop, question or exclamation mark (closing quotes and brackets may
follow), is no abbreviation and no initial, and the next word begins with a capital letter or a digit (opening
quotes and brackets may stand before). Since no other words matter, the sentences of a text's beginning are the
beginning of its sentences: a haystack is split once and cut to any length. Time is linear in the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

_CLOSING = "\"')]}»”’*_"
_OPENING = "\"'([{«“‘*_"
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "rev", "gen", "sen", "rep", "gov", "hon", "jr", "sr"),
        *("vs", "cf", "e.g", "i.e", "al", "ca", "approx", "vol", "ed", "eds", "p", "pp", "fig", "figs"),
        *("eq", "sec", "ch", "inc", "ltd", "co", "corp", "dept", "univ", "jan", "feb", "mar", "apr", "jun"),
        *("jul", "aug", "sep", "sept", "oct", "nov", "dec"),
    )
)


def sentence_ends(words: Sequence[str]) -> list[int]:
    """Where the sentences end.

    Args:
        words: of a text, in order.

    Returns:
        For each sentence the number of words up to its end, ascending; the last is ``len(words)``.
    """
    if not words:
        return []
    ends = [
        at
        for at, word in enumerate(words[:-1], start=1)
        if word.rstrip(_CLOSING).endswith((".", "?", "!")) and _ends_sentence(word, words[at])
    ]
    return [*ends, len(words)]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text whose words stand one space apart; joined by spaces they are the text again."""
    words = text.split(" ")
    starts = [0, *sentence_ends(words)]
    return [" ".join(words[start:end]) for start, end in pairwise(starts)]


class Prose:
    """A haystack of words, repeated from the beginning where more are asked for than there are.

    Args:
        words: of a text, at least one.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._cycle = list(words)
        self._words = self._cycle
        self._ends = sentence_ends(self._words)

    def words(self, count: int) -> list[str]:
        """The first ``count`` words."""
        self._reach(count)
        return self._words[:count]

    def sentence_ends(self, count: int) -> list[int]:
        """As :func:`sentence_ends` of the first ``count`` words."""
        self._reach(count)
        if count == 0:
            return []
        return [*self._ends[: bisect_left(self._ends, count)], count]

    def _reach(self, count: int) -> None:
        if count > len(self._words):
            self._words = self._cycle * -(-count // len(self._cycle))
            self._ends = sentence_ends(self._words)


def _ends_sentence(word: str, following: str) -> bool:
    core = word.strip(_OPENING + _CLOSING)
    if core.endswith(".") and not core.endswith(".."):
        stem = core[:-1].lower()
        if stem in _ABBREVIATIONS or (len(stem) == 1 and stem.isalpha() and stem != "i"):
            return False
    first = following.lstrip(_OPENING)[:1]
    return first.isupper() or first.isdigit()
