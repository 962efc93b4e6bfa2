"""Evaluation before and after training, and reuse of results that a resumed run finds on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import ModelUnderTest, TaskResult, evaluate_model
from ropewalk.evaluation.measure import generated_tasks
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.samples import Task
from ropewalk.evaluation.tasks.registry import chosen_suites, chosen_tasks
from ropewalk.evaluation.tasks.suite import GeneratedSuite, LikelihoodSuite
from ropewalk.io.digests import FileDigest, damage, read_sealed, write_sealed
from ropewalk.io.files import parse_json, write_text
from ropewalk.io.progress import Reporter
from ropewalk.models.losses import LossModel
from ropewalk.parallel.context import RunContext
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe, folder_of
from ropewalk.training.step import autocast


def evaluation_file(when: str) -> str:
    """Name of the file with the evaluation results of ``before`` or ``after`` training."""
    return f"evaluation-{when}.json"


def evaluation_record(when: str) -> str:
    """Name of the file with the digest of :func:`evaluation_file`."""
    return f"evaluation-{when}.digest.json"


def asked_for(resolved: ResolvedRecipe, lengths: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Lengths in tokens at which each suite of a recipe is run; empty for a suite that defines its own lengths.

    Args:
        resolved: the recipe.
        lengths: result of :func:`prompt_lengths`; suites without a length are left out, and a note has said so.
    """
    evaluation = resolved.recipe.evaluation
    asked: dict[str, list[int]] = {}
    for suite in evaluation.chosen:
        if not suite.needs_lengths(evaluation.settings()):
            asked[suite.name] = []
        elif isinstance(suite, LikelihoodSuite):
            asked[suite.name] = perplexity_lengths(resolved)
        elif lengths[suite.name]:
            asked[suite.name] = list(lengths[suite.name])
    return asked


def results_in(output: Path, when: str, asked: Mapping[str, Sequence[int]]) -> list[TaskResult] | None:
    """Read evaluation results that a run has already written; None if there are none.

    Args:
        output: folder of the run.
        when: ``before`` or ``after``.
        asked: requested suites and lengths, from :func:`asked_for`.

    Raises:
        RopewalkError: if the file is damaged, or contains other results than the recipe requests.
    """
    path = output / evaluation_file(when)
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        wrong = _altered(path, output / evaluation_record(when))
        if wrong is None:
            values = parse_json(text, strict=True)
            if not isinstance(values, list):
                raise ValueError("it is not a list of results")
            results = [TaskResult.from_json(entry) for entry in values]
            wrong = _not_as_asked(results, asked)
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        wrong = f"a result lacks {error}"
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        wrong = str(error)
    if wrong is not None:
        raise RopewalkError(
            f"{path} is damaged ({wrong}); delete it, and --resume will repeat the evaluation"
        )
    return results


def _altered(path: Path, record: Path) -> str | None:
    """Describe how a file differs from what was written; None if it does not, or if an earlier version wrote it."""
    if not record.is_file():
        return None
    try:
        files = read_sealed(parse_json(record.read_text(encoding="utf-8"), strict=True), record)
        return damage(path, files[path.name])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return f"its record {record.name} was altered"


def _not_as_asked(results: Sequence[TaskResult], asked: Mapping[str, Sequence[int]]) -> str | None:
    # Any length is accepted for a suite that defines its own lengths.
    there = {(result.suite, result.length if asked.get(result.suite, True) else None) for result in results}
    wanted = {(suite, length) for suite, lengths in asked.items() for length in lengths or (None,)}
    for places, verb in ((wanted - there, "lacks"), (there - wanted, "holds")):
        if places:
            suite, length = min(places, key=str)
            where = "" if length is None else f" at {length} tokens"
            return f"it {verb} a result of {suite}{where}" + (
                "" if verb == "lacks" else ", which the recipe does not ask for"
            )
    return None


def _write_results(output: Path, when: str, results: Sequence[TaskResult]) -> None:
    path = output / evaluation_file(when)
    text = json.dumps([result.to_json() for result in results], indent=2, allow_nan=False) + "\n"
    # Write the record first: if the process is killed in between, there are no results, and they are measured again.
    content = text.encode()
    digest = FileDigest(len(content), hashlib.sha256(content).hexdigest())
    write_sealed(output / evaluation_record(when), {}, {path.name: digest})
    write_text(path, text)


@dataclass(frozen=True, eq=False)
class Measurement:
    """Evaluation that a run makes before and after training.

    Attributes:
        resolved: the recipe.
        asked: requested suites and lengths, from :func:`asked_for`.
        documents: token ids of the documents for perplexity.
    """

    resolved: ResolvedRecipe
    asked: Mapping[str, Sequence[int]]
    documents: list[Ids]


def measure(
    when: str, model: LossModel | None, measurement: Measurement, context: RunContext
) -> list[TaskResult]:
    """Evaluate the model, or read the results if the run has already written them.

    Args:
        when: ``before`` or ``after``.
        model: model to evaluate; may be None if the results are on disk.
        measurement: suites, lengths and documents.
        context: processes, each of which must call this function; output folder and reporter.
    """
    resolved, asked = measurement.resolved, measurement.asked
    recipe, output = resolved.recipe, folder_of(context)
    known = context.world.on_rank_0(lambda: results_in(output, when, asked))
    if known is not None:
        return known
    if not asked:
        return []
    settings = recipe.evaluation.settings(tuple(asked), asked, recipe.seed, resolved.trained_length)
    assert model is not None
    with (
        context.rank_0_reporter.bar(f"evaluation {when}", None) as advance,
        autocast(resolved.device, resolved.precision, context.mesh is not None),
    ):

        def progress(what: str, done: int, total: int) -> None:
            advance(done, f"{what} {done}/{total}")

        if context.mesh is None:
            under_test = ModelUnderTest.in_memory(model.model, resolved.tokenizer)
        else:
            under_test = ModelUnderTest.over_mesh(model, resolved.tokenizer, context.mesh, context.world)
        results = evaluate_model(under_test, settings, measurement.documents, progress=progress)
    if context.is_rank_0:
        _write_results(output, when, results)
    return results


def perplexity_lengths(resolved: ResolvedRecipe) -> list[int]:
    """Lengths for perplexity: the target, and for longrope also the original length, at which short factors apply."""
    target = resolved.target
    return [target] if resolved.original_length is None else [target, resolved.original_length]


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
            task.samples(self.encoder, length, self.samples, self.seed)


def prompt_suites(recipe: Recipe, tokenizer: Any, sharded: bool) -> list[PromptSuite]:
    """Suites of a recipe that need prompt lengths.

    Args:
        recipe: the recipe.
        tokenizer: tokenizer of the model.
        sharded: whether several processes evaluate one sharded model.

    Raises:
        RopewalkError: for a suite or task that does not support sharded models.
    """
    evaluation = recipe.evaluation
    if not evaluation.suites:
        return []
    settings = evaluation.settings(seed=recipe.seed)
    chosen = chosen_tasks(settings, sharded)
    encoder = PromptEncoder(tokenizer, settings.chat)
    found = []
    for suite in chosen_suites(settings):
        if isinstance(suite, GeneratedSuite) and suite.needs_lengths(settings):
            tasks = generated_tasks(suite, chosen[suite.name], settings).values()
            there = [task for task in tasks if task.unavailable() is None]
            found.append(PromptSuite(suite.name, there, encoder, settings.samples, settings.seed))
    return found


def prompt_lengths(resolved: ResolvedRecipe, reporter: Reporter) -> dict[str, list[int]]:
    """Prompt lengths by suite: those requested, or else the trained length and the target if the prompts fit."""
    recipe = resolved.recipe
    lengths: dict[str, list[int]] = {}
    for prompts in prompt_suites(recipe, resolved.tokenizer, resolved.mesh.world_size > 1):
        if recipe.evaluation.lengths is not None:
            lengths[prompts.suite] = recipe.evaluation.lengths
            continue
        fitting = lengths[prompts.suite] = []
        for length in (resolved.trained_length, resolved.target):
            try:
                prompts.check(length)
            except RopewalkError as error:
                reporter.note(f"{prompts.suite} is skipped at {length} tokens: {error}")
            else:
                fitting.append(length)
    return lengths
