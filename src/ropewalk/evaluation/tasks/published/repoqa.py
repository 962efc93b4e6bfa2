"""RepoQA: find the function of a repository that a description is about, and repeat it.

Prompt, order of the files, and place of the function are the authors', and so is the rule for what stands around it:
whole lines before and after it, from its own file and from those next to it, until each side has its share of the
tokens. The authors count each line with CodeLlama's tokenizer, up to 16K tokens without instruction and answer. Here,
the model's tokenizer counts, and the length includes them.

Source: Liu et al., arXiv:2406.06025; evalplus/repoqa at ae876de, ``search_needle_function.py`` (Apache-2.0).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder, largest_that_fits
from ropewalk.evaluation.samples import Draft, Form, LengthTooShort, Sample
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.repoqa_scores import GRAMMARS, missing_packages, most_like, repoqa
from ropewalk.evaluation.tasks.published.rows import MOST_BYTES, PublishedSettings, file_rows, files_digest
from ropewalk.evaluation.tasks.ruler.tasks import mean_of_all
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite

NAME = "repoqa"
ORIGIN = "repoqa-2024-06-23.json or .json.gz of https://github.com/evalplus/repoqa_release"
INSTRUCTION = (
    "Based on the function description and code context, please retrieve and repeat the exact described function from "
    "the code context in a code block wrapped by ```:"
)
CUT = "...\n"
"""What stands for the end of a file."""

LANGUAGES = ("python", "cpp", "java", "typescript", "rust")
"""Those of the published score; later files may also have ``go``."""
COMMENT = {language: "#" if language == "python" else "//" for language in GRAMMARS}
"""What begins the line with a file's path."""
FIELDS = ("name", "path", "description", "start_byte", "end_byte", "start_line", "end_line")

Around = Callable[[int, str], str]
"""Maps a number of lines, and what stands for the end of a file, to so many lines beside the function."""


@dataclass(frozen=True)
class Needle:
    """A function with its description, and what stands around it.

    Attributes:
        repository: number of the repository.
        details: facts that the score needs.
        name, code, description: of the function.
        depth: place that it should have in the prompt, as a share of the tokens.
        own, before: lines of its file before it, and the files before that one, each with its path as first line.
        rest, after: lines of its file after it, and the files after that one.
    """

    repository: int
    details: Mapping[str, Any]
    name: str
    code: str
    description: str
    depth: float
    own: Sequence[str]
    before: Sequence[Sequence[str]]
    rest: Sequence[str]
    after: Sequence[Sequence[str]]

    def text_before(self, count: int, mark: str = CUT) -> str:
        """The last ``count`` lines before the function; of another file, which does not fit, its beginning."""
        if count < len(self.own):
            return _text(self.own[len(self.own) - count :])
        whole, part = _filled(self.before, count - len(self.own), mark)
        return part + "".join(map(_text, reversed(whole))) + _text(self.own)

    def text_after(self, count: int, mark: str = CUT) -> str:
        """The first ``count`` lines after the function."""
        whole, part = _filled([self.rest, *self.after], count, mark)
        return "".join(map(_text, whole)) + part

    def draft(self, before: str, after: str) -> Draft:
        """The prompt."""
        head = f"{INSTRUCTION}{before}"
        text = f"{head}{self.code}{after}\nFunction Description:{self.description}\n{INSTRUCTION}"
        context = len(text) - 2 * len(INSTRUCTION)
        span = [len(head), len(head) + len(self.code)]
        details = {"context": self.repository, "depth": len(before) / max(context, 1), "spans": [span]}
        return Draft(text, "", (self.name,), {**self.details, **details})


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _filled(files: Sequence[Sequence[str]], count: int, mark: str) -> tuple[list[Sequence[str]], str]:
    """The whole files that so many lines fill, and the beginning of the next one with the mark."""
    whole: list[Sequence[str]] = []
    for lines in files:
        if count < len(lines):
            return whole, _text(lines[:count]) + mark
        whole.append(lines)
        count -= len(lines)
    return whole, ""


def ordered(dependency: Mapping[str, Sequence[str]]) -> list[str]:
    """Paths of files, each after those that it imports; in cycles, in the order in which the authors meet them."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    for path in dependency:
        waiting = [] if path in seen else [(path, iter(dependency[path]))]
        seen.add(path)
        while waiting:
            each, imported = waiting[-1]
            if (deeper := next((other for other in imported if other not in seen), None)) is None:
                found[each] = None
                waiting.pop()
            else:
                seen.add(deeper)
                waiting.append((deeper, iter(dependency.get(deeper, ()))))
    return list(found)


def needles_of(row: Row, language: str) -> Iterator[Needle]:
    """The functions of a language that are described, with all files around them.

    Raises:
        KeyError: if a repository lacks a field.
        ValueError: if a function is not where its place says.
    """
    for repository, repo in enumerate(row.get(language, ())):
        # Authors' files have repositories whose functions nobody has described.
        if not (needles := repo.get("needles")):
            continue
        files = {path: repo["content"][path] for path in ordered(repo["dependency"])}
        paths = list(files)
        lines = [[f"{COMMENT[language]} Path: {path}", *files[path].split("\n")] for path in paths]
        functions = [
            [each["name"], "\n".join(files[each["path"]].split("\n")[each["start_line"] : each["end_line"]])]
            for each in needles
        ]
        details = {"language": language, "functions": functions, "repository": repo["repo"]}
        for place, each in enumerate(needles):
            name, path, description, start, end, _, _ = (each[field] for field in FIELDS)
            # Bytes, as their name says; the authors count characters, and cut functions after umlauts elsewhere.
            content, file = files[path].encode(), paths.index(path)
            code = content[start:end].decode()
            if not code.strip():
                raise ValueError(f"{name} is not at bytes {start} to {end} of {path}")
            yield Needle(
                *(repository, details, name, code, description, (place + 0.5) / len(needles)),
                own=[lines[file][0], *content[:start].decode().split("\n")],
                before=lines[:file][::-1],
                rest=content[end:].decode().split("\n"),
                after=lines[file + 1 :],
            )


@dataclass(frozen=True)
class RepoQa:
    """Find a described function among others of its repository.

    Args:
        name: the language, one of ``GRAMMARS``.
        path: the user's file; None if there is none.
    """

    name: str
    path: Path | None

    suite = NAME
    max_new_tokens = 1024

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"files_sha256": None if self.path is None else files_digest(self.path)}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no file, no packages for the score), or None."""
        if self.path is None:
            return f"it needs --benchmark-data {NAME}=PATH, {ORIGIN}"
        if (missing := missing_packages()) is not None:
            return missing
        there = next(self._needles(), None) is not None
        return None if there else f"{self.path} has no described functions of {self.name}"

    def _needles(self) -> Iterator[Needle]:
        assert self.path is not None
        for _, row in file_rows(self.path):
            try:
                yield from needles_of(row, self.name)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else f"odd values ({error})"
                raise RopewalkError(f"a repository of {self.path} has {what}; give {ORIGIN}") from error

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`; there are fewer samples if the file has fewer functions."""
        if count < 1:
            raise RopewalkError(f"the number of samples must be 1 or more, got {count}")
        drawn = list(enumerate(self._needles()))
        random.Random(f"{seed}/{self.name}").shuffle(drawn)
        drawn = sorted(drawn[:count], key=lambda pair: pair[0])
        bare = encoder.counts([each.draft("", "").asked for _, each in drawn])
        if drawn and length < max(bare) + self.max_new_tokens:
            raise LengthTooShort(self.name, length, max(bare) + self.max_new_tokens)
        form = Form(self.suite, self.name, NAME, self.max_new_tokens)
        made = ((number, *_fitted(each, encoder, length - form.max_new_tokens)) for number, each in drawn)
        return (form.sample(encoder, length, number, draft, tokens) for number, draft, tokens in made)


def _fitted(needle: Needle, encoder: PromptEncoder, budget: int) -> tuple[Draft, int]:
    """The prompt with as many lines on each side as the budget holds, and its tokens."""
    draft = needle.draft("", "")
    tokens = encoder.count(*draft.asked)
    empty, code = encoder.counts([("", ""), (needle.code, "")])
    least = code - empty
    size = budget - tokens + least
    while size > least:
        found = needle.draft(*around(needle, encoder, size))
        if (whole := encoder.count(*found.asked)) <= budget:
            return found, whole
        # The mark of a cut file, and tokens at the borders of lines, which count differently together.
        size -= whole - budget
    return draft, tokens


def around(needle: Needle, encoder: PromptEncoder, size: int) -> tuple[str, str]:
    """What stands before and after a function in so many tokens with it, without the marks of cut files."""
    empty, code = encoder.counts([("", ""), (needle.code, "")])
    code -= empty
    first = int(size * needle.depth - code / 2)
    return (
        _most(encoder, needle.text_before, first, empty),
        _most(encoder, needle.text_after, size - code - first, empty),
    )


def _most(encoder: PromptEncoder, text: Around, budget: int, empty: int) -> str:
    """As many lines as a budget of tokens holds, without the mark of a cut file, as published."""
    most, size = 0, -1
    # All lines, or enough to be too many.
    while len(part := text(most, "")) > size and size <= MOST_BYTES * budget:
        most, size = 2 * most + 16, len(part)

    def tokens(count: int) -> int:
        return encoder.count(text(min(count, most), "")) - empty

    return text(min(largest_that_fits(tokens, max(budget, 0)), most), CUT)


def _tasks(settings: BenchmarkSettings) -> Mapping[str, RepoQa]:
    path = settings.of(PublishedSettings).benchmark_data.get(NAME)
    return {language: RepoQa(language, path) for language in GRAMMARS}


SUITE = GeneratedSuite(
    name=NAME,
    title="RepoQA",
    figure="tasks",
    default=LANGUAGES,
    settings={"published": PublishedSettings},
    tasks=_tasks,
    metrics={NAME: repoqa, f"{NAME}_most_like": most_like},
    further={NAME: (f"{NAME}_most_like",)},
    mean=lambda results, selected: mean_of_all([r for r in results if r.task in LANGUAGES], len(LANGUAGES)),
    from_file=True,
)
