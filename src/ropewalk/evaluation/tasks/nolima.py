"""NoLiMa: a fact about a person that shares no word with the question about it, so that no search for words finds it.

The protocol is that of NoLiMa. Facts, questions and names are our own, because its needles and code are for
non-commercial research only; so scores compare models with each other, and not with published ones.

Source: arXiv:2502.05167.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import NO_DETAILS, Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.haystack_sources import (
    Prose,
    essays_unavailable,
    prose_words,
    sentence_ends,
    words_digest,
)
from ropewalk.evaluation.tasks.needle import nearest_end
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, EssaySettings, GeneratedSuite

# A needle, and the ends of the questions that are one and two steps of knowledge away from it. No other needle may
# answer a question, because those of other people stand in the same text.
_FACTS = """
{} rents a flat opposite the Sagrada Família. | been to Barcelona | been to Catalonia
{} painted the view from Charles Bridge. | been to Prague | been to Czechia
{} lost a glove on the steps of the Hagia Sophia. | been to Istanbul | been to Turkey
{} got married on top of the Eiffel Tower. | been to Paris | been to France
{} has a photograph taken in front of the Taj Mahal. | been to Agra | been to Uttar Pradesh
{} drove up to the statue of Christ the Redeemer. | been to Rio de Janeiro | been to Brazil
{} sells postcards next to the Brandenburg Gate. | been to Berlin | been to Germany
{} threw a coin into the Trevi Fountain. | been to Rome | been to Italy
{} sang on a stage under the white shells that Jørn Utzon drew. | been to Sydney | been to Australia
{} was born within sight of the Kremlin. | been to Moscow | been to Russia
{} carried a picnic up to the Parthenon. | been to Athens | been to Greece
{} crossed the Golden Gate by bicycle. | been to San Francisco | been to California
{} rode a camel around the Great Sphinx. | been to Giza | been to Egypt
{} left flowers at the Temple of the Emerald Buddha. | been to Bangkok | been to Thailand
{} sweeps the courtyard of Sensō-ji every morning. | been to Tokyo | been to Japan
{} took the cable car up Table Mountain. | been to Cape Town | been to South Africa
{} walked over the glass floor of the CN Tower. | been to Toronto | been to Ontario
{} cleans the nine spheres of the Atomium. | been to Brussels | been to Belgium
{} guards the bronze Little Mermaid at night. | been to Copenhagen | been to Denmark
{} spent a winter day in the hot pools of the Széchenyi baths. | been to Budapest | been to Hungary
{} parks below the Petronas Towers. | been to Kuala Lumpur | been to Malaysia
{} washed windows on floor 120 of the Burj Khalifa. | been to Dubai | been to the Emirates
{} gives guided tours of Hallgrímskirkja. | been to Reykjavik | been to Iceland
{} dived for the monster in Loch Ness. | been to Scotland | been to Britain
{} went home with a stethoscope around the neck. | a physician | under the oath of Hippocrates
{} keeps a Stradivarius in a padded case. | a violinist | in the footsteps of Paganini
{} saved both penalties in the shootout. | a goalkeeper | up for the sport of Pelé
{} hears confession before Mass. | a priest | loyal to the Vatican
{} split a stack of boards with one hand at the dojo. | a karateka | up for an art from Okinawa
{} likes the Sicilian Defence and rarely castles. | a chess player | up for a duel with Kasparov
{} counted sixteen sunrises within a single day. | an astronaut | in the profession of Gagarin
{} came back from the hives with a smoker and a veil. | a beekeeper | able to brew mead
{} shears the flock in June. | a shepherd | able to weave tweed
{} treads the harvest with bare feet and fills the barrels. | a winemaker | in the trade of Dom Pérignon
"""
PEOPLE = (
    *(
        "Alma",
        "Benno",
        "Clara",
        "Dario",
        "Edith",
        "Felix",
        "Greta",
        "Hugo",
        "Irene",
        "Jonas",
        "Karla",
        "Lukas",
    ),
    *(
        "Mira",
        "Nadia",
        "Oskar",
        "Petra",
        "Ruben",
        "Selma",
        "Tobias",
        "Ulla",
        "Viktor",
        "Wanda",
        "Yara",
        "Zoltan",
    ),
)
OTHERS = 4
"""Other people with a fact of their own in each text: the haystack has no people, and one alone would stand out."""
DEPTHS = tuple(place / 25 for place in range(26))
INTRODUCTION = "Read this text. A question about one of the people in it follows.\n\n"
CLOSING = "\n\nQuestion: {question}\nAnswer with the name alone, without an explanation."
STOP_WORDS = frozenset(
    (
        *("a", "an", "the", "and", "that", "who", "has", "been", "is", "was", "be", "able", "to", "of", "as"),
        *("with", "by", "in", "on", "at", "for", "from", "under", "up"),
    )
)
STEM = 5
"""Letters of a word that are compared with those of other words."""
T = TypeVar("T")


def _facts() -> Iterator[tuple[str, str, str]]:
    for line in _FACTS.strip().splitlines():
        needle, *ends = line.split(" | ")
        one, two = (f"Who {'has' if end.startswith('been ') else 'is'} {end}?" for end in ends)
        yield needle, one, two


FACTS = tuple(_facts())
"""A sentence with ``{}`` for a name, and the questions one and two steps of knowledge away from it."""


def stems(text: str) -> set[str]:
    """The first letters of each word of a text that has a meaning of its own."""
    words = set(re.findall(r"[^\W\d_]{2,}", text.lower()))
    return {word[:STEM] for word in words - STOP_WORDS}


@lru_cache(maxsize=2)
def haystack(kind: str, essays: Path | None) -> Prose:
    """Prose without the sentences that share a stem with a question, or that name one of the people."""
    words = prose_words(kind, essays)
    taken = stems(" ".join([*PEOPLE, *(each for fact in FACTS for each in fact[1:])]))
    kept: list[str] = []
    start = 0
    for end in sentence_ends(words):
        sentence, start = words[start:end], end
        if taken.isdisjoint(stems(" ".join(sentence))):
            kept += sentence
    if not kept:
        raise RopewalkError(
            "each sentence of the essays has a word of NoLiMa's questions; give longer essays"
        )
    return Prose(kept)


@dataclass(frozen=True)
class Association:
    """A fact and a question about it; a unit is a word. ``kind`` and ``essays`` are for :func:`prose_words`."""

    name: str
    kind: Literal["embedded", "essay"]
    essays: Path | None = None

    suite = "nolima"
    max_new_tokens = 32

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        digest = words_digest(prose_words(self.kind, self.essays))
        return {"haystack": self.kind, "haystack_sha256": digest, "chance": 100 / (1 + OTHERS)}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no essays), or None."""
        return essays_unavailable(self.essays) if self.kind == "essay" else None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "name", self.max_new_tokens, least_fill=0.99)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(length, index, seed, units)

        return fitted_samples(form, encoder, length, count, drafts_at)

    def _draft(self, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a prompt with ``units`` words of prose; people and facts do not depend on their number."""
        pairs = [(fact, hops) for fact in FACTS for hops in (1, 2)]
        fact, hops = dealt(pairs, f"{seed}/facts", length, index)
        depth = dealt(DEPTHS, f"{seed}/depths", length, index)
        draw = sample_random(seed, "nolima", length, index)
        name, *others = draw.sample(PEOPLE, 1 + OTHERS)
        needles = [each for each, *_ in draw.sample([each for each in FACTS if each != fact], OTHERS)]
        hidden = [(depth, fact[0].format(name))]
        hidden += [(draw.random(), each.format(other)) for each, other in zip(needles, others, strict=True)]
        text, starts = hide(haystack(self.kind, self.essays), units, hidden)
        start = len(INTRODUCTION) + starts[0]
        span = [start, start + len(hidden[0][1])]
        details = {"difficulty": hops, "depth": depth, "units": units, "others": others, "spans": [span]}
        closing = CLOSING.format(question=fact[hops])
        return Draft(f"{INTRODUCTION}{text}{closing}", "", (name,), details)


def dealt(cards: Sequence[T], seed: str, length: int, index: int) -> T:
    """The card of a sample, if all cards are dealt in random order before any is dealt again."""
    draw = sample_random(0, seed, length, index // len(cards))
    return draw.sample(cards, len(cards))[index % len(cards)]


def hide(prose: Prose, units: int, hidden: Sequence[tuple[float, str]]) -> tuple[str, list[int]]:
    """Put sentences, each with its depth as a share of the words, between those of a haystack's first ``units`` words.

    Returns the text, and the first character of each hidden sentence in it.
    """
    words, ends = prose.words(units), prose.sentence_ends(units)
    order = sorted(range(len(hidden)), key=lambda each: hidden[each][0])
    text, done, starts = "", 0, [0] * len(hidden)
    for each in order:
        place = nearest_end(ends, hidden[each][0]) if ends else 0
        text += "".join(f"{word} " for word in words[done:place])
        starts[each], done = len(text), place
        text += f"{hidden[each][1]} "
    return (text + " ".join(words[done:])).rstrip(), starts


def name_contained(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer contains the name, in the same case, else 0 (NoLiMa's score)."""
    return float(references[0] in answer)


def name_alone(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer contains the name and that of nobody else in the text, else 0."""
    return float(references[0] in answer and not any(other in answer for other in details.get("others", ())))


def _tasks(settings: BenchmarkSettings) -> dict[str, Association]:
    essays = settings.of(EssaySettings).essays
    return {
        t.name: t for t in (Association("nolima", "embedded"), Association("nolima_essay", "essay", essays))
    }


SUITE = GeneratedSuite(
    name="nolima",
    titles={"nolima": "NoLiMa, own facts", "nolima_essay": "NoLiMa, own facts in essays"},
    main="nolima",
    default=("nolima",),
    figure="by length",
    settings={"prose": EssaySettings},
    tasks=_tasks,
    metrics={"name": name_contained, "alone": name_alone},
    further={"name": ("alone",)},
    base_length=1024,
)
