"""Suite: the complete definition of one benchmark as one value; ``registry.SUITES`` lists them all.

To add a benchmark, write one module with its tasks and its Suite, and add it to the registry. The rest of the
program reads everything else from the Suite: task names, how to run it, metrics, and the kind of its table and figure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag

from ropewalk.io.settings import COMMON, CommaList, Count, ExistingPath, Lengths, Option, Seed
from ropewalk.io.settings import Settings as BaseSettings

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.protocol import Progress
    from ropewalk.evaluation.model_under_test import ModelUnderTest
    from ropewalk.evaluation.prompt import PromptEncoder
    from ropewalk.evaluation.results import TaskResult
    from ropewalk.evaluation.rows import Ids
    from ropewalk.evaluation.samples import Metric, Task

TEACHER_FORCED = "teacher_forced"
"""Name of teacher-forced tasks, which score given answers instead of generated ones (see ``teacher_forced``)."""

EVERY_ROW = 1 << 20
"""Number of prompts of a task whose questions are the rows of a file, which has fewer: all of them."""

SAMPLES_ALONE, SAMPLES_EACH = 50, 20
"""Default numbers of prompts of a task that has a score of its own, and of each of several tasks or depths that share
one. An interval confirms a length if its low end is above the threshold; for 20 right answers of 20 it is 83.9 %."""

Figure: TypeAlias = Literal["by length", "by depth", "tasks", "by position", "bars"]
"""Kind of a suite's figure: scores by length, a grid of depths and lengths, curves of many tasks, perplexity by
position in a row, or one bar per task."""


WHAT, TEXTS, HOW = Option(group="Benchmarks"), Option(group="Texts"), Option(group="Model")
HARNESS = Option(group="Short context (lm_eval)")
"""Groups of options in the help."""

S = TypeVar("S", bound=BaseSettings)


class EssaySettings(BaseSettings):
    """Settings of the essays in which suites hide needles."""

    group: ClassVar[str | None] = "Texts"

    essays: ExistingPath | None = Field(
        default=None,
        description="Essays in which to hide needles: a folder, a file, or RULER's PaulGrahamEssays.json. Default: the "
        "essays that ropewalk eval fetch brings; without them, tasks that need essays do not run.",
    )


class BenchmarkSettings(BaseSettings):
    """Settings that all suites share: suites, tasks, lengths and sample sizes.

    In Python, ``lengths`` may also be a mapping from suites to their lengths.
    """

    group: ClassVar[str | None] = "Benchmarks"

    suites: Annotated[CommaList, COMMON] = Field(
        default=("perplexity", "passkey"), description="Suites to run, separated by commas."
    )
    lengths: Annotated[
        Annotated[Lengths, Tag("_all")] | Annotated[dict[str, Lengths], Tag("_each")],
        # Without a discriminator, pydantic would try both forms and report the errors of both.
        Discriminator(lambda value: "_each" if isinstance(value, Mapping) else "_all"),
        COMMON,
    ] = Field(
        default=(),
        description="Context lengths to measure at, in tokens, separated by commas: 8k,128k. Default: "
        "max_position_embeddings of the config.",
    )
    tasks: Annotated[CommaList, COMMON] = Field(
        default=(),
        description="Tasks to run, such as niah_single_1,vt. If a suite has none of the named tasks, it runs its "
        "default tasks.",
    )
    exclude: CommaList = Field(default=(), description="Tasks not to run, such as niah_multikey_3,cwe.")
    samples: Annotated[Count | None, COMMON] = Field(
        default=None,
        ge=1,
        description="Number of prompts per task and length; in the suite needle, per depth and length. Default: "
        f"{SAMPLES_ALONE}, or {SAMPLES_EACH} in each of several tasks or depths with a common score; all "
        "questions of a suite that reads them from a file.",
    )
    rows: Count = Field(
        default=16,
        ge=1,
        description="Maximum number of texts per length, in the suites perplexity and longppl.",
    )
    seed: Seed = Field(
        default=0,
        description="Random seed of the texts, the prompts and lm_eval's few-shot examples (lm_eval's default is "
        "1234).",
    )
    chat: Annotated[bool, HOW] = Field(
        default=False, description="Put prompts into the tokenizer's chat template."
    )
    system_prompt: Annotated[str | None, HOW] = Field(
        default=None, description="System prompt for the chat template. Needs --chat. Default: none."
    )
    thinking_tokens: Annotated[int, HOW] = Field(
        default=0,
        ge=0,
        description="Number of tokens that the model may spend on thinking. Only the answer that follows is scored. "
        "Needs --chat. 0 turns thinking off in the chat template.",
    )
    threshold: float = Field(
        default=85.6,
        ge=0,
        le=100,
        description="Threshold in percent for the effective length: the longest length up to which a task's score, or "
        "RULER's mean score, is above the threshold. The default is Llama 2 7B's score on RULER at 4k. The 95 % "
        "intervals can confirm a length only with 23 or more samples.",
    )
    beyond_config: bool = Field(
        default=False, description="Allow lengths above max_position_embeddings of the config."
    )
    trained_length: Annotated[int | None, Option(hidden=True)] = Field(
        default=None,
        description="Trained length in tokens, an edge of the position bins. Default: max_position_embeddings of the "
        "config.",
    )

    def of(self, kind: type[S]) -> S:
        """Return the settings of the given class."""
        # By class, because the suites' settings lie in fields that only the registry knows.
        found: S = next(value for value in dict(self).values() if isinstance(value, kind))
        return found

    def lengths_of(self, suite: str) -> list[int]:
        """Return the lengths of a suite in tokens, in the given order."""
        # A suite that the mapping leaves out has no lengths.
        return list(self.lengths.get(suite, ()) if isinstance(self.lengths, Mapping) else self.lengths)


VERDICTS, JUDGED_BY, WAITING = "verdicts", "judged_by", "waiting_for_judge"
"""Details of a judged answer (the grades by judge, None for unclear; the judge whose grade counts), and of a result
without one."""
JUDGED = "judged"
"""Name of the metric of answers that a judge must read."""


@dataclass(frozen=True)
class Judge:
    """What a judge reads of an answer, and how its verdict is read.

    Attributes:
        template: the prompt, for the record, with the names of what is filled in.
        prompt: returns the prompt, given the answer, its references and the details of its sample.
        verdict: the grade that the judge's answer gives, from 0 (wrong) to 1 (right); None if it gives none.
    """

    template: str
    prompt: Callable[[str, Sequence[str], Mapping[str, Any]], str]
    verdict: Callable[[str], float | None]


def judged_grade(answer: str, references: Sequence[str], details: Mapping[str, Any]) -> float:
    """The grade by the judge whose verdict counts, 0 if it is unclear; without a judge, there is no score yet."""
    return float(details.get(VERDICTS, {}).get(details.get(JUDGED_BY)) or 0)


@dataclass(frozen=True, kw_only=True)
class Suite(ABC):
    """One benchmark.

    Attributes:
        name: name on the command line and in results.
        title: title in headings; if empty, ``name`` is used.
        titles: titles of tasks measured by length; ``*`` in a name and its title matches the rest of the name, and
            ``{haystack}`` is replaced by the haystack of the run.
        main: the task whose files have the suite's name without a task suffix.
        figure: kind of its figure; None for no figure.
        default: tasks that run if none is named; if empty, all tasks.
        sharded: the only task that several processes can measure together; None if there is none.
        settings: its settings models by their field in the evaluation settings; suites may share a model.
        base_length: longest length in tokens whose scores give the base score, of which the effective length needs a
            share; None if it needs a score above the threshold.
    """

    name: str
    title: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)
    main: str = ""
    figure: Figure | None = None
    default: tuple[str, ...] = ()
    sharded: str | None = None
    settings: Mapping[str, type[BaseSettings]] = field(default_factory=dict)
    base_length: int | None = None

    @abstractmethod
    def known(self, settings: BenchmarkSettings) -> list[str]:
        """Return the names of all tasks."""

    def lengths_of(self, settings: BenchmarkSettings) -> list[int]:
        """Return the requested lengths in tokens."""
        return settings.lengths_of(self.name)

    def needs_lengths(self, settings: BenchmarkSettings) -> bool:
        """Whether the suite needs lengths to run."""
        return True


@dataclass(frozen=True, kw_only=True)
class GeneratedSuite(Suite):
    """A benchmark in which the model generates answers.

    Attributes:
        tasks: returns the tasks by name, in order.
        metrics: functions that score an answer, by the name in samples and predictions.
        teacher_forced: whether the suite also has a teacher-forced task in a single process, with the samples of its
            first task.
        task_lengths: returns the lengths of a task with lengths of its own, or None; if not set, all tasks use the
            requested lengths.
        mean: returns summary results, given the results and the names of the requested tasks.
        without_lengths: returns whether the suite can run without lengths; if not set, it cannot.
        sharing: returns the number of tasks or depths whose mean is the score; if not set, each task has its own.
        further: other metrics that score the same answers, by the metric of the samples; their results stand beside.
        from_file: whether the samples are the rows of a file, and by default all of them.
        judge: what a judge reads, if answers have no score without one; the metric is then ``judged_grade``.
    """

    tasks: Callable[[BenchmarkSettings], Mapping[str, Task]]
    metrics: Mapping[str, Metric]
    teacher_forced: bool = False
    task_lengths: Callable[[Task, BenchmarkSettings, PromptEncoder], list[int] | None] | None = None
    mean: Callable[[Sequence[TaskResult], Sequence[str]], list[TaskResult]] | None = None
    without_lengths: Callable[[BenchmarkSettings], bool] | None = None
    sharing: Callable[[BenchmarkSettings], int] | None = None
    further: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    from_file: bool = False
    judge: Judge | None = None

    def samples_of(self, settings: BenchmarkSettings) -> int:
        """Return the number of prompts per task and length, in a grid of depths per depth and length."""
        if settings.samples is not None:
            return settings.samples
        if self.from_file:
            return EVERY_ROW
        return SAMPLES_EACH if self.sharing is not None and self.sharing(settings) > 1 else SAMPLES_ALONE

    def known(self, settings: BenchmarkSettings) -> list[str]:
        return [*self.tasks(settings), *([TEACHER_FORCED] if self.teacher_forced else [])]

    def needs_lengths(self, settings: BenchmarkSettings) -> bool:
        return self.without_lengths is None or not self.without_lengths(settings)

    def lengths_at(self, task: Task, settings: BenchmarkSettings, encoder: PromptEncoder) -> list[int]:
        """Return the lengths of a task in tokens."""
        own = None if self.task_lengths is None else self.task_lengths(task, settings, encoder)
        # Lengths that a task computes hold its prompt and answer; a thinking model needs room before the answer.
        return self.lengths_of(settings) if own is None else [each + encoder.thinking for each in own]


@dataclass(frozen=True, kw_only=True)
class LikelihoodSuite(Suite):
    """A benchmark that scores the likelihoods of a text's tokens.

    Attributes:
        tasks: names of the tasks.
        check: raises if the documents are not suitable for a task and length.
        measure: returns the result of a task and length.
    """

    tasks: tuple[str, ...]
    check: Callable[[str, int, LikelihoodInput], None]
    measure: Callable[[str, int, LikelihoodInput, Progress | None], TaskResult]

    def known(self, settings: BenchmarkSettings) -> list[str]:
        return list(self.tasks)


@dataclass(frozen=True, eq=False)
class LikelihoodInput:
    """Input of a likelihood task.

    Attributes:
        under_test: the model under test; checks before the run use only its tokenizer.
        settings: settings of the evaluation.
        documents: int ``[tokens]`` each, without special tokens.
    """

    under_test: ModelUnderTest
    settings: BenchmarkSettings
    documents: Sequence[Ids]

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.under_test.tokenizer


@dataclass(frozen=True, kw_only=True)
class HarnessSuite(Suite):
    """A benchmark that lm_eval runs; it has no lengths.

    Attributes:
        tasks: returns the names of the tasks or groups.
    """

    tasks: Callable[[BenchmarkSettings], Sequence[str]]

    def known(self, settings: BenchmarkSettings) -> list[str]:
        return list(self.tasks(settings))

    def needs_lengths(self, settings: BenchmarkSettings) -> bool:
        return False
