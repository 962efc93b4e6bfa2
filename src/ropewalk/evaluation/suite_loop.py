"""evaluate_model: run every suite in one loop, for a model in memory, behind a server, or over several processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.aggregate import further_results, task_result
from ropewalk.evaluation.backends.protocol import HasContext, Progress, ReportsTokens
from ropewalk.evaluation.backends.text_counters import WordCounter
from ropewalk.evaluation.model_under_test import ModelUnderTest
from ropewalk.evaluation.predictions import PredictionLog
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import ResultKey, TaskResult, result_log
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.sample_cache import cached_samples
from ropewalk.evaluation.samples import LengthTooShort, Sample, Task
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.statistics import NO_INTERVAL
from ropewalk.evaluation.tasks.generation import check_lengths, generated_predictions
from ropewalk.evaluation.tasks.lm_eval.suites import (
    check_retention,
    harness_settings,
    retention,
    unknown_data,
)
from ropewalk.evaluation.tasks.registry import check_names, chosen_suites, chosen_tasks
from ropewalk.evaluation.tasks.suite import (
    TEACHER_FORCED,
    VERDICTS,
    WAITING,
    BenchmarkSettings,
    GeneratedSuite,
    HarnessSuite,
    LikelihoodInput,
    LikelihoodSuite,
    Suite,
)
from ropewalk.evaluation.tasks.teacher_forced import teacher_forced_result
from ropewalk.runs import Log

SuiteProgress = Callable[[str, int, int], None]
"""Called with the name of the current measurement, the number of completed items, and the total."""


@dataclass(frozen=True)
class Stores:
    """Where a run stores its progress so that it can resume; without paths, it keeps everything in memory.

    Attributes:
        predictions: answers of the model, one per line.
        results: results of tasks without generated answers, one per line.
        samples: folder of samples, shared by all models with the same tokenizer; None generates them anew.
    """

    predictions: PredictionLog
    results: Log[ResultKey, TaskResult]
    samples: Path | None = None

    @classmethod
    def in_memory(cls) -> Stores:
        """Return stores that write nothing to disk."""
        return cls(PredictionLog(), result_log())


def evaluate_model(
    under_test: ModelUnderTest,
    settings: Settings,
    documents: Sequence[Ids] | None = None,
    stores: Stores | None = None,
    progress: SuiteProgress | None = None,
) -> list[TaskResult]:
    """Measure a model. All input is validated before the first forward pass.

    Args:
        under_test: a model in memory, behind a server, or over several processes. Every process passes the same
            arguments and gets the same results.
        settings: what to measure.
        documents: int ``[tokens]`` each, without special tokens, for perplexity. If None, perplexity is not run, and
            its result says so.
        stores: earlier predictions and results, equal on every rank; new ones are added.
        progress: called after each row and each answer.

    Returns:
        One result per suite, task and length, in the order of the suites; RULER's overall scores follow its tasks.
        A row of text begins with BOS. EOS ends a document only if the tokenizer has no BOS. Over several processes,
        passkey is measured teacher-forced, as the task ``teacher_forced``.

    Raises:
        RopewalkError: for unknown names, lengths too short for a prompt or beyond the config, too little text, or tasks
            that need generation from a model over several processes.
        EngineError: if the model or its engine does not support such rows.
        RunFailure: if a server fails or rejects every prompt of all tasks, or memory runs out; ``stores`` contains what
            was measured before.
    """
    check_evaluation(under_test, settings, documents)
    return run_suites(under_test, settings, documents, stores, progress)


def run_suites(
    under_test: ModelUnderTest,
    settings: Settings,
    documents: Sequence[Ids] | None = None,
    stores: Stores | None = None,
    progress: SuiteProgress | None = None,
) -> list[TaskResult]:
    """Run :func:`evaluate_model` without its checks; call :func:`check_evaluation` first."""
    run = _SuiteLoop(under_test, settings, documents, stores or Stores.in_memory(), progress)
    results = [result for suite in chosen_suites(settings) for result in run.suite(suite)]
    log = run.stores.predictions
    # A server that takes no prompt at all is not the one that was meant to be measured.
    if log.rejected and not log.known:
        raise RunFailure(_all_rejected(log.rejected))
    return results


def _all_rejected(rejected: Mapping[Any, str]) -> str:
    reason = next(iter(rejected.values()))
    return f"the server rejected all {len(rejected)} prompts; reason for the first: {reason}"


def check_evaluation(
    under_test: ModelUnderTest, settings: Settings, documents: Sequence[Ids] | None = None
) -> None:
    """Raise for any input that :func:`evaluate_model` rejects; the model need not be loaded.

    Args:
        under_test, settings, documents: as passed to :func:`evaluate_model`.
    """
    chosen = chosen_tasks(settings, under_test.sharded)
    suites = chosen_suites(settings)
    _check_chat(settings, suites, chosen)
    # Raises for --chat without a chat template, before anything is generated.
    encoder = encoder_of(under_test, settings)
    if any(isinstance(suite, GeneratedSuite) for suite in suites):
        encoder.check_alphabet()
    if generates(suites, chosen):
        encoder.check_thoughts("add --thinking-tokens 4096")
    for suite in suites:
        if suite.needs_lengths(settings) and not suite.lengths_of(settings):
            raise RopewalkError(
                f"the suite {suite.name} needs lengths in tokens, but none were given; add --lengths"
            )
    tasks = [
        (name, task, suite.lengths_at(task, settings, its), suite.samples_of(settings), its)
        for suite in suites
        if isinstance(suite, GeneratedSuite)
        for name, task in generated_tasks(suite, chosen[suite.name], settings).items()
        if task.unavailable() is None and (name != TEACHER_FORCED or _gives_likelihoods(under_test))
        for its in [encoder_for(under_test, settings, task)]
    ]
    requested = [
        length for suite in suites if suite.needs_lengths(settings) for length in suite.lengths_of(settings)
    ]
    longest = max([*requested, *(n for _, _, lengths, _, _ in tasks for n in lengths)], default=0)
    _check_stated(under_test, longest, settings)
    if isinstance(under_test.backend, HasContext):
        under_test.backend.require_length(longest)
    check_lengths(tasks, settings.seed)
    # Everything is checked before the first measurement: a task that fails after hours would lose them.
    if documents is not None and _gives_likelihoods(under_test):
        given = LikelihoodInput(under_test, settings, documents)
        for suite in suites:
            if isinstance(suite, LikelihoodSuite):
                for name in chosen[suite.name]:
                    for length in suite.lengths_of(settings):
                        suite.check(name, length, given)
    _check_harness(
        under_test, settings, {s.name: chosen[s.name] for s in suites if isinstance(s, HarnessSuite)}
    )


def not_running(settings: Settings, served: bool) -> Iterator[str]:
    """One sentence on tasks that will not run, for each reason, before anything is loaded.

    Args:
        settings: settings of the evaluation.
        served: whether the model is behind a server.
    """
    chosen = chosen_tasks(settings)
    for suite in chosen_suites(settings):
        reasons: dict[str, list[str]] = {}
        for name in chosen[suite.name]:
            if served and (not isinstance(suite, GeneratedSuite) or name == TEACHER_FORCED):
                reasons.setdefault("a server gives answers, and no losses", []).append(name)
            elif isinstance(suite, GeneratedSuite):
                reason = next(iter(generated_tasks(suite, [name], settings).values())).unavailable()
                if reason is not None:
                    reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            what = suite.name if names == [suite.name] else f"{suite.name}: {', '.join(names)}"
            yield f"{what} will not run: {reason}"


def generates(suites: Sequence[Suite], chosen: Mapping[str, Sequence[str]]) -> bool:
    """Whether the model generates answers in one of the chosen tasks, which are given by suite."""
    return any(
        isinstance(suite, GeneratedSuite) and set(chosen[suite.name]) - {TEACHER_FORCED} for suite in suites
    )


def check_served(settings: Settings) -> None:
    """Raise if a server can run none of the tasks."""
    if not generates(chosen_suites(settings), chosen_tasks(settings)):
        raise RopewalkError(
            f"a server gives answers and no losses, so {' and '.join(settings.suites)} cannot be measured on it; add "
            "--suite ruler or passkey, or measure the checkpoint itself, without --server"
        )


def _check_chat(settings: Settings, suites: Sequence[Suite], chosen: Mapping[str, Sequence[str]]) -> None:
    """Raise for a system prompt or tokens to think that a chosen suite has no use for."""
    for option, value in (
        ("--system-prompt", settings.system_prompt),
        ("--thinking-tokens", settings.thinking_tokens),
    ):
        if not value:
            continue
        for suite in suites:
            if not isinstance(suite, GeneratedSuite) or TEACHER_FORCED in chosen[suite.name]:
                what = TEACHER_FORCED if isinstance(suite, GeneratedSuite) else suite.name
                raise RopewalkError(
                    f"{option} has no effect on {what}, because the option applies only to tasks in which ropewalk "
                    f"prompts the model and the model generates an answer; omit {option}, or evaluate without {what}"
                )


def encoder_of(under_test: ModelUnderTest, settings: BenchmarkSettings) -> PromptEncoder:
    """The encoder of an evaluation's prompts."""
    # Only servers can want turns.
    as_turns = getattr(under_test.backend, "as_turns", False)
    own_variables = as_turns and "chat_template_kwargs" in under_test.backend.description.get("extra", {})
    return PromptEncoder(
        under_test.tokenizer,
        settings.chat,
        settings.system_prompt,
        settings.thinking_tokens,
        as_turns,
        own_variables,
    )


MEASURED = 2048
"""Maximum length in tokens of the prompt that an estimate of a task's tokens is scaled by."""


def encoder_for(under_test: ModelUnderTest, settings: BenchmarkSettings, task: Task) -> PromptEncoder:
    """The encoder of a task's prompts: if tokens are estimated, scaled by the server's count of one of its prompts."""
    encoder = encoder_of(under_test, settings)
    counter = encoder.tokenizer
    if not isinstance(counter, WordCounter) or task.unavailable() is not None:
        return encoder
    key = (task.suite, task.name)
    if key not in counter.by_task:
        lengths = settings.lengths_of(task.suite)
        # A file of questions may have none as short as that; then a longer one is measured.
        tried = (
            _first_sample(task, encoder, each, settings.seed)
            for each in sorted({min([MEASURED, *lengths]), *lengths})
        )
        sample = next((each for each in tried if each is not None), None)
        if sample is None:
            return encoder
        assert isinstance(under_test.backend, ReportsTokens)
        read = under_test.backend.tokens_read(
            encoder.encode(sample.text, sample.answer_prefix, sample.earlier).text,
            encoder.turns(sample.text, sample.answer_prefix, sample.earlier),
        )
        counter.by_task[key] = counter.scaled(sample.prompt_tokens, read)
    return encoder_of(replace(under_test, tokenizer=counter.by_task[key]), settings)


def _first_sample(task: Task, encoder: PromptEncoder, length: int, seed: int) -> Sample | None:
    try:
        samples = task.samples(encoder, length, 1, seed)
    except LengthTooShort as error:
        samples = task.samples(encoder, error.shortest, 1, seed)
    return next(iter(samples), None)


def _check_harness(under_test: ModelUnderTest, settings: Settings, chosen: dict[str, list[str]]) -> None:
    tasks = [name for names in chosen.values() for name in names]
    for name in unknown_data(settings, tasks):
        # check_names writes the error, with the nearest known name.
        check_names("--lm-eval-data task", [name], tasks or ["no task of lm_eval"])
    for suite, names in chosen.items():
        if names:
            check_retention(harness_settings(settings, suite, names, under_test.batch_size))


def _gives_likelihoods(under_test: ModelUnderTest) -> bool:
    """Whether the model gives likelihoods once it is loaded; a server does not."""
    return under_test.sharded or under_test.model is not None


def _check_stated(under_test: ModelUnderTest, longest: int, settings: Settings) -> None:
    """Raise if a length exceeds the config's context, unless ``beyond_config`` is set."""
    stated = under_test.max_position_embeddings
    if stated is not None and longest > stated and not settings.beyond_config:
        raise RopewalkError(
            f"the longest length is {longest} tokens, but the model's config states max_position_embeddings "
            f"{stated}; extend the model first (ropewalk inspect MODEL --target {longest} shows how), or add "
            "--beyond-config to measure the model unchanged"
        )


def generated_tasks(suite: GeneratedSuite, names: Sequence[str], settings: Settings) -> dict[str, Task]:
    """Return the task that generates samples for each name; the teacher-forced task uses those of the first task."""
    tasks = suite.tasks(settings)
    return {name: next(iter(tasks.values())) if name == TEACHER_FORCED else tasks[name] for name in names}


@dataclass(frozen=True, eq=False)
class _SuiteLoop:
    under_test: ModelUnderTest
    settings: Settings
    documents: Sequence[Ids] | None
    stores: Stores
    progress: SuiteProgress | None

    def suite(self, suite: Suite) -> list[TaskResult]:
        names = chosen_tasks(self.settings, self.under_test.sharded)[suite.name]
        if isinstance(suite, GeneratedSuite):
            return self._prompts(suite, names)
        if isinstance(suite, LikelihoodSuite):
            lengths = suite.lengths_of(self.settings)
            return [self._likelihood(suite, name, length) for name in names for length in lengths]
        return [result for name in names for result in self._harness(suite.name, name)]

    def _prompts(self, suite: GeneratedSuite, names: Sequence[str]) -> list[TaskResult]:
        results = []
        for name, task in generated_tasks(suite, names, self.settings).items():
            measure = self._forced if name == TEACHER_FORCED else self._generation
            encoder = encoder_for(self.under_test, self.settings, task)
            lengths = suite.lengths_at(task, self.settings, encoder)
            for length in lengths:
                results += measure(suite, task, length, encoder)
        return results if suite.mean is None else [*results, *suite.mean(results, names)]

    def _generation(
        self, suite: GeneratedSuite, task: Task, length: int, encoder: PromptEncoder
    ) -> list[TaskResult]:
        reason = task.unavailable()
        if reason is not None:
            return [TaskResult.not_run(suite.name, task.name, length, reason)]
        count, seed, thinking = suite.samples_of(self.settings), self.settings.seed, encoder.thinking
        if self.progress is not None:
            self.progress(f"preparing prompts: {_titled(suite.name, task.name, length)}", 0, count)
        # The thoughts take their tokens from the prompt, so that everything fits in the length.
        fitted = cached_samples(task, encoder, length - thinking, count, seed, self.stores.samples)
        samples = (
            replace(each, length=length, max_new_tokens=each.max_new_tokens + thinking) for each in fitted
        )
        predictions = generated_predictions(
            self.under_test.backend,
            encoder,
            samples,
            self.stores.predictions,
            self._named(suite.name, task.name, length),
        )
        rejected = self.stores.predictions.rejected_of(suite.name, task.name, length)
        if not predictions and not rejected:
            reason = (
                "the file has no prompt of this length, counted with the model's tokenizer and its answer"
            )
            return [TaskResult.not_run(suite.name, task.name, length, reason)]
        if not predictions:
            # The other tasks and lengths are measured: their prompts may be accepted.
            return [TaskResult.not_run(suite.name, task.name, length, _all_rejected(rejected))]
        counter = encoder.tokenizer
        estimate = {"tokens_per_piece": counter.tokens_per_piece} if isinstance(counter, WordCounter) else {}
        details = {**task.settings(), **self._beyond(length), **estimate}
        found = task_result(predictions, details, rejected)
        if suite.judge is not None and not all(VERDICTS in each.details for each in predictions):
            return [_waiting_for_judge(found)]
        return [found, *further_results(predictions, details)]

    def _forced(
        self, suite: GeneratedSuite, task: Task, length: int, encoder: PromptEncoder
    ) -> list[TaskResult]:
        reason = task.unavailable()
        if self.under_test.likelihoods is None:
            reason = "a server does not return the most likely tokens of a given text; measure the checkpoint itself"
        if reason is not None:
            return [TaskResult.not_run(suite.name, TEACHER_FORCED, length, reason)]
        count, seed = suite.samples_of(self.settings), self.settings.seed
        samples = cached_samples(task, encoder, length, count, seed, self.stores.samples)
        # If the suite's own tasks generate answers, the results must say that this one did not.
        scoring = {} if suite.teacher_forced else {"scored": "teacher-forced"}
        forced = self._kept(
            (suite.name, TEACHER_FORCED, length),
            lambda: teacher_forced_result(
                self.under_test,
                encoder,
                samples,
                self._named(suite.name, TEACHER_FORCED, length),
                {**task.settings(), **scoring},
                suite.figure == "by depth",
            ),
        )
        return [forced]

    def _likelihood(self, suite: LikelihoodSuite, task: str, length: int) -> TaskResult:
        if self.under_test.likelihoods is None:
            reason = "a server does not return the losses of a text's tokens; measure the checkpoint itself"
            return TaskResult.not_run(suite.name, task, length, reason, "perplexity")
        if self.documents is None:
            return TaskResult.not_run(suite.name, task, length, "no text was given", "perplexity")
        given = LikelihoodInput(self.under_test, self.settings, self.documents)
        named = self._named(suite.name, task, length)
        return self._kept((suite.name, task, length), lambda: suite.measure(task, length, given, named))

    def _harness(self, suite: str, task: str) -> list[TaskResult]:
        if self.under_test.model is None:
            reason = "lm_eval's tasks need a model in memory; measure the checkpoint itself, without --server"
            return [TaskResult.not_run(suite, task, None, reason)]
        cache = self.stores.results
        known = [r for r in cache.known.values() if (r.suite, r.details.get("asked")) == (suite, task)]
        # A run that was interrupted between two parts has only some of them, so all are measured again.
        if known and len(known) == known[0].details["parts"]:
            return known
        progress = self.progress
        found = retention(
            self.under_test.model,
            self.under_test.tokenizer,
            harness_settings(self.settings, suite, (task,), self.under_test.batch_size),
            None if progress is None else lambda name, done, total: progress(f"{suite} {name}", done, total),
        )
        group = {"asked": task, "parts": len(found)}
        found = [replace(result, details={**result.details, **group}) for result in found]
        # Cache all parts or none: a partial group is not the whole task, and a part that did not run may run next time.
        if all(result.status == "ok" for result in found):
            for result in found:
                cache.add(result)
        return found

    def _kept(self, key: tuple[str, str, int], measure: Callable[[], TaskResult]) -> TaskResult:
        """Return a result without generated answers from the cache, or measure and cache it."""
        known = self.stores.results.known.get(key)
        if known is not None:
            return known
        found = measure()
        found = replace(found, details={**found.details, **self._beyond(key[2])})
        # A task that could not run, because of missing data for example, may run next time.
        if found.status == "ok":
            self.stores.results.add(found)
        return found

    def _beyond(self, length: int) -> dict[str, Any]:
        """Return details that say whether the length exceeds the config; RoPE itself runs at any length."""
        stated = self.under_test.max_position_embeddings
        return {"max_position_embeddings": stated, "beyond_config": stated is not None and length > stated}

    def _named(self, suite: str, task: str, length: int) -> Progress | None:
        progress = self.progress
        if progress is None:
            return None
        what = _titled(suite, task, length)
        return lambda done, total: progress(what, done, total)


def _waiting_for_judge(found: TaskResult) -> TaskResult:
    reason = f"its {found.n} answers wait for a judge: ropewalk eval judge"
    details = {**found.details, WAITING: found.n}
    return replace(
        found, score=math.nan, ci95=NO_INTERVAL, status="not run", reason=reason, details=details, samples=()
    )


def _titled(suite: str, task: str, length: int) -> str:
    return f"{suite if task == suite else f'{suite} {task}'} at {length:,} tokens"
