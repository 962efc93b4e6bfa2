"""Evaluation before, during and after training."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import ModelUnderTest, TaskResult, evaluate_model
from ropewalk.evaluation.predictions import write_predictions
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.record import answers_file
from ropewalk.evaluation.rows import DrawnDocuments
from ropewalk.evaluation.samples import Task
from ropewalk.evaluation.suite_loop import Stores, generated_tasks, generates
from ropewalk.evaluation.tasks.registry import BY_NAME, chosen_suites, chosen_tasks
from ropewalk.evaluation.tasks.suite import GeneratedSuite, LikelihoodSuite
from ropewalk.io.digests import FileDigest, damage, read_sealed, write_sealed
from ropewalk.io.files import parse_json, write_text
from ropewalk.io.progress import Reporter
from ropewalk.models.compute.losses import LossModel
from ropewalk.parallel.context import RunContext
from ropewalk.runs import Work
from ropewalk.training.checkpoint.files import Position, checkpoint_name, is_place, place_of
from ropewalk.training.checkpoint.single import random_states, set_random_states
from ropewalk.training.recipe.evaluation import Evaluation
from ropewalk.training.resolved import ResolvedRecipe, folder_of
from ropewalk.training.update.step import autocast

DURING = "evaluation-during"
"""Folder with the results of evaluations during training."""
_DURING = "during/"


def during(position: Position) -> str:
    """Name of an evaluation during training, for the functions below."""
    return f"{_DURING}{checkpoint_name(position)}"


def evaluation_file(when: str) -> str:
    """Name of the file with the evaluation results of ``before``, ``after`` or :func:`during` training."""
    return f"evaluation-{when}.json"


def evaluation_record(when: str) -> str:
    """Name of the file with the digest of an evaluation during training."""
    return f"evaluation-{when}.digest.json"


def evaluation_at(resolved: ResolvedRecipe, stage: int | None) -> Evaluation:
    """Evaluation settings of a stage, counted from 0; None for the evaluations before and after training."""
    evaluation = resolved.recipe.evaluation
    return evaluation if stage is None else evaluation.in_training()


def requested_lengths(
    resolved: ResolvedRecipe, lengths: Mapping[str, Sequence[int]], stage: int | None = None
) -> dict[str, list[int]]:
    """Lengths in tokens at which each suite of a recipe is run; empty for a suite that defines its own lengths.

    Args:
        resolved: the recipe.
        lengths: result of :func:`prompt_lengths`; suites without a length are left out, and a note has said so.
        stage: as for :func:`evaluation_at`.
    """
    evaluation = evaluation_at(resolved, stage)
    requested: dict[str, list[int]] = {}
    for suite in evaluation.chosen:
        if not suite.needs_lengths(evaluation.settings()):
            requested[suite.name] = []
        elif isinstance(suite, LikelihoodSuite):
            requested[suite.name] = perplexity_lengths(resolved, stage)
        elif lengths[suite.name]:
            requested[suite.name] = list(lengths[suite.name])
    return requested


def results_in(output: Path, when: str) -> list[TaskResult] | None:
    """Read evaluation results that a run has written; None if there are none.

    Args:
        output: folder of the run.
        when: ``before``, ``after`` or :func:`during`.

    Raises:
        RopewalkError: if the file is damaged.
    """
    path = output / evaluation_file(when)
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        # Results before and after training are files of a step, whose record has their digests.
        wrong = _altered(path, output / evaluation_record(when)) if when.startswith(_DURING) else None
        if wrong is None:
            values = parse_json(text, strict=True)
            if not isinstance(values, list):
                raise ValueError("it is not a list of results")
            return [TaskResult.from_json(entry) for entry in values]
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        wrong = f"a result lacks {error}"
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        wrong = str(error)
    raise RopewalkError(f"{path} is damaged ({wrong}); delete it, and --resume will go on without it")


@dataclass(frozen=True)
class DuringTraining:
    """One evaluation during training.

    Attributes:
        stage, step: completed steps of a stage, whose index is counted from 0.
        results: what was measured.
    """

    stage: int
    step: int
    results: tuple[TaskResult, ...]

    def summary(self) -> dict[str, Any]:
        """Scores as JSON values, without samples and details, which are in the file of the evaluation."""
        kept = ("suite", "task", "length", "n", "score", "unit", "ci95", "status")
        scores = [
            {key: value for key, value in each.to_json().items() if key in kept} for each in self.results
        ]
        return {"stage": self.stage, "step": self.step, "scores": scores}


def evaluated_during(output: Path, until: Position | None = None) -> list[DuringTraining]:
    """Read the evaluations during training that a run has written, earliest first.

    Args:
        output: folder of the run.
        until: later evaluations are left out; None for all.

    Raises:
        RopewalkError: if a file is damaged.
    """
    found = []
    for path in during_files(output):
        stage, step = place_of(path.with_suffix(""))
        if until is not None and (stage, step) > (until.stage, until.step):
            # Files come in the order of training, so all that follow are later as well.
            break
        results = results_in(output, during(Position(stage, step, 0)))
        found.append(DuringTraining(stage, step, tuple(results or ())))
    return found


def during_files(output: Path, after: Position | None = None) -> list[Path]:
    """Files with results of evaluations during training, earliest first; only those later than ``after`` if given."""
    paths = [path for path in (output / DURING).glob("stage*.json") if is_place(path.stem)]
    places = {path: place_of(path.with_suffix("")) for path in paths}
    later = (path for path in paths if after is None or places[path] > (after.stage, after.step))
    return sorted(later, key=places.__getitem__)


def name_of(result: TaskResult) -> str:
    """Name of a measurement in trackers and in ``export.by``: ``passkey/1024``, ``ruler/vt/4096``."""
    task = [] if result.task == result.suite else [result.task]
    length = [] if result.length is None else [str(result.length)]
    return "/".join([result.suite, *task, *length])


def tracked(results: Sequence[TaskResult]) -> dict[str, float]:
    """Scores of an evaluation during training by their names in trackers."""
    return {
        f"evaluation/{name_of(result)}": result.score for result in results if math.isfinite(result.score)
    }


def _altered(path: Path, record: Path) -> str | None:
    """Describe how a file differs from what was written; None if it does not."""
    if not record.is_file():
        return f"its record {record.name} is missing"
    try:
        files = read_sealed(parse_json(record.read_text(encoding="utf-8"), strict=True), record)
        return damage(path, files[path.name])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        # All that JSON of another shape can raise: whatever it was, this is not the record that was written.
        return f"its record {record.name} was altered"


def _write_results(output: Path, when: str, results: Sequence[TaskResult]) -> None:
    path = output / evaluation_file(when)
    text = json.dumps([result.to_json() for result in results], indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(exist_ok=True)
    if when.startswith(_DURING):
        # The record first: a process that is killed in between leaves no results, and they are measured again.
        content = text.encode()
        digest = FileDigest(len(content), hashlib.sha256(content).hexdigest())
        write_sealed(output / evaluation_record(when), {}, {path.name: digest})
    write_text(path, text)


@dataclass(frozen=True, eq=False)
class Measurement:
    """Evaluation that a run makes before and after training, or during a stage.

    Attributes:
        resolved: the recipe.
        asked: requested suites and lengths, from :func:`requested_lengths`.
        documents: documents for perplexity.
        stage: as for :func:`evaluation_at`.
    """

    resolved: ResolvedRecipe
    asked: Mapping[str, Sequence[int]]
    documents: DrawnDocuments
    stage: int | None = None


def measure(when: str, model: LossModel, measurement: Measurement, context: RunContext, work: Work) -> None:
    """Evaluate a model before or after training, and write the results and the answers.

    Args:
        when: ``before`` or ``after``.
        model: model to evaluate.
        measurement: suites, lengths and documents.
        context: processes, each of which must call this function; output folder and reporter.
        work: the step of the run, whose files they are.
    """
    if not measurement.asked:
        return
    with context.rank_0_reporter.bar(f"evaluation {when}", None) as advance:

        def progress(what: str, done: int, total: int) -> None:
            advance(done, f"{what} {done}/{total}")

        stores = Stores.in_memory()
        results = _measured(model, measurement, context, progress, stores)
    work.file(evaluation_file(when))
    work.file(answers_file(when))
    if context.is_rank_0:
        output = folder_of(context)
        write_predictions(output / answers_file(when), stores.predictions.known.values())
        _write_results(output, when, results)


def measure_during(
    position: Position,
    model: LossModel,
    measurement: Measurement,
    context: RunContext,
    progress: Callable[[str, int, int], None],
) -> list[TaskResult]:
    """Evaluate a model that is being trained, and write the results, without any effect on the training.

    Args:
        position: progress of the training.
        model: model in training.
        measurement: suites, lengths and documents.
        context: processes, each of which must call this function; output folder.
        progress: called with what is being measured, and how much of it is done.
    """
    with _undisturbed(model):
        results = _measured(model, measurement, context, progress)
    if context.is_rank_0:
        _write_results(folder_of(context), during(position), results)
    return results


@contextmanager
def _undisturbed(model: LossModel) -> Iterator[None]:
    """Put a model into evaluation mode, and restore its modes and all random number generators afterwards."""
    # Module by module, because model.train() would also switch what was in evaluation mode before.
    modes = {module: module.training for module in model.modules()}
    states, python, numpy = random_states(), random.getstate(), np.random.get_state()
    model.eval()
    try:
        yield
    finally:
        # One by one, because train() would also change modules that were in evaluation mode.
        for module, training in modes.items():
            module.training = training
        set_random_states(states)
        random.setstate(python)
        np.random.set_state(numpy)


def _measured(
    model: LossModel,
    measurement: Measurement,
    context: RunContext,
    progress: Callable[[str, int, int], None],
    stores: Stores | None = None,
) -> list[TaskResult]:
    resolved, requested = measurement.resolved, measurement.asked
    settings = evaluation_at(resolved, measurement.stage).settings(
        tuple(requested), requested, resolved.recipe.seed, resolved.trained_length
    )
    precision = resolved.precision_at(measurement.stage)
    # In the precision of the training, so that the scores are those of the model as it is trained.
    with autocast(resolved.device, precision, context.mesh is not None):
        if context.mesh is None:
            under_test = ModelUnderTest.in_memory(model.model, resolved.tokenizer)
        else:
            under_test = ModelUnderTest.over_mesh(model, resolved.tokenizer, context.mesh, context.world)
        return evaluate_model(under_test, settings, measurement.documents, stores, progress)


def perplexity_lengths(resolved: ResolvedRecipe, stage: int | None = None) -> list[int]:
    """Lengths for perplexity: the context, and for longrope also the original length, at which short factors apply.

    For a result without RoPE also the lengths of the recipe, none of which is trained.
    """
    context, last = context_at(resolved, stage), resolved.methods[-1]
    if last is not None and not last.rotates:
        return sorted({context, *(evaluation_at(resolved, stage).lengths or ())})
    original = resolved.original_length
    return [context] if original is None or original >= context else [context, original]


def describe_during(resolved: ResolvedRecipe, asked: Sequence[Mapping[str, Sequence[int]] | None]) -> str:
    """One sentence on how many evaluations a run makes during training, and how much they read.

    Args:
        resolved: the recipe.
        asked: for each stage, suites and lengths from :func:`requested_lengths`; None for a stage without evaluations.
    """
    every = resolved.recipe.evaluation.every
    assert every is not None
    number = read = trained = 0
    for index, (stage, found) in enumerate(zip(resolved.recipe.stages, asked, strict=True)):
        trained += stage.steps * stage.rows_per_step * stage.context
        if found is not None:
            # Rounded up, because the end of a stage is evaluated whatever its number of steps.
            times = -(-stage.steps // every)
            number += times
            read += times * _tokens_read(resolved, index, found)
    suites = dict.fromkeys(suite for found in asked if found is not None for suite in found)
    often = "once" if number == 1 else f"{number} times"
    steps = "step" if every == 1 else f"{every} steps"
    # Two digits, but no exponent above 100 %.
    share = f"{100 * read / trained:,.0f}" if read >= trained else f"{100 * read / trained:.2g}"
    return (
        f"evaluation during training: {often}, every {steps} and at the end of a stage, of {', '.join(suites)}; it "
        f"reads at least {read:,} tokens, {share} % of those trained on"
    )


def _tokens_read(resolved: ResolvedRecipe, stage: int, asked: Mapping[str, Sequence[int]]) -> int:
    """Tokens of all prompts and rows of one evaluation; suites that define their own lengths are not counted."""
    evaluation = evaluation_at(resolved, stage)
    chosen = chosen_tasks(evaluation.settings(tuple(asked)), resolved.mesh.world_size > 1)
    return sum(
        sum(lengths)
        * len(chosen[suite])
        * (evaluation.rows if isinstance(BY_NAME[suite], LikelihoodSuite) else evaluation.samples)
        for suite, lengths in asked.items()
    )


def context_at(resolved: ResolvedRecipe, stage: int | None) -> int:
    """Context of a stage in tokens; that of the last stage if None."""
    return resolved.target if stage is None else resolved.recipe.stages[stage].context


def short_context(
    original_length: int | None, before: Sequence[TaskResult], after: Sequence[TaskResult]
) -> dict[str, Any] | None:
    """Perplexity at the original length before and after training, and their ratio; None if it was not measured."""
    found = [
        next((r.score for r in results if (r.suite, r.length) == ("perplexity", original_length)), None)
        for results in (before, after)
    ]
    before_, after_ = found
    if original_length is None or before_ is None or after_ is None:
        return None
    return {"length": original_length, "before": before_, "after": after_, "ratio": after_ / before_}


def describe_short_context(found: Mapping[str, Any]) -> str:
    """One sentence that describes the result of :func:`short_context`."""
    return (
        f"perplexity at {found['length']:,} tokens {found['before']:.3f} before and {found['after']:.3f} after, "
        f"{100 * (found['ratio'] - 1):+.1f} %"
    )


@dataclass(frozen=True, eq=False)
class PromptSuite:
    """A suite that generates prompts of given lengths.

    Attributes:
        suite: name of the suite.
        tasks: requested tasks that can run here.
        encoder: prompt encoder of the model's tokenizer.
        samples: number of samples per task and length.
        seed: random seed of the samples.
    """

    suite: str
    tasks: Sequence[Task]
    encoder: PromptEncoder
    samples: int
    seed: int

    def check(self, length: int) -> None:
        """Raise a RopewalkError if a task's prompts do not fit into ``length`` tokens."""
        for task in self.tasks:
            # For its error alone, which comes before the run instead of at the end of the training.
            task.samples(self.encoder, length, self.samples, self.seed)


def prompt_suites(evaluation: Evaluation, seed: int, tokenizer: Any, sharded: bool) -> list[PromptSuite]:
    """Suites that need prompt lengths.

    Args:
        evaluation: what is measured.
        seed: random seed of the run.
        tokenizer: tokenizer of the model.
        sharded: whether several processes evaluate one sharded model.

    Raises:
        RopewalkError: for a suite or task that does not support sharded models, or a model that always thinks.
    """
    if not evaluation.suites:
        return []
    settings = evaluation.settings(seed=seed)
    chosen = chosen_tasks(settings, sharded)
    encoder = PromptEncoder(tokenizer, settings.chat)
    if generates(chosen_suites(settings), chosen):
        encoder.check_thoughts(
            "set evaluation.chat to false, and measure the model's answers with ropewalk eval --chat "
            "--thinking-tokens 4096"
        )
    found = []
    for suite in chosen_suites(settings):
        if isinstance(suite, GeneratedSuite) and suite.needs_lengths(settings):
            tasks = generated_tasks(suite, chosen[suite.name], settings).values()
            there = [task for task in tasks if task.unavailable() is None]
            found.append(PromptSuite(suite.name, there, encoder, suite.samples_of(settings), settings.seed))
    return found


def prompt_lengths(
    resolved: ResolvedRecipe, reporter: Reporter, stage: int | None = None
) -> dict[str, list[int]]:
    """Prompt lengths by suite: those requested, or else the trained length and the context if the prompts fit.

    Args:
        resolved: the recipe.
        reporter: is told which lengths are skipped, and why.
        stage: as for :func:`evaluation_at`.
    """
    evaluation, seed = evaluation_at(resolved, stage), resolved.recipe.seed
    lengths: dict[str, list[int]] = {}
    for prompts in prompt_suites(evaluation, seed, resolved.tokenizer, resolved.mesh.world_size > 1):
        if evaluation.lengths is not None:
            lengths[prompts.suite] = evaluation.lengths
            continue
        fitting = lengths[prompts.suite] = []
        for length in (resolved.trained_length, context_at(resolved, stage)):
            try:
                prompts.check(length)
            except RopewalkError as error:
                # Nobody asked for this length, so it is skipped; a requested length would be refused.
                reporter.note(f"{prompts.suite} is skipped at {length} tokens: {error}")
            else:
                fitting.append(length)
    return lengths
