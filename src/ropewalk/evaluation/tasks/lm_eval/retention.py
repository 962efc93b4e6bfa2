"""What a model kept of its short-context abilities, LongBench, and any other task of lm_eval.

lm_eval is optional, and data may be missing: a task that cannot run is *not run*, with the reason, and the
others go on. HellaSwag takes 10 examples, MMLU 5, ARC-Challenge 25 and TruthfulQA none, as in the Open LLM
Leaderboard. LongBench's prompts are cut in the middle and, for chat models, put into the chat template except
in its few-shot and code tasks (THUDM/LongBench, ``pred.py``); all other tasks are cut as lm_eval cuts them,
at their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.tasks.benchmark_files import BenchmarkFiles, covers, local_rows
from ropewalk.evaluation.tasks.lm_eval.results import task_result

if TYPE_CHECKING:
    from ropewalk.evaluation.tasks.lm_eval.harness import Catalogue, HarnessModel, Loaded, Manner

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
    from ropewalk.evaluation.running import evaluating
    from ropewalk.evaluation.tasks.lm_eval.harness import HarnessModel

    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_length = settings.max_length or stated
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
    from ropewalk.evaluation.tasks.lm_eval.harness import Catalogue

    if settings.include_path is None:
        return _stock_catalogue(settings.names)
    return Catalogue(settings.names, settings.include_path)


@lru_cache(maxsize=8)
def _stock_catalogue(names: tuple[str, ...]) -> Catalogue:
    """A group of tasks from many folders takes half a minute to find, and is asked for twice."""
    from ropewalk.evaluation.tasks.lm_eval.harness import Catalogue

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
    from ropewalk.evaluation.tasks.lm_eval.harness import CannotRun, check_runnable, load

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
