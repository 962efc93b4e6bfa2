"""LongEval's line retrieval: find the number in one line of a long record.

LongChat uses different prompts for chat models and for its only base model (MPT-7B-StoryWriter), and so do we:

- ``chat``: the chat template contains only the question, with 100 new tokens; the last integer of the answer counts.
- ``base``: the beginning of the answer, ``Line <index>: <REGISTER_CONTENT> is``, follows the question, with 15 new
  tokens. The first integer counts, because a base model continues with other text after it. LongChat counts the last
  integer here too, and samples, while we decode greedily.

Source: DachengLi1/LongChat, ``longeval/utils.py``, with its random indices of an adjective and a noun.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    Draft,
    Drafts,
    Form,
    LengthTooShort,
    Sample,
    Task,
    counted_samples,
    first_integer,
    fitted_samples,
    last_integer,
    sample_random,
)
from ropewalk.evaluation.tasks.suite import WHAT, BenchmarkSettings, GeneratedSuite
from ropewalk.evaluation.tasks.words import key_names, word_lists, words_unavailable
from ropewalk.io.settings import Numbers, Settings

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)
LINE = "line {index}: REGISTER_CONTENT is <{value}>\n"
TAIL = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {index}? I need the number."
ANSWER_PREFIX = " Line <{index}>: <REGISTER_CONTENT> is"
"""The beginning of a base model's answer; the leading space is the end of LongChat's question."""
LARGEST_VALUE = 50_000
PUBLISHED_LINES = (200, 300, 400, 500, 600, 680)
"""Numbers of lines in the published runs, which have 50 samples each."""

Protocol = Literal["base", "chat"]


@dataclass(frozen=True)
class LinesTask:
    """A record of lines, each with an index and a number; a unit is a line.

    With ``lines``, a record has a fixed number of lines instead of filling the length. Samples then do not depend on
    the length, the task is named ``lines_200`` (for 200 lines), and :meth:`needed_length` returns the length that it
    needs.

    Args:
        lines: number of lines in a record; None for as many as fit in the length.
        protocol: form of the prompt and the scoring, see the module docstring; ``chat`` needs a chat template.

    Raises:
        RopewalkError: if ``lines`` is less than 1, or the protocol is unknown.
    """

    lines: int | None = None
    protocol: Protocol = "base"

    suite = "longeval"

    def __post_init__(self) -> None:
        if self.lines is not None and self.lines < 1:
            raise RopewalkError(f"the number of lines must be 1 or more, got {self.lines}")
        if self.protocol not in get_args(Protocol):
            raise RopewalkError(f"unknown LongEval protocol {self.protocol!r}; choose base or chat")

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of the answer: 15 for a base model, 100 for a chat model."""
        return 15 if self.protocol == "base" else 100

    @property
    def name(self) -> str:
        """``lines``, or ``lines_200`` for a fixed number of 200 lines."""
        return "lines" if self.lines is None else f"lines_{self.lines}"

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"lines": self.lines, "protocol": self.protocol, "word_lists": word_lists().digest}

    def unavailable(self) -> str | None:
        """Return why the words for indices are missing, or None."""
        return words_unavailable()

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        metric = "first integer" if self.protocol == "base" else "last integer"
        form = Form(self.suite, self.name, metric, self.max_new_tokens)
        if self.lines is not None:
            return self._of_lines(form, encoder, length, count, seed, self.lines)

        def drafts_at(length: int) -> Drafts:
            return lambda index, units: self._draft(sample_random(seed, self.name, length, index), units)

        # At least the line that is asked for.
        return fitted_samples(form, encoder, length, count, drafts_at, 1)

    def needed_length(self, encoder: PromptEncoder, count: int, seed: int) -> int:
        """Return the length in tokens that the longest of ``count`` records of ``lines`` lines needs, with the answer.

        Args:
            encoder: encodes the prompts and counts their tokens.
            count: number of samples.
            seed: random seed of the samples.

        Raises:
            RopewalkError: if the task has no fixed number of lines, or ``count`` is less than 1.
        """
        if self.lines is None:
            raise RopewalkError(
                "needed_length needs a task with a fixed number of lines, got None; set lines="
            )
        if count < 1:
            raise RopewalkError(f"the number of samples must be 1 or more, got {count}")
        drafts = [self._record(index, seed, self.lines) for index in range(count)]
        return max(encoder.counts([(each.text, each.answer_prefix) for each in drafts])) + self.max_new_tokens

    def _record(self, index: int, seed: int, lines: int) -> Draft:
        # 0 instead of a length: a record of a fixed number of lines is the same at every length.
        return self._draft(sample_random(seed, self.name, 0, index), lines)

    def _of_lines(
        self, form: Form, encoder: PromptEncoder, length: int, count: int, seed: int, lines: int
    ) -> Iterator[Sample]:
        needed = self.needed_length(encoder, count, seed)
        if length < needed:
            raise LengthTooShort(self.name, length, needed)
        return (
            counted_samples(form, encoder, length, [index], [self._record(index, seed, lines)])[0]
            for index in range(count)
        )

    def _draft(self, draw: random.Random, lines: int) -> Draft:
        """Build a record with this number of lines; the line asked for does not depend on it, but its position does."""
        # Drawn first, so that the line asked for does not depend on the number of lines.
        queried, value, share = _index(draw), _value(draw), draw.random()
        # A dict, because every index must occur once and the order of drawing must stay.
        others: dict[str, None] = {queried: None}
        while len(others) < lines:
            others[_index(draw)] = None
        del others[queried]
        record = [LINE.format(index=each, value=_value(draw)) for each in others]
        # The place is a share, so that it means the same depth in records of any size.
        place = int(share * lines)
        record.insert(place, LINE.format(index=queried, value=value))
        text = HEADER + "".join(record) + TAIL.format(index=queried)
        prefix = ANSWER_PREFIX.format(index=queried) if self.protocol == "base" else ""
        details = {"unit": "line", "units": lines, "line": place, "depth": place / max(lines - 1, 1)}
        return Draft(text, prefix, (str(value),), details)


def _index(draw: random.Random) -> str:
    return draw.choice(key_names())


def _value(draw: random.Random) -> int:
    return draw.randint(1, LARGEST_VALUE)


class LongEvalSettings(Settings):
    """Settings of LongEval."""

    lines: Annotated[Numbers, WHAT] = Field(
        default=(),
        description="Prompt lengths of the suite longeval, in lines, such as 200,680. Default: as many lines as "
        "fit into the context lengths.",
    )


def _tasks(settings: BenchmarkSettings) -> dict[str, LinesTask]:
    protocol: Protocol = "chat" if settings.chat else "base"
    tasks = [LinesTask(lines, protocol) for lines in settings.of(LongEvalSettings).lines or (None,)]
    return {task.name: task for task in tasks}


def _own_lengths(task: Task, settings: BenchmarkSettings, encoder: PromptEncoder) -> list[int] | None:
    """Return the length that a record with a fixed number of lines needs."""
    if isinstance(task, LinesTask) and task.lines is not None:
        return [task.needed_length(encoder, SUITE.samples_of(settings), settings.seed)]
    return None


SUITE = GeneratedSuite(
    name="longeval",
    titles={"lines": "LongEval lines", "lines_*": "LongEval, records of * lines"},
    main="lines",
    figure="by length",
    settings={"longeval": LongEvalSettings},
    tasks=_tasks,
    metrics={"first integer": first_integer, "last integer": last_integer},
    task_lengths=_own_lengths,
    without_lengths=lambda settings: bool(settings.of(LongEvalSettings).lines),
)
