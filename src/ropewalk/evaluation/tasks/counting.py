"""Counting over many lines: how many instances are of a class, which class is more common, by user and by month.

The form, the kinds of questions and the score are those of Oolong-synth. Its construction is not published, and its
classes are labels of data sets about which readers disagree. Here, an instance is about one thing whose class is
certain, the questions have no ties, and so a careful reader is always right.

Source: arXiv:2511.02817; abertsch72/oolong (MIT).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal, get_args

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    DRAWS,
    NO_DETAILS,
    Draft,
    Drafts,
    Form,
    Sample,
    grouped_samples,
    sample_random,
)
from ropewalk.evaluation.tasks.suite import GeneratedSuite

Kind = Literal["count", "compare", "user", "most", "month"]
KINDS: tuple[Kind, ...] = get_args(Kind)
QUESTIONS = 25
"""Questions about a text: five of each kind, in turn."""
USERS = 20
BUSY_USERS, BUSY_SHARE = 4, 0.8
"""Number of users who write most lines, and the share of lines that they write."""
FEWEST_LINES = 20

CLASSES: Mapping[str, tuple[str, ...]] = {
    "animals": ("heron", "otter", "badger", "giraffe", "lizard", "squirrel", "walrus", "moose"),
    "garments": ("cardigan", "raincoat", "waistcoat", "pullover", "blouse", "kimono", "overcoat", "skirt"),
    "musical instruments": ("violin", "trumpet", "clarinet", "banjo", "accordion", "oboe", "cello", "tuba"),
    "tools": ("hammer", "screwdriver", "chisel", "spanner", "pickaxe", "hacksaw", "mallet", "crowbar"),
    "vegetables": ("carrot", "cabbage", "leek", "turnip", "cauliflower", "parsnip", "radish", "beetroot"),
    "vehicles": ("tractor", "bicycle", "ambulance", "tram", "minibus", "lorry", "motorcycle", "scooter"),
}
TEMPLATES = (
    "Yesterday I saw the {} again.",
    "My sister told me about the {}.",
    "Does anyone know whose {} this is?",
    "This {} is smaller than I expected.",
    "We talked about the {} for an hour.",
)
"""Instances of all classes."""
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)

INTRODUCTION = f"""\
Each of the following lines has a date, a user and an instance. An instance is about one thing, which belongs to one \
of these classes: {", ".join(CLASSES)}. The lines do not say the class, so work it out from what the instance says. A \
question about all lines comes at the end.

"""
CLOSING = """

Question: {question}
You may think first. End your answer with
Answer: {form}"""
ASKED: Mapping[Kind, tuple[str, str]] = {
    "count": ("How many instances are about {0}?", "the number"),
    "compare": (
        "Are instances about {0} more or less common than those about {1}?",
        '"more common than" or "less common than"',
    ),
    "user": ("How many instances of user {1} are about {0}?", "the number"),
    "most": ("Which user has the most instances about {0}?", "the user"),
    "month": ("How many instances with a date in {1} are about {0}?", "the number"),
}
"""Question and form of the answer, for a class and another class, a user or a month."""
PHRASES = ("more common than", "less common than")
COMPARISONS = ("more common", "less common", "same frequency")
"""What an answer may say of two classes."""
NUMBERS: tuple[Kind, ...] = ("count", "user", "month")
SHORT = 20  # characters


@dataclass(frozen=True)
class Line:
    """A line, and the class that it does not say."""

    month: str
    user: str
    of: str
    text: str


@dataclass(frozen=True)
class Counting:
    """All kinds of questions, 25 about each text; a unit is a line."""

    name = suite = "counting"
    max_new_tokens = 256

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"questions_per_text": QUESTIONS, "users": USERS, "classes": len(CLASSES)}

    def unavailable(self) -> str | None:
        """Return None: the task needs no external data."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "closeness", self.max_new_tokens, least_fill=0.99, draws=DRAWS)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: _draft(length, index, seed, units)

        return grouped_samples(form, encoder, length, count, QUESTIONS, drafts_at, FEWEST_LINES)


def _draft(length: int, index: int, seed: int, units: int) -> Draft:
    text, place = divmod(index, QUESTIONS)
    lines = lines_of(f"{seed}/counting/{length}/{text}", units)
    turn, kind = place // len(KINDS), KINDS[place % len(KINDS)]
    found = questions_about(lines, kind)
    if turn >= len(found):
        # Short texts may have hardly any comparison without a tie. The place is another for each question.
        kind, turn = "month", len(KINDS) + place
        found = questions_about(lines, kind)
    # Shuffled alike for all questions about a text, so that no question is asked twice.
    sample_random(seed, f"questions/{kind}", length, text).shuffle(found)
    names, answer, needed = found[turn % len(found)]
    question, form = (each.format(*names) for each in ASKED[kind])
    listed = "\n".join(line.text for line in lines)
    details = {"context": text, "kind": kind, "difficulty": needed, "lines": units}
    return Draft(
        f"{INTRODUCTION}{listed}{CLOSING.format(question=question, form=form)}", "", (answer,), details
    )


@lru_cache(maxsize=2)
def lines_of(seed: str, count: int) -> tuple[Line, ...]:
    """So many lines; more of them begin with the same ones."""
    draw = random.Random(seed)
    users = [str(number) for number in draw.sample(range(10_000, 100_000), USERS)]
    # Different weights, so that classes seldom tie.
    weights = draw.sample(range(4, 20), len(CLASSES))
    return tuple(_line(draw, users, weights) for _ in range(count))


def _line(draw: random.Random, users: Sequence[str], weights: Sequence[int]) -> Line:
    busy = draw.random() < BUSY_SHARE
    user = draw.choice(users[:BUSY_USERS] if busy else users[BUSY_USERS:])
    (of,) = draw.choices(list(CLASSES), weights)
    month, day = draw.choice(MONTHS), draw.randint(1, 28)
    said = draw.choice(TEMPLATES).format(draw.choice(CLASSES[of]))
    return Line(month, user, of, f"Date: {month[:3]} {day:02d}, 2024 || User: {user} || Instance: {said}")


def questions_about(lines: Sequence[Line], kind: Kind) -> list[tuple[tuple[str, ...], str, int]]:
    """All questions of a kind without ties, in a fixed order.

    Returns:
        For each question the names in it, the answer, and the number of lines that decide it.
    """
    if kind in ("count", "compare"):
        counts = Counter(line.of for line in lines)
        if kind == "count":
            return [((of,), str(counts[of]), counts[of]) for of in CLASSES]
        pairs = [(a, b) for a, b in permutations(CLASSES, 2) if counts[a] != counts[b]]
        return [((a, b), PHRASES[counts[a] < counts[b]], counts[a] + counts[b]) for a, b in pairs]
    if kind == "month":
        dated = sorted(Counter((line.of, line.month) for line in lines).items())
        return [(names, str(number), number) for names, number in dated]
    written = Counter((line.of, line.user) for line in lines)
    if kind == "user":
        return [(names, str(number), number) for names, number in sorted(written.items())]
    found: list[tuple[tuple[str, ...], str, int]] = []
    for of in CLASSES:
        ranked = sorted(
            ((number, user) for (each, user), number in written.items() if each == of), reverse=True
        )
        if ranked and (len(ranked) == 1 or ranked[0][0] > ranked[1][0]):
            found.append(((of,), ranked[0][1], sum(number for number, _ in ranked)))
    return found


def final_answer(answer: str) -> str:
    """The answer in what a model says, as Oolong reads it.

    That is what follows the last colon, without asterisks and square brackets. A long one that names a comparison is
    that comparison. Without a colon, a short answer counts as a whole, and a long one by its last word.
    """
    _, colon, said = answer.rpartition(":")
    if not colon:
        return answer if len(answer) < SHORT else next(reversed(answer.split()), "")
    said = re.sub(r"[*\[\]]", "", said.strip())
    return said if len(said) < SHORT else next((each for each in COMPARISONS if each in said), said)


def closeness(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 for the right answer, 0.75 to the power of the error for a number that is wrong, else 0 (Oolong's score)."""
    said, right = final_answer(answer), references[0]
    if said == right or said in COMPARISONS:
        return float(said in right)
    if details.get("kind") in NUMBERS:
        # No integer, one with more digits than Python converts, or one that is too far off for a float.
        with suppress(ValueError, OverflowError):
            return float(0.75 ** abs(int(said) - int(right)))
    return 0.0


def strict(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 for the right answer, else 0."""
    return float(closeness(answer, references, details) == 1)


SUITE = GeneratedSuite(
    name="counting",
    titles={"counting": "Counting over lines"},
    figure="by length",
    tasks=lambda settings: {"counting": Counting()},
    metrics={"closeness": closeness, "strict": strict},
    further={"closeness": ("strict",)},
)
