"""RULERv2's twelve tasks, its overall score, and the suite.

Basic tasks need no data set. Those with questions of MMLU need the user's files (``--benchmark-data``), those with
documents of HotpotQA the file that RULER's qa_2 reads. Upstream takes the documents around from HotpotQA's training
set; here they are those of other questions of the dev set.

Source: NVIDIA-NeMo/Skills, ``dataset/ruler2`` (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.samples import Task
from ropewalk.evaluation.tasks.published.rows import PublishedSettings
from ropewalk.evaluation.tasks.ruler.qa import QuestionTask
from ropewalk.evaluation.tasks.ruler.tasks import HotpotqaSettings, mean_of_all
from ropewalk.evaluation.tasks.ruler2.basic import BasicRetrieval
from ropewalk.evaluation.tasks.ruler2.documents import DocumentTask
from ropewalk.evaluation.tasks.ruler2.mmlu import MmluTask
from ropewalk.evaluation.tasks.ruler2.scores import METRICS
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite

NAME = "ruler2"
LEVELS = ("basic", "easy", "medium", "hard")
TASKS = tuple(f"{kind}_{level}" for kind in ("mk_niah", "mv_niah", "qa") for level in LEVELS)


def _tasks(settings: BenchmarkSettings) -> Mapping[str, Task]:
    mmlu = settings.of(PublishedSettings).benchmark_data.get(NAME)
    hotpotqa = QuestionTask("qa", "hotpotqa", settings.of(HotpotqaSettings).hotpotqa)

    def task(name: str) -> Task:
        if name.startswith("qa"):
            return DocumentTask(name, hotpotqa)
        return BasicRetrieval(name) if name.endswith("basic") else MmluTask(name, mmlu)

    return {name: task(name) for name in TASKS}


def _mean(results: Sequence[TaskResult], selected: Sequence[str]) -> list[TaskResult]:
    return mean_of_all(results, len(TASKS))


def _sharing(settings: BenchmarkSettings) -> int:
    # Without MMLU there is no overall score, and each task has its own.
    if NAME not in settings.of(PublishedSettings).benchmark_data:
        return 1
    named = {*TASKS} & {*settings.tasks} or {*TASKS}
    return len(TASKS) if named.isdisjoint(settings.exclude) and len(named) == len(TASKS) else 1


SUITE = GeneratedSuite(
    name=NAME,
    title="RULERv2",
    figure="tasks",
    settings={"published": PublishedSettings, "questions": HotpotqaSettings},
    tasks=_tasks,
    metrics=METRICS,
    mean=_mean,
    sharing=_sharing,
)
