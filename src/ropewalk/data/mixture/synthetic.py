"""Questions about a long text whose answers follow from the text: hidden sentences to find, and words to count.

OLMo 3 weaves such tasks into its long documents (arXiv:2512.13961), with a language model that writes them. These are
written by rules. No benchmark here uses their sentences or codes of six digits, so that training on them is not
training on an evaluation.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ropewalk.data.mixture.settings import MixtureSettings, SyntheticTask
from ropewalk.io.lengths import counted

VERSION = 1
"""Version of how tasks are drawn and worded; rows of another version are packed anew."""

SENTENCE = "Registry note: the access code of {name} is {code}."
FIND = "What is the access code of {name}, according to the registry note in the document above?"
COUNT = "How often does each of these words occur in the document above, as a whole word in this spelling: {words}?"
ASKED = "Question: {question}\nAnswer:"

NEEDLES = 4
"""Sentences that are hidden, of which one is asked for."""
COUNTED_WORDS = 3
FEWEST, MOST = 2, 30
"""Occurrences of a word to count; those of the words of a question differ. A word is what ``\\w+`` matches."""
_TRIALS = 100
_WORD = re.compile(r"\w+")
_COUNTABLE = re.compile("[a-z]{4,12}")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_PLACES = ("Archive", "Bridge", "Depot", "Harbour", "Observatory", "Station", "Tower", "Workshop")


@dataclass(frozen=True)
class Exam:
    """A task on a text.

    Attributes:
        kind: ``needle`` or ``count``.
        sentences: sentences to hide in the text, in any place and order.
        question: what stands behind the text.
        answer: what the model shall write behind the question; begins with a space.
    """

    kind: SyntheticTask
    sentences: tuple[str, ...]
    question: str
    answer: str


def draw_exam(text: str, kinds: Sequence[SyntheticTask], draw: random.Random) -> Exam | None:
    """Draw a task on a text.

    Args:
        text: the whole text before the question, without the sentences to hide.
        kinds: kinds of tasks to choose from, each equally likely. If a text does not allow one, another is taken.
        draw: decides everything.

    Returns:
        A task with exactly one right answer; None if the text allows none.
    """
    for kind in draw.sample(list(kinds), len(kinds)):
        found = _needles(text, draw) if kind == "needle" else _counts(text, draw)
        if found is not None:
            return found
    return None


def _needles(text: str, draw: random.Random) -> Exam | None:
    """One of several codes."""
    known = text.lower()
    names: dict[str, str] = {}
    for _ in range(_TRIALS):
        if len(names) == NEEDLES:
            break
        syllables = "".join(draw.choice(_CONSONANTS) + draw.choice(_VOWELS) for _ in range(3))
        name, code = f"{syllables.capitalize()} {draw.choice(_PLACES)}", str(draw.randint(100_000, 999_999))
        # Neither may stand in the text already, and no name may be part of another one.
        if syllables not in known and code not in text:
            names[name] = code
            known += f"\n{name.lower()}"
            text += f"\n{code}"
    if len(names) < NEEDLES:
        return None
    asked = draw.choice(list(names))
    sentences = tuple(SENTENCE.format(name=name, code=code) for name, code in names.items())
    return Exam("needle", sentences, FIND.format(name=asked), f" {names[asked]}")


def _counts(text: str, draw: random.Random) -> Exam | None:
    """Numbers of occurrences of some words of the text itself."""
    times = Counter(_WORD.findall(text))
    words: dict[int, list[str]] = {}
    for word, count in sorted(times.items()):
        if FEWEST <= count <= MOST and _COUNTABLE.fullmatch(word):
            words.setdefault(count, []).append(word)
    # Different numbers: most words of a text occur only twice or three times.
    if len(words) < COUNTED_WORDS:
        return None
    asked = [draw.choice(words[count]) for count in draw.sample(sorted(words), COUNTED_WORDS)]
    answer = ", ".join(f"{word} {times[word]}" for word in asked)
    return Exam("count", (), COUNT.format(words=", ".join(asked)), f" {answer}")


@dataclass
class TaskCounts:
    """Documents with a task of one kind, and tokens of their answers, counted while they are woven."""

    documents: int = 0
    answer_tokens: int = 0


@dataclass
class WovenCounts:
    """What became of the long documents of one source, each reading counted, while tasks are woven into them.

    Attributes:
        source: name of the source.
        long_documents: readings of long documents.
        tasks: by kind, those that carry one.
        too_long: chosen, but longer than a row with their task, and not to be truncated.
        masked: chosen, but with tokens that are never targets already, such as chats.
        without_place: chosen, but without a place for sentences, and without words to count.
    """

    source: str
    long_documents: int = 0
    tasks: dict[SyntheticTask, TaskCounts] = field(default_factory=dict)
    too_long: int = 0
    masked: int = 0
    without_place: int = 0


def synthetic_report(
    counts: Sequence[WovenCounts], settings: MixtureSettings, added: int, cut: int
) -> dict[str, Any]:
    """What a manifest says of synthetic tasks.

    Args:
        counts: of each source.
        settings: the mixture.
        added: tokens of hidden sentences, questions and answers.
        cut: tokens at the ends of truncated texts that made room for them.
    """
    return {
        "version": VERSION,
        "seed": settings.seed,
        "long_from": settings.long_length,
        "loss": settings.synthetic_loss,
        "added_tokens": added,
        "cut_tokens": cut,
        "sources": [asdict(each) for each in counts],
        "wording": {"sentence": SENTENCE, "needle": FIND, "count": COUNT},
        "evaluations": "no benchmark of ropewalk has these sentences and questions, or values of six digits",
    }


def explain_synthetic(report: Mapping[str, Any] | None) -> list[str]:
    """A report in sentences, one for each source with long documents; none without a report."""
    if report is None:
        return []
    sentences = []
    for each in report["sources"]:
        if not each["long_documents"]:
            continue
        tasks = [
            f"{counts['documents']:,} {kind} ({counted(counts['answer_tokens'], 'answer token')})"
            for kind, counts in sorted(each["tasks"].items())
        ]
        left = [
            f"{each[key]:,} {why}"
            for key, why in (
                ("too_long", "longer than a row"),
                ("masked", "with a mask of loss of their own"),
                ("without_place", "without a place or words for a task"),
            )
            if each[key]
        ]
        sentences.append(
            f"Synthetic tasks in {counted(each['long_documents'], 'reading')} of documents of {report['long_from']:,} "
            f"tokens or more of source {each['source']!r}: {', '.join(tasks) or 'none'}"
            f"{'; chosen but left as they are: ' + ', '.join(left) if left else ''}."
        )
    return sentences
