"""SUITES: all benchmarks, in the order of tables; and functions that select the suites and tasks to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.samples import Metric
from ropewalk.evaluation.tasks import (
    babilong,
    counting,
    graphwalks,
    icl,
    longeval,
    longppl,
    mrcr,
    needle,
    nolima,
    passkey,
    perplexity,
)
from ropewalk.evaluation.tasks.lm_eval import suites as lm_eval
from ropewalk.evaluation.tasks.published import (
    aa_lcr,
    helmet,
    helmet_icl,
    helmet_narrativeqa,
    infinitebench,
    longbench_pro,
    longbench_v2,
    longproc,
    repoqa,
)
from ropewalk.evaluation.tasks.published import mrcr as published_mrcr
from ropewalk.evaluation.tasks.ruler import tasks as ruler
from ropewalk.evaluation.tasks.ruler2 import tasks as ruler2
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite, LikelihoodSuite, Suite
from ropewalk.io.settings import near_or_all

SUITES: tuple[Suite, ...] = (
    ruler.SUITE,
    passkey.SUITE,
    longeval.SUITE,
    needle.SUITE,
    nolima.SUITE,
    graphwalks.SUITE,
    babilong.SUITE,
    mrcr.SUITE,
    icl.SUITE,
    counting.SUITE,
    ruler2.SUITE,
    published_mrcr.OPENAI_SUITE,
    published_mrcr.GOOGLE_SUITE,
    longbench_v2.SUITE,
    longbench_pro.SUITE,
    helmet.RAG_SUITE,
    helmet.RERANK_SUITE,
    helmet_icl.SUITE,
    infinitebench.SUITE,
    longproc.SUITE,
    repoqa.SUITE,
    aa_lcr.SUITE,
    helmet_narrativeqa.SUITE,
    perplexity.SUITE,
    longppl.SUITE,
    lm_eval.SHORT_SUITE,
    lm_eval.LONGBENCH_SUITE,
    lm_eval.LM_EVAL_SUITE,
)

BY_NAME: Mapping[str, Suite] = {suite.name: suite for suite in SUITES}

METRICS: Mapping[str, Metric] = {
    name: metric
    for suite in SUITES
    if isinstance(suite, GeneratedSuite)
    for name, metric in suite.metrics.items()
}
"""Functions that score an answer, by the name in samples and predictions."""


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise for an unknown name; the message suggests the nearest known one."""
    for name in names:
        if name not in known:
            raise RopewalkError(f"unknown {what} {name!r}; {near_or_all(name, known)}")


def chosen_suites(settings: BenchmarkSettings) -> list[Suite]:
    """Return the requested suites, in order."""
    return [BY_NAME[name] for name in settings.suites]


def reads_text(settings: BenchmarkSettings) -> bool:
    """Whether any requested suite reads the losses of documents."""
    return any(isinstance(suite, LikelihoodSuite) for suite in chosen_suites(settings))


def chosen_tasks(settings: BenchmarkSettings, sharded: bool = False) -> dict[str, list[str]]:
    """Return the names of the tasks to run by suite, in order.

    If ``tasks`` names tasks of a suite, the suite runs only those; other suites run their default tasks.

    Args:
        settings: settings of the evaluation.
        sharded: select the tasks that several processes can measure together, one per suite.

    Raises:
        RopewalkError: for an unknown task, a suite or task that several processes cannot measure, or if no task is
            left to run.
    """
    suites = chosen_suites(settings)
    for suite in suites if sharded else ():
        if suite.sharded is None:
            raise RopewalkError(
                f"the suite {suite.name} cannot be measured by several processes; {_elsewhere(suite, 'the suite')}"
            )
    known = {suite.name: suite.known(settings) for suite in suites}
    if sharded:
        # Passkey's teacher-forced task, for example, exists for several processes only, so `known` lacks it.
        known = {s.name: list(dict.fromkeys([*known[s.name], str(s.sharded)])) for s in suites}
    check_names(
        "task", [*settings.tasks, *settings.exclude], [name for names in known.values() for name in names]
    )
    chosen = {}
    for suite in suites:
        # In the order of the suite, not in that of --tasks.
        named = [name for name in known[suite.name] if name in settings.tasks]
        if sharded:
            _check_sharded(suite, named)
            named = [str(suite.sharded)]
        requested = named or suite.default or known[suite.name]
        chosen[suite.name] = [name for name in requested if name not in settings.exclude]
    if not any(chosen.values()):
        raise RopewalkError(f"--exclude {','.join(settings.exclude)} leaves no task to run")
    return chosen


def _check_sharded(suite: Suite, named: Sequence[str]) -> None:
    for name in named:
        if name != suite.sharded:
            raise RopewalkError(
                f"several processes can measure only the task {suite.sharded} of the suite {suite.name}, not {name}; "
                f"{_elsewhere(suite, name)}"
            )


def _elsewhere(suite: Suite, what: str) -> str:
    """Return advice for a suite that several processes cannot measure."""
    # A server gives only answers, neither losses nor the likelihoods that lm_eval needs.
    server = ", or on a server with --server" if isinstance(suite, GeneratedSuite) else ""
    return f"run {what} in one process{server}"
