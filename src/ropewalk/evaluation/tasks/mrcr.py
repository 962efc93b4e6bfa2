"""MRCR: a long chat in which several requests are the same, and a question for the i-th answer to them.

Chat, question and scores are OpenAI's, and a second score is Google's. The texts are stand-ins: word chains made by
seed, in which no sentence says anything about the topic that was asked for. One wrong answer is therefore as unlike the
right one as any other, and a model can find the right one only through the requests.

Source: https://huggingface.co/datasets/openai/mrcr (MIT); Vodrahalli et al., arXiv:2409.12640; the scorer of
google-deepmind/eval_hub, ``mrcr_v2`` (Apache-2.0).
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ropewalk.evaluation.prompt import PromptEncoder, plain_chat
from ropewalk.evaluation.samples import (
    NO_DETAILS,
    Draft,
    Drafts,
    Form,
    Metric,
    Sample,
    fitted_samples,
    sample_random,
)
from ropewalk.evaluation.tasks.haystack_sources import documentation_words, words_digest
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.evaluation.tasks.words import word_chain

NEEDLES = (2, 4, 8)
PREFIX = 10
"""Random characters before the right text."""
WORDS = 56
"""Of a text; about 370 characters, so that `SequenceMatcher` ignores frequent characters, as in long texts."""
REQUEST_WORDS = 12
"""Words of text that take about as many tokens as a request and what a chat template writes around two turns."""
FEWEST_FILLERS = 4
NEAR = 0.25
"""Share of the other requests with the format of the needles, and of those with their topic."""
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")

FORMATS = (
    *("poem", "riddle", "short story", "short essay", "blog post", "news article", "formal letter", "email"),
    *("play scene", "social media post"),
)
TOPICS = (
    *("bridges", "candles", "clocks", "clouds", "deserts", "dolphins", "engines", "festivals"),
    *("forests", "foxes", "glaciers", "harbors", "honey", "islands", "kites", "lanterns", "libraries"),
    *("lighthouses", "maps", "markets", "mirrors", "moths", "mountains", "mushrooms", "oceans"),
    *("orchards", "owls", "paintings", "planets", "rain", "rivers", "robots", "sailors", "seeds"),
    *("shadows", "shoes", "snow", "spiders", "stairs", "tea", "telescopes", "thunder", "trains"),
    *("turtles"),
)
REQUEST = "write a {} about {}"
QUESTION = (
    "Prepend {prefix} to the {ordinal} (1 indexed) {} about {}. "
    "Do not include any other text in your response."
)
EXAMPLES = """\
Here are some examples of conversations succeeded by a follow-up question answered correctly:

======EXAMPLE======
User: write a poem about gardens
Assistant: Roses lean against the wall, and nobody has counted them all.
User: write a riddle about gardens
Assistant: I have many beds and never sleep. What am I?
User: write a poem about gardens
Assistant: The gate stands open, the path is wet, and the last tulip has not opened yet.
User: Prepend kT3vQ8zLw1 to the 2nd (1 indexed) poem about gardens. Do not include any other text in your response.
Assistant: kT3vQ8zLw1The gate stands open, the path is wet, and the last tulip has not opened yet.
======END EXAMPLE======

======EXAMPLE======
User: write a email about bread
Assistant: Dear neighbors, the oven is hot from seven o'clock on. Bring your own basket.
User: write a email about bread
Assistant: Hello Ana, we ran out of flour again, so the rolls have to wait until Monday.
User: Prepend 9bXfR2mYc7 to the 1st (1 indexed) email about bread. Do not include any other text in your response.
Assistant: 9bXfR2mYc7Dear neighbors, the oven is hot from seven o'clock on. Bring your own basket.
======END EXAMPLE======

"""


@dataclass(frozen=True)
class Mrcr:
    """A chat with a number of equal requests; a unit is a word of another answer.

    Args:
        needles: number of equal requests, at most 8.
    """

    needles: int

    suite = "mrcr"
    # A text of ASCII has at most as many tokens as characters, so the right answer fits with any tokenizer.
    max_new_tokens = 448

    @property
    def name(self) -> str:
        """The name with the number of needles."""
        return f"mrcr_{self.needles}"

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"needles": self.needles, "words_sha256": words_digest(documentation_words())}

    def unavailable(self) -> str | None:
        """Return None: the task needs no external data."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "mrcr", self.max_new_tokens, least_fill=0.99)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(length, index, seed, units)

        return fitted_samples(
            form, encoder, length, count, drafts_at, FEWEST_FILLERS * (WORDS + REQUEST_WORDS)
        )

    def _draft(self, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a chat with ``units`` words of other answers; needles and question do not depend on them."""
        draw = sample_random(seed, self.name, length, index)
        asked = draw.choice(FORMATS), draw.choice(TOPICS)
        prefix = "".join(draw.choices(string.ascii_letters + string.digits, k=PREFIX))
        texts = [self._needle(draw) for _ in range(self.needles)]
        number = draw.randrange(self.needles)
        shares = sorted(draw.random() for _ in texts)
        answered = fillers(sample_random(seed, "fillers", length, index), asked, units)
        # Never before the first filler, because the first turn of the chat also has the examples.
        places = [1 + int(share * len(answered)) for share in shares]
        for place, text in zip(reversed(places), reversed(texts), strict=True):
            answered.insert(place, (asked, text))
        requests = [REQUEST.format(*request) for request, _ in answered]
        requests[0] = EXAMPLES + requests[0]
        pairs = zip(requests, (text for _, text in answered), strict=True)
        earlier = tuple(turn for request, text in pairs for turn in (("user", request), ("assistant", text)))
        question = QUESTION.format(*asked, prefix=prefix, ordinal=ORDINALS[number])
        whole = plain_chat(earlier, question)
        start = whole.index(texts[number])
        details = {
            "difficulty": self.needles,
            "asked_for": number + 1,
            "depth": start / len(whole),
            "spans": [[start, start + len(texts[number])]],
        }
        return Draft(question, "", (prefix + texts[number],), details, earlier)

    def _needle(self, draw: random.Random) -> str:
        while len(text := text_of(word_chain(draw, WORDS))) > self.max_new_tokens - PREFIX:
            pass
        return text


Request = tuple[str, str]


def fillers(draw: random.Random, asked: Request, units: int) -> list[tuple[Request, str]]:
    """Other requests with their answers, of ``units`` words in all if a request counts ``REQUEST_WORDS`` words.

    The last two answers are longer or shorter than others, so that the tokens grow evenly with the units.
    """
    count, rest = divmod(units, WORDS + REQUEST_WORDS)
    sizes = [WORDS] * count
    if rest > REQUEST_WORDS:
        sizes.append(rest - REQUEST_WORDS)
    else:
        sizes[-1] += rest
    found = []
    for size in sizes:
        kind = draw.random()
        request = asked
        while request == asked:
            form = asked[0] if kind < NEAR else draw.choice(FORMATS)
            request = form, asked[1] if NEAR <= kind < 2 * NEAR else draw.choice(TOPICS)
        # As many draws for each size, so that longer chats begin like shorter ones.
        found.append((request, text_of(word_chain(draw, WORDS + REQUEST_WORDS)[:size])))
    return found


def text_of(words: Sequence[str]) -> str:
    """Words of a chain as a text; its last sentence may be cut."""
    return " ".join(words).removesuffix(".") + "."


def openai(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """OpenAI's score: 0 unless the answer starts with the random string, else how similar the texts after it are."""
    prefix, text = _parts(references, details)
    if not answer.startswith(prefix):
        return 0.0
    # The ratio depends on the order of the two, and on autojunk, which ignores frequent characters of long texts.
    return SequenceMatcher(None, answer.removeprefix(prefix), text).ratio()


def google(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Google's score of version 2: what follows the last random string counts, without white space at its ends."""
    prefix, text = _parts(references, details)
    _, found, said = answer.rpartition(prefix)
    # The order is the other one of OpenAI's.
    return SequenceMatcher(None, text.strip(), said.strip()).ratio() if found else 0.0


def right_prefix(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer starts with the random string, else 0."""
    return float(answer.startswith(_parts(references, details)[0]))


def _parts(references: Sequence[str], details: Mapping[str, Any]) -> tuple[str, str]:
    """The random string of the right answer, which Google's questions have longer, and the text after it."""
    end = details.get("prefix_characters", PREFIX)
    return references[0][:end], references[0][end:]


METRICS: Mapping[str, Metric] = {"mrcr": openai, "google": google, "prefix": right_prefix}

SUITE = GeneratedSuite(
    name="mrcr",
    title="MRCR",
    titles={f"mrcr_{needles}": f"MRCR, {needles} needles" for needles in NEEDLES},
    figure="by length",
    tasks=lambda settings: {f"mrcr_{needles}": Mrcr(needles) for needles in NEEDLES},
    metrics=METRICS,
    further={"mrcr": ("google", "prefix")},
)
