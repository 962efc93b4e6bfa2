"""RULERv2's basic tasks, which need no data set: retrieve one number, or four, among lines of the same form.

The prompts are the published ones; the length here also counts the answer, which upstream leaves out.

Source: NVIDIA/NeMo-Skills, ``dataset/ruler2/prepare_niah.py`` (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import DRAWS, Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.ruler.niah import hide_in_lines
from ropewalk.evaluation.tasks.ruler.templates import needle_line, niah_prompt
from ropewalk.evaluation.tasks.words import key_names, word_lists, words_unavailable

VALUES = {"mk_niah_basic": 1, "mv_niah_basic": 4}
"""Values of each key, by task."""
DIGITS = 10


@dataclass(frozen=True)
class BasicRetrieval:
    """Find the values of a key among those of other keys; a unit is a line of another key.

    Args:
        name: ``mk_niah_basic`` or ``mv_niah_basic``.
    """

    name: str

    suite = "ruler2"
    max_new_tokens = 128

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"values_per_key": VALUES[self.name], "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no word lists), or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "ruler2", self.max_new_tokens, least_fill=0.99, draws=DRAWS)

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
