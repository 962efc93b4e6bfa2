"""evaluate: every suite through one function, for ``ropewalk extend`` and ``ropewalk eval`` alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import overall_results
from ropewalk.evaluation.finished import FinishedResults
from ropewalk.evaluation.model_under_test import Subject
from ropewalk.evaluation.predictions import PredictionLog
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.running import Progress
from ropewalk.evaluation.sample import Task
from ropewalk.evaluation.sample_store import stored_samples
from ropewalk.evaluation.settings import (
    GENERATED_SUITES,
    LIKELIHOOD_SUITES,
    Settings,
    check_names,
)
from ropewalk.evaluation.tasks.generated import check_lengths, run_task
from ropewalk.evaluation.tasks.likelihood import check_texts, likelihood_result
from ropewalk.evaluation.tasks.lm_eval.retention import RetentionSettings, check_retention, retention
from ropewalk.evaluation.tasks.needle import forced_result
from ropewalk.evaluation.tasks.registry import (
    FORCED,
    chosen_tasks,
    generated_tasks,
    lengths_of,
    needle_grid,
    ruler_left_out,
)

SuiteProgress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Stores:
    """Where a run keeps what it has, so that it can go on; without paths it keeps everything in memory.

    Attributes:
        predictions: answers, one a line.
        finished: results of tasks that have no answers, one a line.
        samples: a folder of samples, shared by all models with the same tokenizer; None makes them anew.
    """

    predictions: PredictionLog
    finished: FinishedResults
    samples: Path | None = None

    @classmethod
    def in_memory(cls) -> Stores:
        """Nothing on disk."""
        return cls(PredictionLog(), FinishedResults())


def evaluate(
    subject: Subject,
    settings: Settings,
    documents: Sequence[Ids] | None = None,
    stores: Stores | None = None,
    progress: SuiteProgress | None = None,
) -> list[TaskResult]:
    """Measure a model. All that can be refused is refused before the first forward pass.

    Args:
        subject: a model in memory or behind a server.
        settings: what to measure.
        documents: int ``[tokens]`` each, without special tokens, for perplexity; None leaves it out, and says
            so in the result.
        stores: what is known already, and where what is found out goes.
        progress: called after each row and each answer.

    Returns:
        For each suite, in order, one result a task and length; RULER's overall scores follow its tasks. A row
        of text begins with BOS; an EOS ends a document only where the tokenizer has no BOS to begin one with.

    Raises:
        RopewalkError: for unknown names, lengths too short for a prompt or beyond the config, or too little
            text.
        EngineError: if the model or its engine cannot take such rows.
        RunFailure: if a server or the memory gives out; ``stores`` holds what was done.
    """
    check(subject, settings, documents)
    return measured(subject, settings, documents, stores, progress)


def measured(
    subject: Subject,
    settings: Settings,
    documents: Sequence[Ids] | None = None,
    stores: Stores | None = None,
    progress: SuiteProgress | None = None,
) -> list[TaskResult]:
    """What :func:`evaluate` does once :func:`check` has let it pass."""
    run = _Run(subject, settings, documents, stores or Stores.in_memory(), progress)
    return [result for suite in settings.suites for result in run.suite(suite)]


def check(subject: Subject, settings: Settings, documents: Sequence[Ids] | None = None) -> None:
    """Raise for all that :func:`evaluate` would refuse.

    Args:
        subject, settings, documents: as there.
    """
    encoder = PromptEncoder(subject.tokenizer, settings.chat)
    if set(GENERATED_SUITES) & set(settings.suites):
        encoder.check_alphabet()
    chosen = chosen_tasks(settings)
    tasks = [
        (task, lengths_of(task, settings, encoder))
        for task in generated_tasks(settings).values()
        if task.unavailable() is None
    ]
    for suite in _with_lengths(settings):
        if not settings.lengths_of(suite):
            raise RopewalkError(f"the suite {suite} needs lengths in tokens; none were given")
    asked = [length for suite in _with_lengths(settings) for length in settings.lengths_of(suite)]
    check_stated(subject, max([*asked, *(n for _, lengths in tasks for n in lengths)], default=0), settings)
    check_lengths(tasks, encoder, settings.samples, settings.seed)
    if subject.model is not None and documents is not None:
        check_texts(subject, settings, chosen, documents)
    harness = [name for suite, names in chosen.items() if suite in HARNESS for name in names]
    for name in settings.materials.harness:
        if not any(_concerns(name, task) for task in harness):
            check_names("task in --lm-eval-data", [name], harness or ["no task of lm_eval"])
    for suite in set(chosen) & HARNESS:
        check_retention(_retention_settings(settings, suite, tuple(chosen[suite]), subject.batch_size))


def check_stated(subject: Subject, longest: int, settings: Settings) -> None:
    """Raise for a length beyond the config, unless that is what was asked for."""
    stated = subject.max_position_embeddings
    if stated is not None and longest > stated and not settings.beyond_config:
        raise RopewalkError(
            f"the model's config states max_position_embeddings {stated}, and the lengths go up to {longest}: extend "
            f"the model first (ropewalk inspect MODEL --target {longest} says how), or measure it as it is with "
            "--beyond-config"
        )


HARNESS = {"short", "longbench", "lm_eval"}


def _concerns(name: str, task: str) -> bool:
    """Whether data under a name are of a task, of its group, or of a part of it."""
    return name.startswith(task) or task.startswith(name)


def _retention_settings(
    settings: Settings, suite: str, tasks: tuple[str, ...], batch_size: int
) -> RetentionSettings:
    # One option names the data of all suites; a suite is told of its own alone.
    own = {
        name: path
        for name, path in settings.materials.harness.items()
        if any(_concerns(name, task) for task in tasks)
    }
    return RetentionSettings(
        suite=suite,
        tasks=tasks,
        data=own,
        include_path=settings.materials.harness_tasks,
        limit=settings.harness_limit,
        chat=settings.chat,
        batch_size=batch_size,
        seed=settings.seed,
    )


def _with_lengths(settings: Settings) -> list[str]:
    """The suites that run at lengths; LongEval has none of its own where records have a number of lines."""
    suites = [suite for suite in settings.suites if suite in (*GENERATED_SUITES, *LIKELIHOOD_SUITES)]
    return [suite for suite in suites if suite != "longeval" or not settings.lines]


@dataclass(frozen=True, eq=False)
class _Run:
    subject: Subject
    settings: Settings
    documents: Sequence[Ids] | None
    stores: Stores
    progress: SuiteProgress | None

    def suite(self, suite: str) -> list[TaskResult]:
        if suite in GENERATED_SUITES:
            return self._generated(suite)
        if suite in LIKELIHOOD_SUITES:
            return [
                self._likelihood(suite, task, length)
                for task in chosen_tasks(self.settings)[suite]
                for length in self.settings.lengths_of(suite)
            ]
        return [
            result for task in chosen_tasks(self.settings)[suite] for result in self._harness(suite, task)
        ]

    def _generated(self, suite: str) -> list[TaskResult]:
        encoder = PromptEncoder(self.subject.tokenizer, self.settings.chat)
        tasks = [task for (of, _), task in generated_tasks(self.settings).items() if of == suite]
        results = [
            self._one(task, length) for task in tasks for length in lengths_of(task, self.settings, encoder)
        ]
        if suite == "needle" and FORCED in chosen_tasks(self.settings)[suite]:
            results += [self._forced(length) for length in self.settings.lengths_of(suite)]
        if suite == "ruler":
            results += overall_results(results, ruler_left_out(self.settings))
        return results

    def _one(self, task: Task, length: int) -> TaskResult:
        reason = task.unavailable()
        if reason is not None:
            return TaskResult.not_run(task.suite, task.name, length, reason)
        encoder = PromptEncoder(self.subject.tokenizer, self.settings.chat)
        return run_task(
            self.subject,
            encoder,
            task,
            length,
            self.settings.samples,
            self.settings.seed,
            self.stores.predictions,
            self.stores.samples,
            self._beyond(length),
            self._named(f"{_words(task.suite, task.name)} at {length:,} tokens"),
        )

    def _likelihood(self, suite: str, task: str, length: int) -> TaskResult:
        if self.subject.model is None:
            reason = "a server gives no losses of a text's tokens; measure the checkpoint itself"
            return TaskResult.not_run(suite, task, length, reason, "perplexity")
        if self.documents is None:
            return TaskResult.not_run(suite, task, length, "no text was given", "perplexity")
        documents = self.documents
        named = self._named(f"{_words(suite, task)} at {length:,} tokens")
        return self._kept(
            (suite, task, length),
            lambda: likelihood_result(self.subject, self.settings, documents, suite, task, length, named),
        )

    def _forced(self, length: int) -> TaskResult:
        task = needle_grid(self.settings)
        reason = task.unavailable()
        if self.subject.model is None:
            reason = "a server gives no likeliest tokens of a given text; measure the checkpoint itself"
        if reason is not None:
            return TaskResult.not_run("needle", FORCED, length, reason)
        encoder = PromptEncoder(self.subject.tokenizer, self.settings.chat)
        samples = stored_samples(
            task, encoder, length, self.settings.samples, self.settings.seed, self.stores.samples
        )
        named = self._named(f"needle forced at {length:,} tokens")
        return self._kept(
            ("needle", FORCED, length),
            lambda: forced_result(self.subject, encoder, samples, named, task.settings()),
        )

    def _harness(self, suite: str, task: str) -> list[TaskResult]:
        if self.subject.model is None:
            reason = "lm_eval's tasks run on a model in memory; measure the checkpoint itself"
            return [TaskResult.not_run(suite, task, None, reason)]
        known = [
            r
            for r in self.stores.finished.known.values()
            if (r.suite, r.details.get("asked")) == (suite, task)
        ]
        if known and len(known) == known[0].details["parts"]:
            return known
        progress = self.progress
        found = retention(
            self.subject.model,
            self.subject.tokenizer,
            _retention_settings(self.settings, suite, (task,), self.subject.batch_size),
            None if progress is None else lambda name, done, total: progress(f"{suite} {name}", done, total),
        )
        told = {"asked": task, "parts": len(found)}
        found = [replace(result, details={**result.details, **told}) for result in found]
        # All or none: a part is not the whole, and what was not run may run the next time.
        if all(result.status == "ok" for result in found):
            for result in found:
                self.stores.finished.add(result)
        return found

    def _kept(self, key: tuple[str, str, int], measure: Callable[[], TaskResult]) -> TaskResult:
        """A result that has no answers: found again, or measured and kept."""
        known = self.stores.finished.get(*key)
        if known is not None:
            return known
        found = measure()
        found = replace(found, details={**found.details, **self._beyond(key[2])})
        if found.status == "ok":
            self.stores.finished.add(found)
        return found

    def _beyond(self, length: int) -> dict[str, Any]:
        """RoPE has no table that ends, so a longer input runs; that it is longer must be said."""
        stated = self.subject.max_position_embeddings
        return {"max_position_embeddings": stated, "beyond_config": stated is not None and length > stated}

    def _named(self, what: str) -> Progress | None:
        progress = self.progress
        if progress is None:
            return None
        return lambda done, total: progress(what, done, total)


def _words(suite: str, task: str) -> str:
    return suite if task == suite else f"{suite} {task}"
