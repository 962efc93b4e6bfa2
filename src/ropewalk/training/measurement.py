"""What a run measures before and after, and what of it a resumed run finds on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import Settings, Subject, TaskResult, evaluate
from ropewalk.evaluation.passkey import PasskeyTask
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.sharded import evaluate_sharded
from ropewalk.files import parse_json, write_json
from ropewalk.integrations.losses import LossModel
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe import Recipe
from ropewalk.training.reporter import Reporter
from ropewalk.training.step import autocast
from ropewalk.training.team import Team


def evaluation_file(when: str) -> str:
    """Name of the file in a run's folder that holds the results of ``before`` or ``after``."""
    return f"evaluation-{when}.json"


def results_in(output: Path, when: str) -> list[TaskResult] | None:
    """The results that a run has measured already; None where it has not.

    Raises:
        RopewalkError: if the file is damaged.
    """
    path = output / evaluation_file(when)
    if not path.is_file():
        return None
    try:
        return [TaskResult.from_json(entry) for entry in parse_json(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RopewalkError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it, and --resume measures again"
        ) from error


def measure(
    when: str,
    model: LossModel | None,
    recipe: Recipe,
    chosen: Plan,
    documents: list[Ids],
    prompt_lengths: list[int],
    output: Path,
    reporter: Reporter,
    team: Team,
) -> list[TaskResult]:
    """Evaluate once; a resumed run finds the results on disk, and needs no model then."""
    path = output / evaluation_file(when)
    known = team.world.lead(lambda: results_in(output, when))
    if known is not None:
        return known
    # Where no passkey prompt fits, the suite is left out, and that was said.
    suites = tuple(each for each in recipe.evaluation.suites if each != "passkey" or prompt_lengths)
    if not suites:
        return []
    settings = Settings(
        suites=suites,
        lengths={"perplexity": perplexity_lengths(recipe, chosen), "passkey": prompt_lengths},
        samples=recipe.evaluation.samples,
        seed=recipe.seed,
        rows=recipe.evaluation.rows,
        trained_length=chosen.trained_length,
        # Before its extension the model is measured beyond what it was made for.
        beyond_config=True,
    )
    assert model is not None
    sharded = team.mesh is not None
    with (
        reporter.bar(f"evaluation {when}", None) as advance,
        autocast(chosen.device, chosen.precision, sharded),
    ):

        def progress(what: str, done: int, total: int) -> None:
            advance(done, f"{what} {done}/{total}")

        if team.mesh is None:
            subject = Subject.in_memory(model.model, chosen.tokenizer)
            results = evaluate(subject, settings, documents, progress=progress)
        else:
            results = evaluate_sharded(
                model, chosen.tokenizer, settings, documents, team.mesh, progress, team.world
            )
    if team.leads:
        write_json(path, [result.to_json() for result in results])
    return results


def perplexity_lengths(recipe: Recipe, chosen: Plan) -> list[int]:
    """The target; and where the result is longrope the original length, at which its short factors work."""
    target = recipe.stages[-1].context
    return [target] if chosen.original_length is None else [target, chosen.original_length]


def short_context(
    original_length: int | None, before: Sequence[TaskResult], after: Sequence[TaskResult]
) -> dict[str, Any] | None:
    """Perplexity at the original length before and after, and their ratio; None where it was not measured."""
    found = [
        next((r.score for r in results if (r.suite, r.length) == ("perplexity", original_length)), None)
        for results in (before, after)
    ]
    before_, after_ = found
    if original_length is None or before_ is None or after_ is None:
        return None
    return {"length": original_length, "before": before_, "after": after_, "ratio": after_ / before_}


def describe_short_context(found: Mapping[str, Any]) -> str:
    """One sentence on what :func:`short_context` gives."""
    return (
        f"perplexity at {found['length']:,} tokens {found['before']:.3f} before and {found['after']:.3f} after, "
        f"{100 * (found['ratio'] - 1):+.1f} %"
    )


def passkey_lengths(recipe: Recipe, chosen: Plan, reporter: Reporter) -> list[int]:
    """The lengths asked for; else the trained length and the target, where a prompt fits into them."""
    if "passkey" not in recipe.evaluation.suites:
        return []
    if recipe.evaluation.lengths is not None:
        return recipe.evaluation.lengths
    lengths = []
    for length in (chosen.trained_length, recipe.stages[-1].context):
        try:
            encoder = PromptEncoder(chosen.tokenizer)
            PasskeyTask().samples(encoder, length, recipe.evaluation.samples, recipe.seed)
        except RopewalkError as error:
            reporter.note(f"passkey is not run at {length} tokens: {error}")
        else:
            lengths.append(length)
    return lengths
