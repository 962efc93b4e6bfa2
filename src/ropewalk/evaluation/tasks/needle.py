"""Needle in a haystack: a number hidden at several depths of texts of several lengths.

The grid of depths and lengths is that of gkamradt/LLMTest_NeedleInAHaystack. Needle, question and scoring are those of
RULER's single needle, so that scores are exact and comparable with RULER. The default haystack is RULER's repeated
noise line, as in ``niah_single_1``; ``essay`` is gkamradt's haystack, Paul Graham's essays. Every result names its
haystack.

The model generates the answer, or the test is teacher-forced: the number is given, and each of its tokens must be the
most likely one (:func:`teacher_forced_result`). That takes one forward pass per prompt, which is much cheaper at long
lengths.
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
    essays_unavailable,
    prose_of,
    prose_words,
    words_digest,
)
from ropewalk.evaluation.tasks.ruler.niah import Kind, draw_word, hide_in_lines
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.suite import (
    TEACHER_FORCED,
    TEXTS,
    WHAT,
    BenchmarkSettings,
    EssaySettings,
    GeneratedSuite,
)
from ropewalk.evaluation.tasks.words import word_lists, words_unavailable
from ropewalk.io.settings import Settings

Haystack = Literal["noise", "essay", "embedded"]
GENERATED = "generated"
VALUES: Kind = "numbers"
MOST_DEPTHS = 1001
TENTHS = tuple(depth / 10 for depth in range(11))


@dataclass(frozen=True)
class NeedleGridTask:
    """One needle per prompt, at each depth in turn; a unit is a line of noise, or a word of prose.

    The number of samples counts per depth: sample i has the depth with index i modulo the number of depths, so a
    larger number of samples begins with the same ones.

    Args:
        depths: positions of the needle as shares of the haystack before it, 0 to 1, ascending.
        haystack: ``noise``, ``essay``, or ``embedded`` (prose in the package). In prose, the needle follows the
            sentence that ends nearest to the depth.
        essays: folder or file of essays; None for those that are installed or fetched.

    Raises:
        RopewalkError: if the depths are empty, out of range or not ascending, or the haystack is unknown.
    """

    depths: tuple[float, ...] = TENTHS
    haystack: Haystack = "noise"
    essays: Path | None = None

    suite = "needle"
    name = GENERATED
    max_new_tokens = 32

    def __post_init__(self) -> None:
        # `not 0 <= each <= 1` also catches NaN.
        outside = [each for each in self.depths if not 0 <= each <= 1]
        if outside or not self.depths or list(self.depths) != sorted(set(self.depths)):
            depths = ", ".join(f"{each:g}" for each in self.depths)
            raise RopewalkError(
                f"depths must be fractions from 0 to 1 in increasing order, got {depths or 'none'}"
            )
        if self.haystack not in get_args(Haystack):
            raise RopewalkError(
                f"unknown haystack {self.haystack!r}; choose from {', '.join(get_args(Haystack))}"
            )

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        # Not `depths`: a result's details use that key for the scores by depth.
        found: dict[str, Any] = {"asked_depths": list(self.depths), "haystack": self.haystack}
        if self.haystack != "noise":
            found["haystack_sha256"] = words_digest(prose_words(self.haystack, self.essays))
        return {**found, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no word lists or no essays), or None."""
        reason = words_unavailable()
        return essays_unavailable(self.essays) if reason is None and self.haystack == "essay" else reason

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """Generate ``count`` samples for each depth; see :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "all", self.max_new_tokens)
        prose = None if self.haystack == "noise" else prose_of(self.haystack, self.essays)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(prose, length, index, seed, units)

        # A sample's depth follows from its index, so each further round adds one sample to every depth.
        total = count * len(self.depths)
        return fitted_samples(form, encoder, length, total, drafts_at, 1)

    def _draft(self, prose: Prose | None, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a prompt with this number of lines or words; key and hidden number do not depend on it."""
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
    """Return the number of lines before the needle."""
    # Halves go up; round() would take them to the even number.
    return int(depth * lines + 0.5)


def nearest_end(ends: Sequence[int], depth: float) -> int:
    """Return the number of words before a needle that is placed between two sentences.

    Args:
        ends: number of words up to the end of each sentence, ascending; the last is the number of words.
        depth: intended share of the words before the needle.

    Returns:
        The beginning of the text or the end of a sentence, whichever is nearest; the earlier of two equally near.
    """
    # The nearest place is the first at or behind the goal, or the one before it.
    places = [0, *ends]
    goal = depth * places[-1]
    at = bisect_left(places, goal)
    return min(places[max(at - 1, 0) : at + 1], key=lambda place: abs(place - goal))


def scores_by_depth(depths: Sequence[float], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Average scores by depth, in percent with Wilson's interval.

    Args:
        depths: depth of each sample.
        scores: score of each sample, 0 to 1.

    Returns:
        One row per depth, ascending: ``depth``, ``n``, ``score`` and ``ci95`` (low, high) in percent.
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
    """Settings of the suite needle."""

    depths: Annotated[int, WHAT] = Field(
        default=11,
        ge=1,
        le=MOST_DEPTHS,
        description="Number of depths (places in the text) at which the suite needle hides the needle.",
    )
    haystack: Annotated[Haystack, TEXTS] = Field(
        default="noise",
        description="Text around the needle in the suite needle: noise (RULER's repeated line), essay (Paul Graham's "
        "essays, as in gkamradt's test) or embedded (prose that ropewalk ships).",
    )


def _tasks(settings: BenchmarkSettings) -> dict[str, NeedleGridTask]:
    own = settings.of(NeedleSettings)
    count = own.depths
    depths = tuple(n / (count - 1) for n in range(count)) if count > 1 else (0.5,)
    return {GENERATED: NeedleGridTask(depths, own.haystack, settings.of(EssaySettings).essays)}


SUITE = GeneratedSuite(
    name="needle",
    titles={
        GENERATED: "Needle{haystack}, generated answers",
        TEACHER_FORCED: "Needle{haystack}, teacher-forced",
    },
    figure="by depth",
    sharded=TEACHER_FORCED,
    settings={"needle": NeedleSettings, "prose": EssaySettings},
    tasks=_tasks,
    metrics={"all": share_of_references},
    teacher_forced=True,
    sharing=lambda settings: settings.of(NeedleSettings).depths,
)
