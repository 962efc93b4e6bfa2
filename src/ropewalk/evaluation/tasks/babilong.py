"""BABILong: bAbI's facts, in order, between the sentences of a long text, and a question about them.

The form of the prompt and the score are the published ones; the instructions and the simulated facts are our own.

Source: Kuratov et al., arXiv:2406.10149; booydar/babilong (Apache-2.0).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    NO_DETAILS,
    Draft,
    Drafts,
    Form,
    Sample,
    any_reference,
    fitted_samples,
    sample_random,
)
from ropewalk.evaluation.tasks import babi
from ropewalk.evaluation.tasks.haystack_sources import (
    Prose,
    documentation_words,
    essay_words,
    essays_unavailable,
    sentence_ends,
    words_digest,
)
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, EssaySettings, GeneratedSuite

LABELS = (babi.PLACES, (*babi.GIVERS, *babi.THINGS))
"""The possible answers: to qa1 to qa4, and to qa5."""
FEWEST_WORDS = 50
LONGEST_WORD = 32  # characters
TEMPLATE = "{instruction}\n{examples}\n{form}\n<context>\n{context}\n</context>\nQuestion: {question}"
EXAMPLE = "<example>\n{}\nAnswer: {}\n</example>"


@dataclass(frozen=True)
class Kind:
    """One of bAbI's tasks: its title, what its prompt says, and a function that tells a story, or None."""

    title: str
    facts: str
    form: str
    told: Callable[[random.Random], babi.Story | None]


HIDDEN = (
    "The text below has facts about {} among other sentences, and a question about them follows. "
    "Answer by the facts alone."
)
FORM = "Answer in this form, and write nothing else: {}"
ONE_WORD = "Answer with one word, without any explanation."
CARRIED = (
    "the places of people, and things that they take and leave. A thing that someone holds is where they are, and one "
    "that someone left stays there until someone takes it. These facts are hidden"
)
KINDS: Mapping[str, Kind] = {
    "qa1": Kind(
        "one supporting fact",
        "the places of people, of which the last one of each person counts,",
        FORM.format("The most recent location of 'person' is 'location'."),
        babi.where_is_person,
    ),
    "qa2": Kind(
        "two supporting facts", CARRIED, FORM.format("The 'item' is in 'location'."), babi.where_is_thing
    ),
    "qa3": Kind(
        "three supporting facts",
        CARRIED,
        FORM.format("Before the 'location_1' the 'item' was in the 'location_2'."),
        babi.where_was_thing,
    ),
    "qa4": Kind("two-argument relations", "how places lie to each other", ONE_WORD, babi.what_is_beside),
    "qa5": Kind("three-argument relations", "things that people give to each other", ONE_WORD, babi.who_gave),
}
_EXAMPLES = """
qa1 | Ann went to the cellar. Paul moved to the attic. Ann travelled to the porch. Where is Ann? \
| The most recent location of Ann is porch.
qa1 | Paul journeyed to the shop. Ann went back to the attic. Where is Paul? | The most recent location of Paul is shop.
qa2 | Ann moved to the attic. Ann took the ladder there. Ann went to the porch. Where is the ladder? \
| The ladder is in the porch.
qa2 | Paul got the lamp. Paul went to the cellar. Paul dropped the lamp. Paul moved to the shop. Where is the lamp? \
| The lamp is in the cellar.
qa3 | Ann went to the cellar. Ann got the lamp. Paul moved to the shop. Ann moved to the porch. \
Where was the lamp before the porch? | Before the porch the lamp was in the cellar.
qa3 | Paul took the ladder. Paul went to the attic. Paul travelled to the shop. Paul left the ladder. \
Where was the ladder before the shop? | Before the shop the ladder was in the attic.
qa4 | The attic is north of the porch. The cellar is south of the porch. What is south of the porch? | cellar
qa4 | The shop is east of the porch. The attic is west of the porch. What is the porch west of? | shop
qa5 | Ann took the lamp. Ann handed the lamp to Paul. Paul went to the shop. Who received the lamp? | Paul
qa5 | Ann got the ladder there. Paul moved to the porch. Ann passed the ladder to Paul. What did Ann give to Paul? \
| ladder
"""
EXAMPLES = tuple(line.split(" | ") for line in _EXAMPLES.strip().splitlines())
"""Task, facts with their question, and answer; people, places and things are in no question."""


@dataclass(frozen=True)
class BabiLong:
    """One of bAbI's tasks in a long text; a unit is a word of the text.

    Args:
        kind: ``qa1`` to ``qa5``.
        haystack: ``embedded`` for the documentation of Python, or ``essay``.
        essays: folder or file of essays, or of books; None for those that are installed or fetched.
    """

    kind: str
    haystack: Literal["embedded", "essay"] = "embedded"
    essays: Path | None = None

    suite = "babilong"
    max_new_tokens = 64

    @property
    def name(self) -> str:
        """The kind, with the haystack unless it is the embedded one."""
        return self.kind if self.haystack == "embedded" else f"{self.kind}_{self.haystack}"

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        words = background_words(self.haystack, self.essays)
        return {"haystack": self.haystack, "haystack_sha256": words_digest(words)}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no essays), or None."""
        return essays_unavailable(self.essays) if self.haystack == "essay" else None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "babilong", self.max_new_tokens, least_fill=0.99)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(length, index, seed, units)

        return fitted_samples(form, encoder, length, count, drafts_at, FEWEST_WORDS)

    def _draft(self, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a prompt with ``units`` words of text; story and places of the facts do not depend on their number."""
        kind, draw = KINDS[self.kind], sample_random(seed, self.kind, length, index)
        while (story := kind.told(draw)) is None:
            pass
        shares = sorted(draw.random() for _ in story.facts)
        context, starts = told_between(
            background(self.haystack, self.essays), draw.random(), units, story.facts, shares
        )
        text = TEMPLATE.format(
            instruction=HIDDEN.format(kind.facts),
            examples="\n".join(EXAMPLE.format(*each) for name, *each in EXAMPLES if name == self.kind),
            form=kind.form,
            context=context,
            question=story.question,
        )
        first = text.index(context)
        spans = [
            [first + starts[each], first + starts[each] + len(story.facts[each])]
            for each in sorted(story.needed)
        ]
        details = {
            "difficulty": len(spans),
            "facts": len(story.facts),
            "question": story.question,
            "spans": spans,
        }
        return Draft(text, "", (story.answer,), details)


def background_words(haystack: str, essays: Path | None) -> tuple[str, ...]:
    """The words of the text around the facts; of the embedded one without the lines of its tables."""
    embedded = haystack == "embedded"
    return (
        tuple(w for w in documentation_words() if len(w) <= LONGEST_WORD) if embedded else essay_words(essays)
    )


@lru_cache(maxsize=4)
def background(haystack: str, essays: Path | None) -> tuple[Prose, list[int]]:
    """The text around the facts, and the words before each of its sentences, the last of which is not cut."""
    words = background_words(haystack, essays)
    return Prose(words), [0, *sentence_ends(words)[:-1]]


def told_between(
    text: tuple[Prose, list[int]], start: float, units: int, facts: Sequence[str], shares: Sequence[float]
) -> tuple[str, list[int]]:
    """Put facts, in order, between the sentences of ``units`` words of a text, from the share ``start`` of it on.

    ``shares`` are the sentences before each fact. The last one may be cut, and no fact follows it. Returns the text,
    and the first character of each fact.
    """
    prose, starts = text
    first = starts[int(start * len(starts))]
    words = prose.words(first + units)[first:]
    ends = [0, *(end - first for end in prose.sentence_ends(first + units)[:-1] if end > first)]
    pieces: list[str] = []
    found, length, done = [], 0, 0
    for fact, share in zip(facts, shares, strict=True):
        place = ends[int(share * len(ends))]
        if place > done:
            pieces.append(" ".join(words[done:place]))
            length += len(pieces[-1]) + 1
            done = place
        found.append(length)
        pieces.append(fact)
        length += len(fact) + 1
    return " ".join([*pieces, *words[done:]]), found


def one_label(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the first sentence names the right label and no other, but for those of the question (BABILong's score)."""
    said, target = answer.lower(), references[0].lower()
    # The published function also cuts at "Question", which is in no answer in lower case.
    for end in (".", "<context>", "<example>"):
        said = said.split(end)[0]
    question = details.get("question", "").lower()
    known = {label.lower() for labels in LABELS if references[0] in labels for label in labels}
    return float({label for label in known if label in said and label not in question} == {target})


def _tasks(settings: BenchmarkSettings) -> dict[str, BabiLong]:
    essays = settings.of(EssaySettings).essays
    tasks = [BabiLong(kind) for kind in KINDS] + [BabiLong(kind, "essay", essays) for kind in KINDS]
    return {task.name: task for task in tasks}


SUITE = GeneratedSuite(
    name="babilong",
    title="BABILong",
    titles={
        name + end: f"BABILong {name}{where}, {kind.title}"
        for name, kind in KINDS.items()
        for end, where in (("", ""), ("_essay", " in essays"))
    },
    default=tuple(KINDS),
    figure="by length",
    settings={"prose": EssaySettings},
    tasks=_tasks,
    metrics={"babilong": one_label, "substring": any_reference},
    further={"babilong": ("substring",)},
)
