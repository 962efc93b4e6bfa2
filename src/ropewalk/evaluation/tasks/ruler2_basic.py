"""The two tasks of RULERv2 that need no other data set: retrieve one number, or four, among lines of the same form.

RULERv2 has twelve tasks; ten put questions of MMLU or HotpotQA into long texts. The mean of the two here is not its
score. The prompts are the published ones; the length here also counts the answer, which upstream leaves out.

Source: NVIDIA/NeMo-Skills, ``dataset/ruler2`` and ``evaluator/ruler.py`` (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropewalk.evaluation.backends.protocol import END_OF_THOUGHTS
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import NO_DETAILS, Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.ruler.niah import hide_in_lines
from ropewalk.evaluation.tasks.ruler.templates import needle_line, niah_prompt
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.evaluation.tasks.words import key_names, word_lists, words_unavailable

VALUES = {"mk_niah_basic": 1, "mv_niah_basic": 4}
"""Values of each key, by task."""
DIGITS = 10
ANSWER = "Answer:"


@dataclass(frozen=True)
class BasicRetrieval:
    """Find the values of a key among those of other keys; a unit is a line of another key.

    Args:
        name: ``mk_niah_basic`` or ``mv_niah_basic``.
    """

    name: str

    suite = "ruler2_basic"
    max_new_tokens = 128

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"values_per_key": VALUES[self.name], "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no word lists), or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "ruler2", self.max_new_tokens, least_fill=0.99)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(length, index, seed, units)

        return fitted_samples(form, encoder, length, count, drafts_at, VALUES[self.name])

    def _draft(self, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a prompt with ``units`` lines of other keys."""
        draw, each = sample_random(seed, self.name, length, index), VALUES[self.name]
        # One more key than lines need, for the one that is asked for; as a dictionary, which keeps the order.
        keys: dict[str, None] = {}
        while len(keys) < 1 + -(-units // each):
            keys[draw.choice(key_names())] = None
        asked, *others = keys
        values = draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), each + units)
        needles = [needle_line("numbers", asked, str(value)) for value in values[:each]]
        lines = [
            needle_line("numbers", (others * each)[n], str(value)) for n, value in enumerate(values[each:])
        ]
        draw.shuffle(lines)
        context = hide_in_lines(lines, needles, sorted(draw.sample(range(units), each)))
        text, prefix = niah_prompt("numbers", [asked], each, context)
        # Upstream's wording for several values, and one turn with the beginning of the answer.
        text = text.replace("memorize it", "memorize them", int(each > 1)) + prefix
        starts = [text.index(needle) for needle in needles]
        details = {
            "difficulty": each,
            "lines": units,
            "key": asked,
            "spans": [[start, start + len(needle)] for start, needle in zip(starts, needles, strict=True)],
        }
        return Draft(text, "", tuple(str(value) for value in values[:each]), details)


def word_error_rate(said: str, right: str) -> float:
    """Levenshtein distance of the words of two texts, divided by the number of words of the right one.

    Raises:
        ZeroDivisionError: if the right text has no words.
    """
    heard, words = said.split(), right.split()
    row = list(range(len(words) + 1))
    for n, word in enumerate(heard, start=1):
        diagonal, row[0] = row[0], n
        for at, other in enumerate(words, start=1):
            diagonal, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, diagonal + (word != other))
    return row[-1] / len(words)


def found_or_near(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Mean over the references of 1 if the answer contains it, ignoring case, else 1 minus the word error rate.

    Only what follows the last end of thoughts and the last ``Answer:`` counts. The error rate changes nothing for
    references of one word, which an answer without errors contains.
    """
    said = answer.rpartition(END_OF_THOUGHTS)[2].rpartition(ANSWER)[2].lower()
    return sum(
        1.0 if each in said else max(1 - word_error_rate(said, each), 0.0)
        for each in (reference.lower() for reference in references)
    ) / len(references)


SUITE = GeneratedSuite(
    name="ruler2_basic",
    titles={"mk_niah_basic": "RULERv2, one value", "mv_niah_basic": "RULERv2, four values"},
    figure="by length",
    tasks=lambda settings: {name: BasicRetrieval(name) for name in VALUES},
    metrics={"ruler2": found_or_near},
)
