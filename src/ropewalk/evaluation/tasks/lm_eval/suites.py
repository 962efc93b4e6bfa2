"""What a model kept of its short-context abilities, LongBench, and any other task of lm_eval.

lm_eval is optional, and data may be missing: a task that cannot run is *not run*, with the reason, and the
others go on. HellaSwag takes 10 examples, MMLU 5, ARC-Challenge 25 and TruthfulQA none, as in the Open LLM
Leaderboard. LongBench's prompts are cut in the middle and, for chat models, put into the chat template except
in its few-shot and code tasks (THUDM/LongBench, ``pred.py``); all other tasks are cut as lm_eval cuts them,
at their beginning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import SAMPLES, TaskResult, Unit
from ropewalk.evaluation.statistics import (
    NO_INTERVAL,
    Interval,
    exp_nats,
    mean_score_interval,
    ratio_interval,
    score_interval,
)
from ropewalk.evaluation.tasks.benchmark_files import BenchmarkFiles, covers, local_rows
from ropewalk.evaluation.tasks.suite import HARNESS, BenchmarkSettings, HarnessSuite
from ropewalk.io.digests import digest
from ropewalk.io.settings import CommaList, ExistingPath, FilePath, Option, Settings, pairs

if TYPE_CHECKING:
    from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue, Loaded
    from ropewalk.evaluation.tasks.lm_eval.harness import Manner, Outcome, TaskOutcome
    from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel


NOT_INSTALLED = "lm_eval is not installed; pip install ropewalk[lm-eval]"

SHORT: Mapping[str, tuple[int, str]] = {
    "hellaswag": (10, "acc_norm"),
    "mmlu": (5, "acc"),
    "arc_challenge": (25, "acc_norm"),
    "truthfulqa_mc2": (0, "acc"),
}
"""Tasks of the suite ``short``: examples before the question, and the metric that is reported."""

LONGBENCH = (
    "longbench_single",
    "longbench_multi",
    "longbench_summarization",
    "longbench_fewshot",
    "longbench_synthetic",
    "longbench_code",
)
"""Groups of the suite ``longbench``."""

WITHOUT_TEMPLATE = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
"""LongBench's few-shot and code tasks, which the published protocol keeps out of chat templates."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {"short": tuple(SHORT), "longbench": LONGBENCH}

Progress = Callable[[str, int, int], None]
"""Called with a task's name, the requests that are answered, and how many there are."""


@dataclass(frozen=True)
class RetentionSettings:
    """What lm_eval is to measure.

    Attributes:
        suite: ``short``, ``longbench`` or ``lm_eval``; the name the results bear.
        tasks: lm_eval's tasks, groups or tags; the suite's own if empty.
        data: a file or folder (see ``BenchmarkFiles``) in place of the hub's dataset, by the name of a task or
            group, or by how such names begin (``longbench``).
        include_path: a folder of the user's own lm_eval tasks.
        limit: first documents of each task, and of each subject of MMLU; all of them if None.
        num_fewshot: examples before each question, of all tasks or by task; the suite's or the task's own where
            None or not named. Tasks that fix it at 0, as TruthfulQA does, keep to that.
        chat: use the tokenizer's chat template; not in the suite ``short``, whose published numbers have none.
        max_length: tokens that prompt and answer may take together; the model's ``max_position_embeddings`` if
            None.
        batch_size: prompts read at once.
        seed: of the choice of examples; 1234 is lm_eval's own.
    """

    suite: str
    tasks: tuple[str, ...] = ()
    data: Mapping[str, Path] = field(default_factory=dict)
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | Mapping[str, int] | None = None
    chat: bool = False
    max_length: int | None = None
    batch_size: int = 8
    seed: int = 1234

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks to run, in order."""
        return tuple(dict.fromkeys(self.tasks)) or DEFAULTS.get(self.suite, ())

    def fewshot_of(self, name: str) -> int | None:
        """Examples before each question of a task; None for the task's own number."""
        given = self.num_fewshot
        asked = given.get(name) if isinstance(given, Mapping) else given
        if asked is None and self.suite == "short" and name in SHORT:
            return SHORT[name][0]
        return asked


def check_retention(settings: RetentionSettings) -> None:
    """Raise for what :func:`retention` would refuse, as far as it can be told without reading data.

    Raises:
        RopewalkError: for an unknown suite or task, a number out of range, or a path that is not there.
    """
    if settings.suite not in ("short", "longbench", "lm_eval"):
        raise RopewalkError(f"unknown suite {settings.suite!r}; choose from short, longbench, lm_eval")
    if not settings.names:
        raise RopewalkError("the suite lm_eval needs the names of tasks; none were given")
    counts = settings.num_fewshot if isinstance(settings.num_fewshot, Mapping) else {"": settings.num_fewshot}
    for value, least, what in (
        *((count, 0, "num_fewshot") for count in counts.values()),
        (settings.limit, 1, "limit"),
        (settings.max_length, 2, "max_length"),
        (settings.batch_size, 1, "batch_size"),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise RopewalkError(f"{what} must be a whole number of at least {least}, got {value!r}")
    for path in settings.data.values():
        BenchmarkFiles(Path(path))
    if harness_installed():
        catalogue = _catalogue(settings)
        below = [task.name for name in settings.names for task in catalogue.tasks_of(name)]
        for key in settings.data:
            if not any(covers(key, name) for name in (*settings.names, *below)):
                raise RopewalkError(
                    f"data are given for {key!r}, but the tasks are {', '.join(settings.names)}"
                )


def harness_installed() -> bool:
    """Whether lm_eval is there; nothing is imported to find out."""
    return find_spec("lm_eval") is not None


def retention(
    model: Any, tokenizer: Any, settings: RetentionSettings, progress: Progress | None = None
) -> list[TaskResult]:
    """Run tasks of lm_eval on a model in memory. All data are loaded before the first prompt is read.

    Prompts are read in batches without a layout, by transformers' own attention. The model's mode, settings and
    weights, the tokenizer and the global random generators are left as they were.

    Args:
        model: a transformers model, such as ``load_model`` gives.
        tokenizer: the model's own.
        settings: what to measure.
        progress: called after each answer.

    Returns:
        One result a task or group, in order; a tag or a group without a common score gives one a task. A group of
        which some tasks have no data, or of whose tasks ``limit`` left documents out, is named as that part:
        ``mmlu (12 of 57 subjects)``, since its score is not the group's. ``samples``
        has each document's score, and the answer in words where the model writes one. A group whose tasks count
        alike though they differ in size has no samples, since their mean is not its score.

    Raises:
        RopewalkError: for bad settings, or data that do not fit their task.
        RunFailure: if the memory gives out, or an answer cannot be scored.

    Source: lm_eval 0.4.13; Bai et al., arXiv:2308.14508, for LongBench.
    """
    check_retention(settings)
    if not harness_installed():
        return [TaskResult.not_run(settings.suite, name, None, NOT_INSTALLED) for name in settings.names]
    from ropewalk.evaluation.backends.protocol import evaluating
    from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel
    from ropewalk.models.config import ModelConfig

    max_length = settings.max_length or ModelConfig.of(model.config).max_position_embeddings
    if max_length is None:
        raise RopewalkError("the model's config states no max_position_embeddings; give max_length in tokens")
    with evaluating(model):
        jobs = _jobs(settings, max_length)
        asked = HarnessModel(model, tokenizer, max_length, settings.batch_size)
        return [result for job in jobs for result in _run(asked, job, settings, progress)]


@dataclass(frozen=True)
class _Job:
    """A task that was loaded, or why it was not; ``sources`` says of each dataset where it comes from."""

    name: str
    loaded: Loaded | None = None
    reason: str = ""
    sources: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def _catalogue(settings: RetentionSettings) -> Catalogue:
    """What is found in the user's own folder is never kept: its files may change."""
    from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue

    if settings.include_path is None:
        return _stock_catalogue(settings.names)
    return Catalogue(settings.names, settings.include_path)


@lru_cache(maxsize=8)
def _stock_catalogue(names: tuple[str, ...]) -> Catalogue:
    """A group of tasks from many folders takes half a minute to find, and is asked for twice."""
    from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue

    return Catalogue(names)


def _jobs(settings: RetentionSettings, max_length: int) -> list[_Job]:
    from ropewalk.data.read.hub import hub_reachable

    catalogue = _catalogue(settings)
    files = {key: BenchmarkFiles(Path(path)) for key, path in settings.data.items()}
    # Asked at most once, and only where something is needed from the hub.
    online = lru_cache(hub_reachable)
    return [_job(name, catalogue, files, settings, max_length, online) for name in settings.names]


def _job(
    name: str,
    catalogue: Catalogue,
    files: Mapping[str, BenchmarkFiles],
    settings: RetentionSettings,
    max_length: int,
    online: Callable[[], bool],
) -> _Job:
    from ropewalk.evaluation.tasks.lm_eval.catalogue import CannotRun, check_runnable, load

    tasks = catalogue.tasks_of(name)
    rows, paths = local_rows(name, tasks, files)
    given = [str(files[key].path) for key in files if covers(key, name)]
    if given and not rows:
        if name in files:
            raise RopewalkError(f"{given[0]} holds nothing for {name}")
        return _Job(name, reason=f"{given[0]} holds nothing for it")
    try:
        loaded = load(catalogue, name, rows, settings.fewshot_of(name), settings.seed, online)
        check_runnable(loaded, max_length)
    except CannotRun as error:
        return _Job(name, reason=str(error))
    hub = {f"hub:{task.dataset}" for task in tasks if task.from_hub}
    left_out = tuple(task.name for task in tasks if rows and task.name not in rows)
    return _Job(name, loaded, sources=tuple(sorted(paths if rows else hub)), left_out=left_out)


def _run(
    asked: HarnessModel, job: _Job, settings: RetentionSettings, progress: Progress | None
) -> list[TaskResult]:
    from ropewalk.evaluation.tasks.lm_eval.harness import Outcome, installed_version, run

    if job.loaded is None:
        return [TaskResult.not_run(settings.suite, job.name, None, job.reason)]
    name = job.name
    asked.progress = None if progress is None else lambda done, total: progress(name, done, total)
    outcome = run(
        asked,
        job.loaded,
        settings.limit,
        lambda task: _manner(task, settings),
        lambda task: SHORT[task][1] if task in SHORT else None,
        settings.seed,
    )
    details = {
        "dataset": job.sources[0] if len(job.sources) == 1 else list(job.sources),
        "lm_eval": installed_version(),
        "max_length": asked.max_length,
        "limit": settings.limit,
        "seed": settings.seed,
        "left_out": list(job.left_out),
    }
    alone = [(_named(job, settings.limit), outcome)]
    if outcome.value is None and len(outcome.tasks) > 1:
        alone = [(task.name, Outcome((task,))) for task in outcome.tasks]
    return [
        task_result(
            settings.suite,
            each,
            found,
            {**details, "fewshot_examples": _fewshot(job.loaded, found)},
            _remarks(job, found, settings),
        )
        for each, found in alone
    ]


def _named(job: _Job, limit: int | None) -> str:
    """A group's name, with the part of it that was measured where that is not all of it: the score is another."""
    assert job.loaded is not None
    tasks = job.loaded.tasks
    if job.loaded.group is None:
        return job.name
    kind, question = ("subject", "question") if job.name == "mmlu" else ("task", "document")
    parts = []
    if job.left_out:
        parts.append(f"{len(tasks)} of {len(tasks) + len(job.left_out)} {kind}s")
    if limit is not None and any(len(task.eval_docs) > limit for task in tasks.values()):
        parts.append(f"first {question} of each" if limit == 1 else f"first {limit} {question}s of each")
        parts[-1] += "" if job.left_out else f" {kind}"
    return f"{job.name} ({', '.join(parts)})" if parts else job.name


def _manner(task: str, settings: RetentionSettings) -> Manner:
    from ropewalk.evaluation.tasks.lm_eval.harness import Manner

    longbench = task.startswith("longbench_")
    without = longbench and task.removeprefix("longbench_").removesuffix("_e") in WITHOUT_TEMPLATE
    return Manner(chat=settings.chat and settings.suite != "short" and not without, middle=longbench)


def _fewshot(loaded: Loaded, outcome: Any) -> str:
    """Where the examples come from, in words; empty where there are none."""
    return ", ".join(sorted({loaded.fewshot[task.name] for task in outcome.tasks} - {""}))


def _remarks(job: _Job, outcome: Any, settings: RetentionSettings) -> list[str]:
    assert job.loaded is not None
    remarks = []
    cut = sum(task.truncated for task in outcome.tasks)
    if cut:
        lost = "middle" if _manner(outcome.tasks[0].name, settings).middle else "beginning"
        total = sum(len(task.values) for task in outcome.tasks)
        remarks.append(f"{cut} of {total} prompts were too long and lost their {lost}")
    examples = _fewshot(job.loaded, outcome)
    if examples.startswith("the questions"):
        remarks.append(f"examples come from {examples}, since the data have no other split")
    fixed = sorted({task.name for task in outcome.tasks} & set(job.loaded.fixed))
    if fixed:
        remarks.append("the task fixes the number of examples at 0")
    if job.left_out:
        total = len(job.left_out) + len(job.loaded.tasks)
        remarks.append(f"{len(job.left_out)} of {total} tasks have no data and are left out")
    return remarks


PERPLEXITIES = ("perplexity", "weighted_perplexity")
"""lm_eval's aggregations that give e to the mean loss of a document, or of its words or bytes."""

IN_PERCENT = ("bleu", "chrf", "ter")
"""lm_eval's aggregations whose values are percent already."""


@dataclass(frozen=True)
class Scored:
    """One task's score in our units.

    Attributes:
        score: percent or perplexity; NaN where the metric is neither.
        unit: which.
        ci95: of the score.
        samples: one JSON object a document; empty where the score is no mean over documents.
        remark: what is to be said of the score, or None.
    """

    score: float
    unit: Unit
    ci95: Interval
    samples: tuple[dict[str, Any], ...] = ()
    remark: str | None = None


def task_result(
    suite: str, name: str, outcome: Outcome, details: Mapping[str, Any], remarks: Sequence[str]
) -> TaskResult:
    """The result of a task, or of a group whose tasks have a common score.

    Args:
        suite: as on the command line.
        name: as it was asked for.
        outcome: what lm_eval found.
        details: further facts, JSON values.
        remarks: what is to be said of the score.
    """
    alone = outcome.value is None
    parts = [scored(task) for task in outcome.tasks]
    whole = parts[0] if alone else _group(outcome, parts)
    first = outcome.tasks[0]
    facts: dict[str, Any] = {
        "metric": first.metric,
        "metrics": _finite(first.metrics) if alone else {first.metric: outcome.value},
        "higher_is_better": first.higher_is_better,
        "num_fewshot": _common([task.num_fewshot for task in outcome.tasks]),
        "task_version": _common([task.version for task in outcome.tasks]),
        "truncated": sum(task.truncated for task in outcome.tasks),
        SAMPLES: digest([[task.name, *task.asked] for task in outcome.tasks]),
    }
    if not alone:
        facts["subtasks"] = {
            task.name: _subtask(task, part) for task, part in zip(outcome.tasks, parts, strict=True)
        }
    if not alone and not whole.samples:
        facts["tasks"] = [task.name for task in outcome.tasks]
    said = [*remarks, *([whole.remark] if whole.remark else [])]
    if math.isnan(whole.score):
        empty = TaskResult.not_run(suite, name, None, "; ".join(said))
        return TaskResult(**{**empty.__dict__, "details": {**facts, **details}})
    return TaskResult(
        suite=suite,
        task=name,
        length=None,
        n=sum(len(task.values) for task in outcome.tasks),
        score=whole.score,
        ci95=whole.ci95,
        reason="; ".join(said) or None,
        details={**facts, **details},
        unit=whole.unit,
        samples=whole.samples,
    )


def scored(task: TaskOutcome) -> Scored:
    """A task's main metric in percent or as a perplexity.

    A mean of values from 0 to 1 becomes percent, with :func:`~ropewalk.evaluation.statistics.score_interval`.
    Perplexities have Student's interval over documents. A metric that is no mean over documents (F1 over a whole
    set, BLEU) has no interval, which the remark says.

    Args:
        task: what lm_eval found.
    """
    if task.aggregation in PERPLEXITIES:
        return _perplexity(task)
    plain = all(isinstance(value, int | float) for value in _numbers(task.values))
    if task.aggregation == "mean" and plain and _shares(task.values):
        shares = [float(value) for value in task.values]
        samples = _samples(task, [100 * share for share in shares])
        return Scored(100 * task.value, "percent", _percent(score_interval(shares)), samples)
    if task.aggregation in IN_PERCENT or 0 <= task.value <= 1:
        score = task.value if task.aggregation in IN_PERCENT else 100 * task.value
        remark = f"no interval: {task.metric} is no mean of shares over documents"
        return Scored(score, "percent", NO_INTERVAL, remark=remark)
    remark = f"its metric {task.metric} is {task.value:.6g}, neither a share of 1 nor a perplexity"
    return Scored(math.nan, "percent", NO_INTERVAL, remark=remark)


def _perplexity(task: TaskOutcome) -> Scored:
    pairs = [value if isinstance(value, tuple | list) else (value, 1) for value in task.values]
    nats, units = [-float(likelihood) for likelihood, _ in pairs], [int(count) for _, count in pairs]
    low, high = ratio_interval(nats, units, at_least=0)
    samples = tuple(
        {"index": index, "nats": loss, "tokens": count}
        for index, loss, count in zip(task.indices, nats, units, strict=True)
    )
    remark = None if math.isfinite(task.value) else f"the {task.metric} is not a finite number"
    score = task.value if math.isfinite(task.value) else math.nan
    return Scored(score, "perplexity", (exp_nats(low), exp_nats(high)), samples, remark)


def _group(outcome: Outcome, parts: Sequence[Scored]) -> Scored:
    assert outcome.value is not None
    if any(part.unit != "percent" or not part.samples for part in parts):
        remark = f"no interval: {outcome.tasks[0].metric} is no mean of shares over documents"
        inside = 0 <= outcome.value <= 1
        return Scored(100 * outcome.value if inside else math.nan, "percent", NO_INTERVAL, remark=remark)
    # Samples stand for the score only where their plain mean is the score.
    usable = outcome.by_size or len({len(task.values) for task in outcome.tasks}) == 1
    samples: list[dict[str, Any]] = []
    for task, part in zip(outcome.tasks, parts, strict=True):
        for sample in part.samples:
            samples.append({**sample, "task": task.name, "document": sample["index"], "index": len(samples)})
    if outcome.by_size:
        interval = score_interval([float(value) for task in outcome.tasks for value in task.values])
    else:
        interval = mean_score_interval([[float(value) for value in task.values] for task in outcome.tasks])
    return Scored(100 * outcome.value, "percent", _percent(interval), tuple(samples) if usable else ())


def _percent(interval: Interval) -> Interval:
    low, high = interval
    return 100 * low, 100 * high


def _shares(values: Sequence[Any]) -> bool:
    return all(0 <= float(value) <= 1 for value in values)


def _numbers(values: Sequence[Any]) -> list[Any]:
    """numpy's scalars as Python's own, all else as it is."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def _samples(task: TaskOutcome, scores: Sequence[float]) -> tuple[dict[str, Any], ...]:
    samples: list[dict[str, Any]] = [
        {"index": index, "score": score} for index, score in zip(task.indices, scores, strict=True)
    ]
    for sample, answer in zip(samples, task.answers, strict=False):
        sample["prediction"] = answer
    return tuple(samples)


def _subtask(task: TaskOutcome, part: Scored) -> dict[str, Any]:
    ends = [None if math.isnan(end) else end for end in part.ci95]
    score = None if math.isnan(part.score) else part.score
    return {
        "score": score,
        "n": len(task.values),
        "ci95": ends,
        "metrics": _finite(task.metrics),
        "truncated": task.truncated,
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _common(values: Sequence[Any]) -> Any:
    """The one value that all have, or each one's."""
    return values[0] if len(set(values)) == 1 else list(values)


class HarnessSettings(Settings):
    """What lm_eval's suites read."""

    group: ClassVar[str | None] = "Short context (lm_eval)"

    harness: Annotated[
        dict[str, ExistingPath],
        BeforeValidator(lambda value: pairs(value, "TASK=PATH", "hellaswag=data/hellaswag.jsonl")),
        Option(name="--lm-eval-data", metavar="TASK=PATH", repeated=True),
    ] = Field({}, description="Local data in place of the hub's, for one task; may be repeated.")
    harness_tasks: Annotated[FilePath | None, Option(name="--lm-eval-include")] = Field(
        None, description="Folder of lm_eval tasks of your own."
    )
    harness_limit: Annotated[int | None, Option(name="--lm-eval-limit")] = Field(
        None, ge=1, description="Most documents of a task; all if not given."
    )


class LmEvalSettings(Settings):
    """What the suite lm_eval alone reads."""

    harness_names: Annotated[CommaList, HARNESS, Option(name="--lm-eval-tasks")] = Field(
        (), description="Tasks of the suite lm_eval, with commas between."
    )


def harness_settings(
    settings: BenchmarkSettings, suite: str, tasks: tuple[str, ...], batch_size: int
) -> RetentionSettings:
    """What lm_eval is to measure of an evaluation.

    One option names the data of all suites; a suite is told of its own alone.
    """
    given = settings.of(HarnessSettings)
    own = {name: path for name, path in given.harness.items() if any(_concerns(name, task) for task in tasks)}
    return RetentionSettings(
        suite=suite,
        tasks=tasks,
        data=own,
        include_path=given.harness_tasks,
        limit=given.harness_limit,
        chat=settings.chat,
        batch_size=batch_size,
        seed=settings.seed,
    )


def unknown_data(settings: BenchmarkSettings, tasks: Sequence[str]) -> list[str]:
    """The names in the user's data that are of none of the tasks."""
    return [
        name
        for name in settings.of(HarnessSettings).harness
        if not any(_concerns(name, task) for task in tasks)
    ]


def _concerns(name: str, task: str) -> bool:
    """Whether data under a name are of a task, of its group, or of a part of it."""
    return name.startswith(task) or task.startswith(name)


SHORT_SUITE = HarnessSuite(
    name="short",
    title="Short context",
    figure="bars",
    settings={"harness_run": HarnessSettings},
    tasks=lambda settings: tuple(SHORT),
)
LONGBENCH_SUITE = HarnessSuite(
    name="longbench",
    title="LongBench",
    figure="bars",
    settings={"harness_run": HarnessSettings},
    tasks=lambda settings: LONGBENCH,
)
LM_EVAL_SUITE = HarnessSuite(
    name="lm_eval",
    title="lm_eval tasks",
    figure="bars",
    settings={"harness_run": HarnessSettings, "lm_eval": LmEvalSettings},
    tasks=lambda settings: settings.of(LmEvalSettings).harness_names,
)
