"""Aggregate predictions into results, and results into summary figures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.agreement import judge_facts
from ropewalk.evaluation.predictions import Prediction
from ropewalk.evaluation.results import ITSELF, SAMPLES, PositionBin, TaskResult
from ropewalk.evaluation.statistics import (
    Interval,
    exp_nats,
    finite_or_none,
    ratio_interval,
    score_interval,
    wilson_interval,
)
from ropewalk.evaluation.tasks.needle import scores_by_depth
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.ruler.tasks import OVERALL, weighted_averages
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.io.digests import digest

EFFECTIVE_THRESHOLD = 85.6
"""Score of Llama 2 7B on RULER at 4096 tokens, in percent; RULER's threshold for the effective length."""
BASE_SHARE = 0.85
"""Share of the base score that NoLiMa asks for at the effective length."""


LEAST_IN_FIFTHS = 25
"""Fewest samples that are divided among the fifths of the text: five in each, on average."""


def task_result(
    predictions: Sequence[Prediction], details: Mapping[str, Any], rejected: Mapping[int, str] | None = None
) -> TaskResult:
    """Aggregate the predictions of one task and length into a result, in percent with its interval.

    Args:
        predictions: one for each answered sample.
        details: facts about the run, JSON values.
        rejected: samples that a server rejected, by index with its reason. They are named, and counted neither as right
            nor as wrong.

    Raises:
        RopewalkError: if there are no predictions.
    """
    if not predictions:
        raise RopewalkError("a result needs at least one prediction, got none")
    first = predictions[0]
    shared = contexts_of([each.details for each in predictions])
    low, high = score_interval([each.score for each in predictions], shared)
    tokens = [each.prompt_tokens for each in predictions]
    over = sum(each.fill > 1 for each in predictions)
    judge = judge_facts(predictions)
    unended = sum(bool(each.prediction.strip()) and not each.answer.strip() for each in predictions)
    return TaskResult(
        suite=first.suite,
        task=first.task,
        length=first.length,
        n=len(predictions),
        score=100 * sum(each.score for each in predictions) / len(predictions),
        ci95=(100 * low, 100 * high),
        # Only the samples of --compat nvidia can exceed the length: NVIDIA's scripts ignore BOS and chat template.
        reason="; ".join(
            [
                *([f"{over} prompts with their maximum answer exceed the length"] if over else []),
                *_shortened(predictions),
                *_judged(judge),
                *([_unended(unended, len(predictions))] if unended else []),
                *([_not_answered(rejected, len(predictions))] if rejected else []),
            ]
        )
        or None,
        details={
            **({"rejected": [{"index": i, "reason": r} for i, r in rejected.items()]} if rejected else {}),
            "prompt_tokens": [min(tokens), max(tokens)],
            "least_fill": min(each.fill for each in predictions),
            "bos_count": sorted({each.bos_count for each in predictions}),
            # None (unknown, as some servers leave it) is not counted.
            "cut_off": sum(each.finished is False for each in predictions),
            SAMPLES: digest([each.prompt_sha256 for each in predictions]),
            "over_length": over,
            "empty": sum(not each.answer.strip() for each in predictions),
            **_depths(predictions),
            **_difficulties(predictions),
            **_groups(predictions),
            **judge,
            **details,
        },
        samples=tuple(
            {"index": each.index, "score": 100 * each.score}
            | ({} if shared is None else {"context": each.details["context"]})
            for each in predictions
        ),
    )


def further_results(predictions: Sequence[Prediction], details: Mapping[str, Any]) -> list[TaskResult]:
    """Results of the same answers by the other metrics of their suite, as tasks named ``task.metric``.

    Args:
        predictions: those of one task and length.
        details: facts about the run, as for :func:`task_result`.
    """
    suite = BY_NAME.get(predictions[0].suite) if predictions else None
    others = suite.further.get(predictions[0].metric, ()) if isinstance(suite, GeneratedSuite) else ()
    found = []
    for metric in others:
        scored = [replace(each, metric=metric).scored_again() for each in predictions]
        named = [replace(each, task=f"{each.task}.{metric}") for each in scored]
        found.append(task_result(named, {**details, "answers_of": predictions[0].task}))
    return found


def contexts_of(samples: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """The text that each sample is about, from its ``context``; None if samples have texts of their own."""
    if not all("context" in each for each in samples):
        return None
    return [int(each["context"]) for each in samples]


def _unended(unended: int, answered: int) -> str:
    return (
        f"{unended} of {answered} answers consist of the model's thoughts alone and count as wrong; more "
        "--thinking-tokens let the thoughts end"
    )


def _not_answered(rejected: Mapping[int, str], answered: int) -> str:
    first, asked = next(iter(rejected)), len(rejected) + answered
    return (
        f"{len(rejected)} of {asked} prompts are not counted, because the server rejected them (sample {first}: "
        f"{rejected[first]})"
    )


def _shortened(predictions: Sequence[Prediction]) -> Iterator[str]:
    """What a length left out of the questions of a file."""
    cut = [each.details["tokens_cut"] for each in predictions if "tokens_cut" in each.details]
    if cut:
        yield (
            f"{len(cut)} of {len(predictions)} prompts were too long, and part of their text was left out "
            f"({min(cut):,} to {max(cut):,} tokens)"
        )
    if too_long := max(int(each.details.get("too_long", 0)) for each in predictions):
        yield f"{too_long} of {len(predictions) + too_long} questions that were drawn are too long, and were not asked"


def _judged(judge: Mapping[str, Any]) -> Iterator[str]:
    if judge:
        facts = judge["judge"]
        yield f"judged by {facts['model']}"
        if facts["unclear"]:
            yield f"{facts['unclear']} unclear verdicts count as wrong"


def _depths(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the scores by depth, for suites whose figure is by depth."""
    suite = BY_NAME.get(predictions[0].suite)
    if suite is None or suite.figure != "by depth":
        return {}
    depths = [float(each.details["depth"]) for each in predictions]
    return {"depths": scores_by_depth(depths, [each.score for each in predictions])}


def _difficulties(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the scores by difficulty, as the task counts it; by fifths of the text where the answer stands at a depth.

    A suite whose figure is by depth has chosen its depths, and its scores at each of them are in ``depths``.
    """
    found: dict[str, Any] = {}
    if all("difficulty" in each.details for each in predictions):
        levels = [float(each.details["difficulty"]) for each in predictions]
        found["difficulties"] = _by_level("difficulty", levels, predictions)
    suite = BY_NAME.get(predictions[0].suite)
    chosen = suite is not None and suite.figure == "by depth"
    if (
        not chosen
        and len(predictions) >= LEAST_IN_FIFTHS
        and all(isinstance(each.details.get("depth"), int | float) for each in predictions)
    ):
        fifths = [min(int(5 * float(each.details["depth"])), 4) for each in predictions]
        found["fifths"] = _by_level("depth", [(2 * fifth + 1) / 10 for fifth in fifths], predictions)
    return found


def _groups(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The scores by the labels of questions, for each grouping that all of them have."""
    labels = [each.details.get("groups", {}) for each in predictions]
    found: dict[str, Any] = {}
    for grouping in labels[0]:
        if all(grouping in each for each in labels):
            of = [str(each[grouping]) for each in labels]
            found[grouping] = _by_level("label", of, predictions)
    return {"groups": found} if found else {}


def _by_level(name: str, levels: Sequence[Any], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One entry for each level, ascending, with the score in percent and its interval."""
    found = []
    for level in sorted(set(levels)):
        here = [each for each, at in zip(predictions, levels, strict=True) if at == level]
        scores = [each.score for each in here]
        low, high = score_interval(scores, contexts_of([each.details for each in here]))
        score = 100 * sum(scores) / len(scores)
        found.append({name: level, "n": len(here), "score": score, "ci95": [100 * low, 100 * high]})
    return found


@dataclass(frozen=True)
class EffectiveLength:
    """The longest length at which a task's score is still above a threshold.

    Attributes:
        suite, task: the task that was measured.
        threshold: percent.
        length: the longest measured length such that the scores at it and at all shorter lengths are above the
            threshold; None if the score at the shortest length is not.
        certain: the same for the low ends of the 95 % intervals instead of the scores.
        longest: the longest measured length; if ``length`` equals it, ``length`` is only a lower bound.
        base: mean score in percent at short lengths, of which ``threshold`` is a share, and the ends of its 95 %
            interval; None if the threshold does not depend on the scores.
    """

    suite: str
    task: str
    threshold: float
    length: int | None
    certain: int | None
    longest: int
    base: tuple[float, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; ``base`` only if there is one."""
        values = dict(self.__dict__)
        return values if self.base is not None else {k: v for k, v in values.items() if k != "base"}


def effective_length(
    results: Sequence[TaskResult], threshold: float = EFFECTIVE_THRESHOLD, base_length: int | None = None
) -> EffectiveLength | None:
    """Compute the effective context length of one task.

    Args:
        results: results of one task, in percent, at several lengths.
        threshold: percent, 0 to 100; a score must be above it.
        base_length: longest length in tokens whose scores give the base score. A score must then be ``BASE_SHARE`` of
            the base score or more, whatever the threshold.

    Returns:
        The effective length; None if no length was run, or none up to ``base_length``.

    Raises:
        RopewalkError: if the threshold is not from 0 to 100, or the results belong to several tasks.

    Source: RULER, arXiv:2404.06654, section 4; Base of RoPE bounds context length, arXiv:2405.14591, section 5;
        with a base score: NoLiMa, arXiv:2502.05167, section 4.
    """
    if not 0 <= threshold <= 100:
        raise RopewalkError(f"the threshold must be a percentage from 0 to 100, got {threshold:g}")
    ran = sorted(
        (r for r in results if r.status == "ok" and r.length is not None), key=lambda r: r.length or 0
    )
    if not ran:
        return None
    if len({(result.suite, result.task) for result in ran}) > 1:
        raise RopewalkError(
            "an effective length needs the results of a single task, got several; use effective_lengths instead"
        )

    short = [result for result in ran if base_length is not None and (result.length or 0) <= base_length]
    base = _base_score(short)
    if base_length is not None and base is None:
        return None
    threshold = threshold if base is None else BASE_SHARE * base[0]

    def reach(value_of: Any) -> int | None:
        reached = None
        for result in ran:
            value = value_of(result)
            # Without any right answer at short lengths, every score would reach its share of them.
            enough = value > threshold or (base is not None and math.isclose(value, threshold) and value > 0)
            # Stop at the first length that fails: a longer one that passes again does not make the model
            # usable in between.
            if not enough:
                break
            reached = result.length
        return reached

    return EffectiveLength(
        ran[0].suite,
        ran[0].task,
        threshold,
        reach(lambda result: result.score),
        reach(lambda result: result.ci95[0]),
        ran[-1].length or 0,
        base,
    )


def _base_score(short: Sequence[TaskResult]) -> tuple[float, float, float] | None:
    """Mean score of results in percent with the ends of its interval, all samples together; None without results."""
    scores = [sample["score"] / 100 for result in short for sample in result.samples]
    if not scores:
        return None
    low, high = score_interval(scores)
    return 100 * sum(scores) / len(scores), 100 * low, 100 * high


def effective_lengths(
    results: Iterable[TaskResult], threshold: float = EFFECTIVE_THRESHOLD
) -> list[EffectiveLength]:
    """Compute the effective length of every task that was scored in percent at set lengths.

    A suite with an overall score gets one effective length from it.
    """
    groups: dict[tuple[str, str], list[TaskResult]] = defaultdict(list)
    results = list(results)
    # A single task has no overall score and then stands for itself.
    with_overall = {result.suite for result in results if result.task == OVERALL}
    for result in results:
        by_overall = result.task == OVERALL or result.suite not in with_overall
        if result.unit == "percent" and result.length is not None and by_overall:
            groups[result.suite, result.task].append(result)
    bases = {name: suite.base_length for name, suite in BY_NAME.items()}
    found = (effective_length(group, threshold, bases.get(name)) for (name, _), group in groups.items())
    return [each for each in found if each is not None]


def mean_over_checkpoints(by_name: Mapping[str, Sequence[TaskResult]]) -> list[TaskResult]:
    """Average the results of several checkpoints for each task and length.

    All checkpoints answered the same samples: each sample's scores are averaged over the checkpoints first, and
    the interval is over samples. ``details`` gives the score of each checkpoint, and the standard deviation,
    minimum and maximum over checkpoints.

    Args:
        by_name: results by the name of the checkpoint.

    Returns:
        The means, in the order of the first checkpoint's results. A task that a checkpoint did not run has the
        status ``not run``, with a reason that names the checkpoint.

    Raises:
        RopewalkError: if there are no checkpoints, or their tasks, lengths or samples differ.
    """
    if not by_name:
        raise RopewalkError("a mean over checkpoints needs at least one checkpoint, got none")
    names = list(by_name)
    keyed = {name: {_key(result): result for result in results} for name, results in by_name.items()}
    keys = list(keyed[names[0]])
    for name in names:
        if set(keyed[name]) != set(keys):
            raise RopewalkError(
                f"checkpoints {names[0]} and {name} have results of different tasks or lengths; evaluate all "
                "checkpoints with the same suites and lengths"
            )
    return [_mean({name: keyed[name][key] for name in names}) for key in keys]


def _key(result: TaskResult) -> tuple[str, str, int | None]:
    return result.suite, result.task, result.length


def _mean(by_name: Mapping[str, TaskResult]) -> TaskResult:
    first = next(iter(by_name.values()))
    failed = {name: result.reason for name, result in by_name.items() if result.status != "ok"}
    if failed:
        name, reason = next(iter(failed.items()))
        why = reason if len(failed) == len(by_name) else f"checkpoint {name}: {reason}"
        return TaskResult.not_run(first.suite, first.task, first.length, why or "", first.unit)
    if len(by_name) > 1 and first.details.get("evaluator") == ITSELF:
        reason = "each checkpoint chose its own key tokens; give --evaluator, so that all use the same ones"
        return TaskResult.not_run(first.suite, first.task, first.length, reason, first.unit)
    others = [name for name, r in by_name.items() if r.details.get("tasks") != first.details.get("tasks")]
    if others:
        # Overall scores over different tasks are different quantities and have no meaningful mean.
        reason = f"the score of checkpoint {others[0]} is over other tasks than that of the first checkpoint"
        return TaskResult.not_run(first.suite, first.task, first.length, reason, first.unit)
    _refuse_other_samples(by_name)
    scores = np.array([result.score for result in by_name.values()])
    mean, finite = float(scores.mean()), bool(np.isfinite(scores).all())
    spread = {
        "sd": float(scores.std(ddof=1)) if len(scores) > 1 and finite else None,
        "min": float(scores.min()) if finite else None,
        "max": float(scores.max()) if finite else None,
    }
    samples, interval = _mean_samples(list(by_name.values()), mean)
    # A detail in which the checkpoints differ would be that of the first alone.
    kept = {k: v for k, v in first.details.items() if all(r.details.get(k) == v for r in by_name.values())}
    remarks = dict.fromkeys(result.reason for result in by_name.values() if result.reason)
    return replace(
        first,
        reason="; ".join(remarks) or None,
        score=mean,
        ci95=interval,
        details={
            **kept,
            **_mean_details(list(by_name.values())),
            "checkpoints": [
                {"name": name, "score": finite_or_none(result.score)} for name, result in by_name.items()
            ],
            "spread": spread,
        },
        positions=_mean_positions(list(by_name.values())),
        samples=samples,
    )


def _refuse_other_samples(by_name: Mapping[str, TaskResult]) -> None:
    first = next(iter(by_name.values()))
    for name, result in by_name.items():
        edges = [[(each.start, each.end) for each in r.positions] for r in (first, result)]
        same_samples = result.details.get(SAMPLES) == first.details.get(SAMPLES)
        if not same_samples or edges[0] != edges[1]:
            what = "position bins" if same_samples else "samples"
            raise RopewalkError(
                f"checkpoints {next(iter(by_name))} and {name} were measured on different {what} in {first.suite} "
                f"{first.task}; evaluate all checkpoints with the same settings and tokenizer"
            )


def _mean_details(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Average the details that are scores themselves: by depth, published averages, and shares of correct tokens."""
    found: dict[str, Any] = {}
    depths = [result.details.get("depths") for result in results]
    if all(isinstance(each, list) for each in depths):
        found["depths"] = [_mean_depth(same) for same in zip(*depths, strict=True)]
    for key in ("published", "tokens_right"):
        values = [result.details[key] for result in results if result.details.get(key) is not None]
        if len(values) == len(results):
            found[key] = float(np.mean(values))
    ends = [result.details.get("published_ci95") or [None] for result in results]
    if not any(None in each for each in ends):
        found["published_ci95"] = np.mean(np.array(ends, dtype=np.float64), axis=0).tolist()
    return found


def _mean_depth(same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # The samples of one checkpoint: the others answered the same ones, so they add no independent trials.
    score, n = float(np.mean([each["score"] for each in same])), same[0]["n"]
    low, high = wilson_interval(score / 100 * n, n)
    return {"depth": same[0]["depth"], "n": n, "score": score, "ci95": [100 * low, 100 * high]}


def _mean_samples(
    results: Sequence[TaskResult], mean: float
) -> tuple[tuple[Mapping[str, Any], ...], Interval]:
    """Return each sample's mean over checkpoints, and the interval over samples."""
    by_index = [{sample["index"]: sample for sample in result.samples} for result in results]
    # A sample that one checkpoint lacks would shift the mean of the others.
    shared = [index for index in by_index[0] if all(index in other for other in by_index)]
    if not shared:
        # An overall score has no samples of its own, so the ends of the checkpoints' intervals are averaged.
        ends = np.array([result.ci95 for result in results])
        return (), (float(ends[:, 0].mean()), float(ends[:, 1].mean()))
    if "score" in by_index[0][shared[0]]:
        means = [float(np.mean([other[index]["score"] for other in by_index])) for index in shared]
        texts = contexts_of([by_index[0][index] for index in shared])
        low, high = score_interval([each / 100 for each in means], texts)
        averaged = tuple({**by_index[0][i], "score": m} for i, m in zip(shared, means, strict=True))
        return averaged, (100 * low, 100 * high)
    # Perplexities: average the loss of each row over checkpoints.
    # A loss that was not finite is None in a sample and becomes NaN here.
    nats = np.array([[other[index]["nats"] for index in shared] for other in by_index], dtype=np.float64)
    tokens = np.array([by_index[0][index]["tokens"] for index in shared])
    low, high = ratio_interval(nats.mean(axis=0), tokens, at_least=0)
    centre = float(nats.mean(axis=0).sum() / tokens.sum())
    # The mean of perplexities is not the perplexity of the mean loss, so scale the interval to be around the former.
    interval = (mean * exp_nats(low - centre), mean * exp_nats(high - centre))
    averaged = tuple(
        {**by_index[0][index], "nats": finite_or_none(float(total))}
        for index, total in zip(shared, nats.mean(axis=0), strict=True)
    )
    return averaged, interval


def _mean_positions(results: Sequence[TaskResult]) -> tuple[PositionBin, ...]:
    """Average each position bin; interval ends are averaged too, because all checkpoints read the same rows."""
    found = []
    for bins in zip(*(result.positions for result in results), strict=True):
        ends = np.array([each.ci95 for each in bins])
        perplexity = float(np.mean([each.perplexity for each in bins]))
        found.append(
            replace(bins[0], perplexity=perplexity, ci95=(float(ends[:, 0].mean()), float(ends[:, 1].mean())))
        )
    return tuple(found)


def summarise(results: Sequence[TaskResult], threshold: float) -> dict[str, Any]:
    """Summarise the results: effective lengths, and RULER's weighted averages over lengths."""
    overall = [r for r in results if r.suite == "ruler" and r.task == OVERALL]
    return {
        "effective_length": [each.to_json() for each in effective_lengths(results, threshold)],
        "ruler_weighted_average": weighted_averages(overall),
    }
