"""PublishedTask: the rows of a benchmark's own file as prompts, with their tokens counted and cuts recorded.

To add a benchmark, write one module that turns a row into a :class:`Question`, and a suite of its tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from ropewalk.data.read.files import plain_stem, split_suffix
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder, Turns, plain_chat
from ropewalk.evaluation.samples import Draft, Form, LengthTooShort, Metric, Sample
from ropewalk.evaluation.tasks.benchmark_files import FORMATS, Row, read_rows
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite, Judge
from ropewalk.io.digests import FileDigest, digest
from ropewalk.io.settings import ExistingPath, Option, Settings, pairs

LEAST_FILL = 0.995
"""Share of the tokens of a cut text from which on no more of it is tried."""
MOST_TRIALS = 8
MOST_BYTES = 24
"""Bytes of a token on average of a whole prompt, at most: what is longer is too long, and not counted."""


class PublishedSettings(Settings):
    """Where the files of published benchmarks are."""

    group: ClassVar[str | None] = "Texts"

    benchmark_data: Annotated[
        dict[str, ExistingPath],
        BeforeValidator(lambda value: pairs(value, "SUITE=PATH", "longbench_v2=data.json")),
        Option(metavar="SUITE=PATH", repeated=True),
    ] = Field(
        default={},
        description="File or folder with the questions of a suite, as its authors publish them. Without it, the suite "
        "does not run, and says where the file is.",
    )


@dataclass(frozen=True)
class Question:
    """A row of a benchmark's file.

    Attributes:
        text: what is cut in the middle if the prompt is too long; the whole prompt of a task that cuts nothing.
        references: what the metric needs to know of the right answer.
        before, after: the prompt before and after the text.
        details: facts about the question, JSON values. ``groups`` are its labels by the name of a grouping.
        earlier: turns of a chat before the prompt.
        answer: the right answer as a text, if the room for an answer depends on it.
        ending: what stands for the end of a text that is too long; empty if the middle is left out.
        answer_prefix: beginning of the answer, which the model continues.
    """

    text: str
    references: tuple[str, ...]
    before: str = ""
    after: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    earlier: Turns = ()
    answer: str = ""
    ending: str = ""
    answer_prefix: str = ""

    def draft(self, characters: int | None = None) -> Draft:
        """The prompt with so many characters of the text, as many of its beginning as of its end; None for all.

        With an ``ending``, they are the beginning of the text.
        """
        text = self.text
        if characters is None or characters >= len(text):
            pass
        elif self.ending:
            text = text[:characters] + self.ending
        else:
            head = (characters + 1) // 2
            text = text[:head] + text[len(text) - (characters - head) :]
        prompt = self.before + text + self.after
        return Draft(prompt, self.answer_prefix, self.references, self.details, self.earlier)


@dataclass(frozen=True)
class PublishedTask:
    """Questions of a benchmark's own file.

    Args:
        suite, name, metric: names of the suite, the task and its metric.
        max_new_tokens: maximum number of tokens of an answer.
        origin: the file and where it is published, for messages.
        question: returns the question of a row, given the row and the name of its file without suffixes; None if the
            row belongs to another task. A row without a needed field may raise KeyError.
        path: the file, or a folder of such files; None if the user has given none.
        cut: whether prompts that are too long lose the middle or the end of their text, as their authors do it.
            Otherwise they are not asked, and the result says so.
        binned: whether a length only has the prompts that are longer than half of it; not with ``cut``.
        twice_the_answer: whether the room for an answer is twice the tokens of the right one, and at least
            ``max_new_tokens``.
        documents: glob of further files in the folder that questions read; they count as files of the benchmark.
        files: names without suffixes of the task's files, of which no other is read; empty for all files.
        package, extra: package that the score needs, and ropewalk's extra that has it; empty if it needs none.
    """

    suite: str
    name: str
    metric: str
    max_new_tokens: int
    origin: str
    question: Callable[[Row, str], Question | None]
    path: Path | None
    cut: bool = False
    binned: bool = False
    twice_the_answer: bool = False
    documents: str | None = None
    files: tuple[str, ...] = ()
    package: str = ""
    extra: str = ""

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        if self.path is None:
            return {"files_sha256": None}
        files = [*self._files(self.path), *(sorted(self.path.glob(self.documents)) if self.documents else [])]
        return {"files_sha256": _digest_of(self.path, _stamps(files))}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no file, no package for its score), or None."""
        if self.path is None:
            return f"it needs --benchmark-data {self.suite}=PATH, {self.origin}"
        if self.package and find_spec(self.package) is None:
            return f"its score needs the package {self.package}; run pip install 'ropewalk[{self.extra}]'"
        # The first one tells; all of them are read before the first answer anyway.
        there = next(self.questions(), None) is not None
        return None if there else f"{self.path} has no question of the task {self.name}"

    def questions(self) -> Iterator[tuple[int, Question]]:
        """The questions of the task with the numbers of their rows, which count from 0 over all files.

        Raises:
            RopewalkError: if a file cannot be read, or a row is not one of this benchmark.
        """
        assert self.path is not None
        for number, (name, row) in enumerate(_rows(_stamps(self._files(self.path)))):
            try:
                question = self.question(row, name)
                if question is not None:
                    # Half a surrogate pair, which JSON can spell, has no tokens.
                    plain_chat(question.earlier, question.draft().text).encode()
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = (
                    f"has no field {error.args[0]!r}" if isinstance(error, KeyError) else f"is odd ({error})"
                )
                raise RopewalkError(f"row {number + 1} of {self.path} {what}; give {self.origin}") from error
            if question is not None:
                yield number, question

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`; there are fewer samples if the file has fewer that fit."""
        if count < 1:
            raise RopewalkError(f"the number of samples must be 1 or more, got {count}")
        drawn = list(self.questions())
        random.Random(f"{seed}/{self.name}").shuffle(drawn)
        if not self.cut:
            return self._whole(encoder, length, count, drawn)
        drawn = sorted(drawn[:count], key=lambda pair: pair[0])
        bare = encoder.counts([question.draft(0).asked for _, question in drawn])
        if drawn and length < max(bare) + self.max_new_tokens:
            raise LengthTooShort(self.name, length, max(bare) + self.max_new_tokens)
        return self._cut(encoder, length, drawn)

    def _cut(
        self, encoder: PromptEncoder, length: int, drawn: Sequence[tuple[int, Question]]
    ) -> Iterator[Sample]:
        budget = length - self.max_new_tokens
        for number, question in drawn:
            kept, tokens, whole = cut_to(question, encoder, budget)
            draft = question.draft(kept)
            details = {
                **draft.details,
                **({"tokens_cut": whole - tokens} if kept < len(question.text) else {}),
            }
            yield self._form(self.max_new_tokens).sample(
                encoder, length, number, replace(draft, details=details), tokens
            )

    def _whole(
        self, encoder: PromptEncoder, length: int, count: int, drawn: Sequence[tuple[int, Question]]
    ) -> Iterator[Sample]:
        least = length // 2 if self.binned else 0
        found: dict[int, Sample] = {}
        too_long = 0
        for number, question in drawn:
            draft = question.draft()
            written = len(plain_chat(draft.earlier, draft.text).encode())
            # No token has less than a byte; what a chat template writes is far less than the length.
            if written < least // 2:
                continue
            if written > MOST_BYTES * length:
                too_long += 1
                continue
            room = self.max_new_tokens
            if self.twice_the_answer:
                empty, answer = encoder.counts([("", ""), (question.answer, "")])
                room = max(room, 2 * (answer - empty))
            tokens = encoder.count(*draft.asked)
            if tokens + room > length:
                too_long += 1
            elif tokens + room > least:
                found[number] = self._form(room).sample(encoder, length, number, draft, tokens)
            if len(found) == count:
                break
        for number in sorted(found):
            sample = found[number]
            more = {"too_long": too_long} if too_long and not self.binned else {}
            yield replace(sample, details={**sample.details, **more})

    def _files(self, path: Path) -> list[Path]:
        return [each for each in _files(path) if not self.files or plain_stem(each) in self.files]

    def _form(self, room: int) -> Form:
        return Form(self.suite, self.name, self.metric, room)


def suite_of(
    name: str,
    title: str,
    task: Callable[[Path | None, BenchmarkSettings], PublishedTask],
    metrics: Mapping[str, Metric],
    further: Mapping[str, tuple[str, ...]] | None = None,
    judge: Judge | None = None,
) -> GeneratedSuite:
    """The suite of a benchmark with one task of the same name.

    Args:
        name, title, metrics, further, judge: as for :class:`~ropewalk.evaluation.tasks.suite.GeneratedSuite`.
        task: returns the task, given the user's file or folder.
    """
    return GeneratedSuite(
        name=name,
        title=title,
        titles={name: title},
        figure="by length",
        settings={"published": PublishedSettings},
        tasks=lambda settings: {
            name: task(settings.of(PublishedSettings).benchmark_data.get(name), settings)
        },
        metrics=metrics,
        further=further or {},
        from_file=True,
        judge=judge,
    )


def cut_to(question: Question, encoder: PromptEncoder, budget: int) -> tuple[int, int, int]:
    """Leave out as little of a question's text as the budget asks for.

    Args:
        question: the question; without its text, it fits.
        encoder: counts the tokens.
        budget: maximum number of tokens of the prompt.

    Returns:
        The characters of the text that are kept, the tokens of the prompt with them, and those of the whole prompt.
    """
    characters = len(question.text)
    whole = encoder.count(*question.draft().asked)
    if whole <= budget:
        return characters, whole, whole
    fits, fits_tokens = 0, encoder.count(*question.draft(0).asked)
    over, over_tokens = characters, whole
    for _ in range(MOST_TRIALS):
        # On the line between the two, and a little less: texts are nearly even.
        share = (LEAST_FILL + 1) / 2 * (budget - fits_tokens) / (over_tokens - fits_tokens)
        tried = fits + max(1, int(share * (over - fits)))
        tokens = encoder.count(*question.draft(tried).asked)
        if tokens > budget:
            over, over_tokens = tried, tokens
        else:
            fits, fits_tokens = tried, tokens
        if fits_tokens >= LEAST_FILL * budget or over - fits <= 1:
            break
    return fits, fits_tokens, whole


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(each for each in path.iterdir() if each.is_file() and split_suffix(each)[0] in FORMATS)
    if not found:
        raise RopewalkError(f"{path} has no file whose name ends in one of {', '.join(FORMATS)}")
    return found


Stamps = tuple[tuple[Path, int, int], ...]
"""What tells that files have changed: each with its size and time."""


def _stamps(files: Sequence[Path]) -> Stamps:
    return tuple((each, (stat := each.stat()).st_size, stat.st_mtime_ns) for each in files)


def file_rows(path: Path) -> Sequence[tuple[str, Row]]:
    """The rows of a file or of the files of a folder, in order, with the file's name without suffixes; read once.

    Raises:
        RopewalkError: if a file cannot be read, or the folder has none.
    """
    return _rows(_stamps(_files(path)))


@lru_cache(maxsize=2)
def _rows(stamps: Stamps) -> Sequence[tuple[str, Row]]:
    return [(plain_stem(each), row) for each, _, _ in stamps for row in read_rows(each)]


def files_digest(path: Path) -> str:
    """Digest of the names and contents of a file or of the files of a folder, computed once."""
    return _digest_of(path, _stamps(_files(path)))


@lru_cache
def _digest_of(folder: Path, stamps: Stamps) -> str:
    inside = folder if folder.is_dir() else folder.parent
    return digest([[str(each.relative_to(inside)), FileDigest.of(each).sha256] for each, _, _ in stamps])
