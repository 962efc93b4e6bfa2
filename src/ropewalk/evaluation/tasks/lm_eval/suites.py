"""Suites of lm_eval tasks: short-context abilities (``short``), LongBench, and any other task of lm_eval.

lm_eval is optional, and data may be missing. A task that cannot run gets the status *not run* with a reason, and the
others continue. HellaSwag uses 10 few-shot examples, MMLU 5, ARC-Challenge 25 and TruthfulQA none, as in the Open LLM
Leaderboard. LongBench's prompts are truncated in the middle. For chat models they use the chat template, except in
few-shot and code tasks (THUDM/LongBench, ``pred.py``). lm_eval truncates the prompts of all other tasks at the
beginning.
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
    finite_or_none,
    mean_score_interval,
    ratio_interval,
    score_interval,
)
from ropewalk.evaluation.tasks.benchmark_files import BenchmarkFiles, covers, local_rows
from ropewalk.evaluation.tasks.suite import HARNESS, BenchmarkSettings, HarnessSuite
from ropewalk.io.digests import digest
from ropewalk.io.results import plain_json
from ropewalk.io.settings import CommaList, ExistingPath, FilePath, Option, Settings, pairs

if TYPE_CHECKING:
    from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue, Loaded
    from ropewalk.evaluation.tasks.lm_eval.harness import Outcome, PromptFormat, TaskOutcome
    from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel


NOT_INSTALLED = "lm_eval is not installed; pip install ropewalk[lm-eval]"

SHORT: Mapping[str, tuple[int, str]] = {
    "hellaswag": (10, "acc_norm"),
    "mmlu": (5, "acc"),
    "arc_challenge": (25, "acc_norm"),
    "truthfulqa_mc2": (0, "acc"),
}
"""Tasks of the suite ``short``: number of few-shot examples, and the reported metric."""

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
"""LongBench's few-shot and code tasks, for which the published protocol uses no chat template."""

Progress = Callable[[str, int, int], None]
"""Called with a task's name, the number of answered requests, and the total."""


@dataclass(frozen=True)
class RetentionSettings:
    """Settings of a run of lm_eval.

    Attributes:
        suite: ``short``, ``longbench`` or ``lm_eval``; the suite's name in the results.
        tasks: lm_eval tasks, groups or tags.
        data: local files or folders (see ``BenchmarkFiles``) that replace Hub datasets, keyed by a task, a group, or a
            prefix of such names (``longbench``).
        include_path: folder of the user's own lm_eval tasks.
        limit: use only the first ``limit`` documents of each task (and of each subject of MMLU); None for all.
        num_fewshot: number of few-shot examples; None for the tasks' own. Tasks whose own number is 0, such as
            TruthfulQA, keep it.
        chat: use the tokenizer's chat template; ignored by the suite ``short``, whose published scores use none.
        max_length: maximum number of tokens of prompt and answer together; None for the model's
            ``max_position_embeddings``.
        batch_size: prompts per batch.
        seed: random seed for the choice of few-shot examples; 1234 is lm_eval's default.
    """

    suite: str
    tasks: tuple[str, ...]
    data: Mapping[str, Path] = field(default_factory=dict)
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = False
    max_length: int | None = None
    batch_size: int = 8
    seed: int = 1234


def check_retention(settings: RetentionSettings) -> None:
    """Check the settings of :func:`retention` as far as possible without reading data.

    Raises:
        RopewalkError: for an unknown task, a path that does not exist, or data of none of the tasks.
    """
    for path in settings.data.values():
        # For its check that the path exists; the data are read later.
        BenchmarkFiles(Path(path))
    if harness_installed():
        catalogue = _catalogue(settings)
        below = [task.name for name in settings.tasks for task in catalogue.tasks_of(name)]
        for key in settings.data:
            if not any(covers(key, name) for name in (*settings.tasks, *below)):
                raise RopewalkError(
                    f"local data are given for {key!r}, which matches none of the tasks {', '.join(settings.tasks)}"
                )


def harness_installed() -> bool:
    """Whether lm_eval is installed; this does not import it."""
    return find_spec("lm_eval") is not None


def retention(
    model: Any, tokenizer: Any, settings: RetentionSettings, progress: Progress | None = None
) -> list[TaskResult]:
    """Run lm_eval tasks on a model in memory. All data are loaded before the first forward pass.

    Prompts are batched without packing, with transformers' own attention. The model's mode, settings and weights, the
    tokenizer and the global random generators are left unchanged.

    Args:
        model: a transformers model, for example from ``load_model``.
        tokenizer: the model's tokenizer.
        settings: what to measure.
        progress: called after each answer.

    Returns:
        One result per task or group, in order; a tag, or a group without a common score, gives one per task. If some
        tasks of a group have no data, or ``limit`` leaves out documents, the name of the result says so (``mmlu (12 of
        57 subjects)``), because its score is not that of the whole group. ``samples`` contains the score of each
        document, and the answer if the model generates one. Groups that weight tasks of different sizes equally have no
        samples, because the mean over samples is not the group's score.

    Raises:
        RopewalkError: for invalid settings, data that do not fit their task, or a model with a length-dependent RoPE
            in transformers' rotary module.
        RunFailure: if memory runs out, or an answer cannot be scored.

    Source: lm_eval 0.4.13; Bai et al., arXiv:2308.14508, for LongBench.
    """
    check_retention(settings)
    if not harness_installed():
        return [TaskResult.not_run(settings.suite, name, None, NOT_INSTALLED) for name in settings.tasks]
    from ropewalk.evaluation.backends.in_memory import refuse_unpinned
    from ropewalk.evaluation.backends.protocol import evaluating
    from ropewalk.evaluation.tasks.lm_eval.model import HarnessModel
    from ropewalk.models.config.model import ModelConfig

    refuse_unpinned(model)
    max_length = settings.max_length or ModelConfig.of(model.config).max_position_embeddings
    if max_length is None:
        raise RopewalkError("the model's config states no max_position_embeddings; set max_length in tokens")
    with evaluating(model):
        jobs = _jobs(settings, max_length)
        harness_model = HarnessModel(model, tokenizer, max_length, settings.batch_size)
        return [result for job in jobs for result in _run(harness_model, job, settings, progress)]


@dataclass(frozen=True)
class _Job:
    """A loaded task, or the reason why it could not be loaded; ``sources`` lists where its datasets come from."""

    name: str
    loaded: Loaded | None = None
    reason: str = ""
    sources: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def _catalogue(settings: RetentionSettings) -> Catalogue:
    """Return the catalogue of the requested tasks; with a user's folder it is not cached, because files may change."""
    from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue

    if settings.include_path is None:
        return _stock_catalogue(settings.tasks)
    return Catalogue(settings.tasks, settings.include_path)


@lru_cache(maxsize=8)
def _stock_catalogue(names: tuple[str, ...]) -> Catalogue:
    """Cached, because finding a group with tasks in many folders takes half a minute and happens twice per run."""
    from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue

    return Catalogue(names)


def _jobs(settings: RetentionSettings, max_length: int) -> list[_Job]:
    from ropewalk.data.read.hub import hub_reachable

    catalogue = _catalogue(settings)
    files = {key: BenchmarkFiles(Path(path)) for key, path in settings.data.items()}
    # Check the connection at most once, and only if something is needed from the Hub.
    online = lru_cache(hub_reachable)
    return [_job(name, catalogue, files, settings, max_length, online) for name in settings.tasks]


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
        # Data given under the task's own name must fit; data for a whole group may leave tasks out.
        if name in files:
            raise RopewalkError(f"{given[0]} has no data for {name}")
        return _Job(name, reason=f"{given[0]} has no data for this task")
    try:
        # All tasks are loaded before the first one runs, so that a missing file costs no measurement.
        loaded = load(catalogue, name, rows, settings.num_fewshot, settings.seed, online)
        check_runnable(loaded, max_length)
    except CannotRun as error:
        return _Job(name, reason=str(error))
    hub = {f"hub:{task.dataset}" for task in tasks if task.from_hub}
    left_out = tuple(task.name for task in tasks if rows and task.name not in rows)
    return _Job(name, loaded, sources=tuple(sorted(paths if rows else hub)), left_out=left_out)


def _run(
    harness_model: HarnessModel, job: _Job, settings: RetentionSettings, progress: Progress | None
) -> list[TaskResult]:
    from ropewalk.evaluation.tasks.lm_eval.harness import Outcome, installed_version, run

    if job.loaded is None:
        return [TaskResult.not_run(settings.suite, job.name, None, job.reason)]
    name = job.name
    harness_model.progress = None if progress is None else lambda done, total: progress(name, done, total)
    outcome = run(
        harness_model,
        job.loaded,
        settings.limit,
        lambda task: _prompt_format(task, settings),
        lambda task: SHORT[task][1] if task in SHORT else None,
        settings.seed,
    )
    details = {
        "dataset": job.sources[0] if len(job.sources) == 1 else list(job.sources),
        "lm_eval": installed_version(),
        "max_length": harness_model.max_length,
        "limit": settings.limit,
        "seed": settings.seed,
        "left_out": list(job.left_out),
    }
    alone = [(_named(job, settings.limit), outcome)]
    # Without a common score, each task is a result of its own.
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
    """Return a group's name, with the measured part if that is not all of it, because its score is not the group's."""
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


def _prompt_format(task: str, settings: RetentionSettings) -> PromptFormat:
    from ropewalk.evaluation.tasks.lm_eval.harness import PromptFormat

    longbench = task.startswith("longbench_")
    # LongBench-E has the same tasks with _e at the end of their names.
    without = longbench and task.removeprefix("longbench_").removesuffix("_e") in WITHOUT_TEMPLATE
    return PromptFormat(chat=settings.chat and settings.suite != "short" and not without, middle=longbench)


def _fewshot(loaded: Loaded, outcome: Any) -> str:
    """Return where the few-shot examples come from, in words; empty without examples."""
    return ", ".join(sorted({loaded.fewshot[task.name] for task in outcome.tasks} - {""}))


def _remarks(job: _Job, outcome: Any, settings: RetentionSettings) -> list[str]:
    assert job.loaded is not None
    remarks = []
    cut = sum(task.truncated for task in outcome.tasks)
    if cut:
        lost = "middle" if _prompt_format(outcome.tasks[0].name, settings).middle else "beginning"
        total = sum(len(task.values) for task in outcome.tasks)
        remarks.append(f"{cut} of {total} prompts were too long, and their {lost} was removed")
    examples = _fewshot(job.loaded, outcome)
    if examples.startswith("the questions"):
        remarks.append(f"few-shot examples come from {examples}, because the data have no other split")
    if job.left_out:
        total = len(job.left_out) + len(job.loaded.tasks)
        remarks.append(f"{len(job.left_out)} of {total} tasks have no data and were left out")
    return remarks


PERPLEXITIES = ("perplexity", "weighted_perplexity")
"""lm_eval's aggregations that exponentiate the mean loss per document, word or byte."""

IN_PERCENT = ("bleu", "chrf", "ter")
"""lm_eval's aggregations whose values are already in percent."""


@dataclass(frozen=True)
class Scored:
    """A task's score in our units.

    Attributes:
        score: percent or perplexity; NaN if the metric is neither.
        unit: unit of the score.
        ci95: 95 % interval of the score.
        samples: one JSON object per document; empty if the score is not a mean over documents.
        remark: remark on the score, or None.
    """

    score: float
    unit: Unit
    ci95: Interval
    samples: tuple[dict[str, Any], ...] = ()
    remark: str | None = None


def task_result(
    suite: str, name: str, outcome: Outcome, details: Mapping[str, Any], remarks: Sequence[str]
) -> TaskResult:
    """Convert the outcome of a task, or of a group with a common score, to a task result.

    Args:
        suite: name of the suite, as on the command line.
        name: name of the task or group, as requested.
        outcome: outcome of lm_eval.
        details: additional facts, JSON values.
        remarks: remarks on the score.
    """
    alone = outcome.value is None
    parts = [scored(task) for task in outcome.tasks]
    whole = parts[0] if alone else _group(outcome, parts)
    first = outcome.tasks[0]
    facts: dict[str, Any] = {
        "metric": first.metric,
        # lm_eval gives a group one value; other metrics are those of its tasks.
        "metrics": plain_json(first.metrics) if alone else {first.metric: outcome.value},
        "higher_is_better": first.higher_is_better,
        "num_fewshot": _common([task.num_fewshot for task in outcome.tasks]),
        "task_version": _common([task.version for task in outcome.tasks]),
        "truncated": sum(task.truncated for task in outcome.tasks),
        SAMPLES: digest([[task.name, *task.prompt_digests] for task in outcome.tasks]),
    }
    if not alone:
        facts["subtasks"] = {
            task.name: _subtask(task, part) for task, part in zip(outcome.tasks, parts, strict=True)
        }
    # Without samples of its own, the group can be compared only by the results of these tasks.
    if not alone and not whole.samples:
        facts["tasks"] = [task.name for task in outcome.tasks]
    all_remarks = [*remarks, *([whole.remark] if whole.remark else [])]
    if math.isnan(whole.score):
        # Without a score, but with the facts, which say what was measured.
        empty = TaskResult.not_run(suite, name, None, "; ".join(all_remarks))
        return TaskResult(**{**empty.__dict__, "details": {**facts, **details}})
    return TaskResult(
        suite=suite,
        task=name,
        length=None,
        n=sum(len(task.values) for task in outcome.tasks),
        score=whole.score,
        ci95=whole.ci95,
        reason="; ".join(all_remarks) or None,
        details={**facts, **details},
        unit=whole.unit,
        samples=whole.samples,
    )


def scored(task: TaskOutcome) -> Scored:
    """Convert a task's main metric to percent or a perplexity.

    Means of values from 0 to 1 are converted to percent, with the interval of
    :func:`~ropewalk.evaluation.statistics.score_interval`. Perplexities have Student's interval over documents. Metrics
    that are not means over documents (F1 over a whole set, BLEU) have no interval; the remark says so.

    Args:
        task: outcome of lm_eval.
    """
    if task.aggregation in PERPLEXITIES:
        return _perplexity(task)
    # Some metrics give tuples for a document, which only their own aggregation can read.
    plain = all(isinstance(value, int | float) for value in _numbers(task.values))
    if task.aggregation == "mean" and plain and _shares(task.values):
        shares = [float(value) for value in task.values]
        samples = _samples(task, [100 * share for share in shares])
        return Scored(100 * task.value, "percent", _percent(score_interval(shares)), samples)
    if task.aggregation in IN_PERCENT or 0 <= task.value <= 1:
        score = task.value if task.aggregation in IN_PERCENT else 100 * task.value
        remark = f"no interval: {task.metric} is not a mean over documents of values from 0 to 1"
        return Scored(score, "percent", NO_INTERVAL, remark=remark)
    remark = f"its metric {task.metric} is {task.value:.6g}, which is neither from 0 to 1 nor a perplexity"
    return Scored(math.nan, "percent", NO_INTERVAL, remark=remark)


def _perplexity(task: TaskOutcome) -> Scored:
    # lm_eval gives pairs of log-likelihood and number of words or bytes where it weights, else plain numbers.
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
        remark = f"no interval: {outcome.tasks[0].metric} is not a mean over documents of values from 0 to 1"
        inside = 0 <= outcome.value <= 1
        return Scored(100 * outcome.value if inside else math.nan, "percent", NO_INTERVAL, remark=remark)
    # Keep samples only if their plain mean is the group's score.
    usable = outcome.by_size or len({len(task.values) for task in outcome.tasks}) == 1
    samples: list[dict[str, Any]] = []
    for task, part in zip(outcome.tasks, parts, strict=True):
        for sample in part.samples:
            # Indices repeat between tasks, and a comparison pairs samples by their index.
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
    """Convert numpy scalars to Python numbers; keep other values."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def _samples(task: TaskOutcome, scores: Sequence[float]) -> tuple[dict[str, Any], ...]:
    samples: list[dict[str, Any]] = [
        {"index": index, "score": score} for index, score in zip(task.indices, scores, strict=True)
    ]
    # Tasks without generation have no answers.
    for sample, answer in zip(samples, task.answers, strict=False):
        sample["prediction"] = answer
    return tuple(samples)


def _subtask(task: TaskOutcome, part: Scored) -> dict[str, Any]:
    return {
        "score": finite_or_none(part.score),
        "n": len(task.values),
        "ci95": [finite_or_none(end) for end in part.ci95],
        "metrics": plain_json(task.metrics),
        "truncated": task.truncated,
    }


def _common(values: Sequence[Any]) -> Any:
    """Return the value that all have in common, or the list of values."""
    return values[0] if len(set(values)) == 1 else list(values)


class HarnessSettings(Settings):
    """Settings of all suites that lm_eval runs: short, longbench and lm_eval."""

    group: ClassVar[str | None] = "Short context (lm_eval)"

    harness: Annotated[
        dict[str, ExistingPath],
        BeforeValidator(lambda value: pairs(value, "TASK=PATH", "hellaswag=data/hellaswag.jsonl")),
        Option(name="--lm-eval-data", metavar="TASK=PATH", repeated=True),
    ] = Field(
        default={},
        description="Local file or folder with the data of an lm_eval task. Tasks that are not named load their data "
        "from the Hub.",
    )
    harness_tasks: Annotated[FilePath | None, Option(name="--lm-eval-include")] = Field(
        default=None, description="Folder with the YAML files of your own lm_eval tasks. Default: none."
    )
    harness_limit: Annotated[int | None, Option(name="--lm-eval-limit")] = Field(
        default=None, ge=1, description="Maximum number of documents per lm_eval task. Default: no limit."
    )


class LmEvalSettings(Settings):
    """Settings of the suite lm_eval, which runs any task of the package lm_eval."""

    harness_names: Annotated[CommaList, HARNESS, Option(name="--lm-eval-tasks")] = Field(
        default=(),
        description="Tasks, groups or tags for the suite lm_eval. Required for this suite.",
    )


def harness_settings(
    settings: BenchmarkSettings, suite: str, tasks: Sequence[str], batch_size: int
) -> RetentionSettings:
    """Build the settings of lm_eval for some tasks of a suite; of the suite ``short``, which has its own numbers of
    few-shot examples, those of the first.

    ``--lm-eval-data`` covers all suites, so each suite gets only the data for its own tasks.
    """
    given = settings.of(HarnessSettings)
    own = {name: path for name, path in given.harness.items() if any(_concerns(name, task) for task in tasks)}
    return RetentionSettings(
        suite=suite,
        # A user may name a task twice.
        tasks=tuple(dict.fromkeys(tasks)),
        data=own,
        include_path=given.harness_tasks,
        limit=given.harness_limit,
        num_fewshot=SHORT[tasks[0]][0] if suite == "short" else None,
        chat=settings.chat,
        batch_size=batch_size,
        seed=settings.seed,
    )


def unknown_data(settings: BenchmarkSettings, tasks: Sequence[str]) -> list[str]:
    """Return the names in the user's data that match none of the tasks."""
    return [
        name
        for name in settings.of(HarnessSettings).harness
        if not any(_concerns(name, task) for task in tasks)
    ]


def _concerns(name: str, task: str) -> bool:
    """Whether data under a name belong to a task, to its group, or to a part of it."""
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
