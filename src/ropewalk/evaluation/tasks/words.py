"""Words for prompts: word lists of the package wonderwords, keys composed of them, made-up words, and word chains.

RULER and LongEval draw their keys from wonderwords. Only its word lists are read; the package is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.haystack_sources import documentation_words

_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
NOT_INSTALLED = (
    "the word lists need the package wonderwords, which is not installed; run pip install wonderwords"
)


@dataclass(frozen=True)
class WordLists:
    """The word lists of wonderwords, each in the order of its file; a few words occur twice."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    verbs: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 digest of all three lists; prompts are reproducible only with equal lists."""
        text = "\n\n".join("\n".join(words) for words in (self.nouns, self.adjectives, self.verbs))
        return hashlib.sha256(text.encode()).hexdigest()


def words_unavailable() -> str | None:
    """Return why the word lists are missing, or None."""
    return NOT_INSTALLED if _assets() is None else None


@lru_cache(maxsize=1)
def word_lists() -> WordLists:
    """Read the word lists of the installed wonderwords.

    Raises:
        RopewalkError: if wonderwords is not installed.
    """
    assets = _assets()
    if assets is None:
        raise RopewalkError(NOT_INSTALLED)
    nouns, adjectives, verbs = (_lines(assets / f"{name}list.txt") for name in ("noun", "adjective", "verb"))
    return WordLists(nouns, adjectives, verbs)


def key_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the distinct adjectives and nouns for keys such as ``nostalgic-island``, in alphabetical order.

    Raises:
        RopewalkError: if wonderwords is not installed.
    """
    lists = word_lists()
    # Sorted, so that keys do not depend on the order of a set.
    return tuple(sorted(set(lists.adjectives))), tuple(sorted(set(lists.nouns)))


@lru_cache(maxsize=1)
def key_names() -> KeyNames:
    """Return all keys ``adjective-noun``.

    Raises:
        RopewalkError: if wonderwords is not installed.
    """
    return KeyNames(*key_words())


@lru_cache(maxsize=1)
def listed_words() -> tuple[str, ...]:
    """Return the distinct nouns, adjectives and verbs, in alphabetical order.

    Raises:
        RopewalkError: if wonderwords is not installed.
    """
    lists = word_lists()
    return tuple(sorted({*lists.nouns, *lists.adjectives, *lists.verbs}))


class KeyNames:
    """All distinct ``adjective-noun`` names in alphabetical order, composed on access.

    RULER's own script generates and sorts all six million names at every start. In alphabetical order, the names of
    one adjective are consecutive, unless one adjective is a prefix of another (``blue`` and ``blue-eyed``); the names
    of those few adjectives are generated and sorted in advance.

    Args:
        adjectives: distinct words.
        nouns: distinct words.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(nouns)
        self._groups: list[tuple[str, Sequence[str]]] = []
        # Sort with the hyphen: "a-" and "ab-" may sort differently from "a" and "ab".
        for family in _families(sorted(f"{adjective}-" for adjective in adjectives)):
            if len(family) == 1:
                self._groups.append((family[0], self._nouns))
            else:
                # A set, because two adjectives of a family may make the same name.
                names = {start + noun for start in family for noun in self._nouns}
                self._groups.append(("", sorted(names)))
        self._ends = list(accumulate(len(rest) for _, rest in self._groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        # Indexing a range handles negative indices and raises IndexError for indices that are too large.
        index = range(len(self))[index]
        group = bisect_right(self._ends, index)
        start, rest = self._groups[group]
        return start + rest[index - (self._ends[group - 1] if group else 0)]


@lru_cache(maxsize=4)
def made_up_words(count: int) -> tuple[str, ...]:
    """Return distinct pronounceable words of three or four syllables that are in no list, such as ``tomivaru``.

    Args:
        count: number of words; a smaller number gives the beginning of the same sequence.

    Raises:
        RopewalkError: if wonderwords is not installed.
    """
    # A fixed seed: made-up words are a list like the others, not part of a sample's draws.
    draw = random.Random("made-up words")
    known = set(listed_words())
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = draw.choice((3, 4))
        word = "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(syllables))
        if word not in known:
            words[word] = None
    return tuple(words)


def _families(starts: Sequence[str]) -> list[list[str]]:
    """Group sorted strings such that strings with the same prefix string in the list are together."""
    families: list[list[str]] = []
    for start in starts:
        # In sorted order, all strings with a prefix follow it directly.
        if families and start.startswith(families[-1][0]):
            families[-1].append(start)
        else:
            families.append([start])
    return families


def word_chain(draw: random.Random, count: int) -> list[str]:
    """Words with capitals and full stops; each follows the one before it somewhere in the documentation of Python."""
    following = _following()
    starts = list(following)
    words: list[str] = []
    word = ""
    while len(words) < count:
        # Not choice and randint, which take several times as long; most of a long prompt's time is spent here.
        for place in range(8 + int(7 * draw.random())):
            known = following.get(word) or starts
            word = known[int(len(known) * draw.random())]
            words.append(word if place else word.capitalize())
        words[-1] += "."
    return words[:count]


def _assets() -> Path | None:
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "assets"


def _lines(path: Path) -> tuple[str, ...]:
    with path.open(encoding="utf-8") as lines:
        return tuple(line.rstrip() for line in lines)


@lru_cache(maxsize=1)
def _following() -> Mapping[str, Sequence[str]]:
    """The words that follow each word in the documentation of Python, as often as they do."""
    bare = (word.strip(".,;:()\"'").lower() for word in documentation_words())
    found: dict[str, list[str]] = {}
    for word, following in pairwise(bare):
        if all(each.isascii() and each.isalpha() and len(each) <= 12 for each in (word, following)):
            found.setdefault(word, []).append(following)
    return found
