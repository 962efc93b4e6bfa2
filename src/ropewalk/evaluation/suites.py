"""evaluate: every suite through one function, for ``ropewalk extend`` and ``ropewalk eval`` alike."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.passkey import PasskeyResult, passkey, passkey_samples
from ropewalk.evaluation.perplexity import default_bins, perplexity_by_position
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.rows import EvaluationRows, Ids, evaluation_rows
from ropewalk.evaluation.running import Progress
from ropewalk.integrations.losses import OutputHead

SUITES = ("perplexity", "passkey")

SuiteProgress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and how much there is."""


def check_suites(suites: Sequence[str]) -> None:
    """Raise for a suite that there is not; the message names the nearest that there is."""
    if not suites:
        raise RopewalkError(f"no suite given; choose from {', '.join(SUITES)}")
    for suite in suites:
        if suite not in SUITES:
            near = difflib.get_close_matches(suite, SUITES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}" if near else f"choose from {', '.join(SUITES)}"
            raise RopewalkError(f"unknown suite {suite!r}; {hint}")


def evaluate(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Ids] | None,
    lengths: Sequence[int] | Mapping[str, Sequence[int]],
    suites: Sequence[str] = SUITES,
    samples: int = 20,
    seed: int = 0,
    rows: int = 16,
    trained_length: int | None = None,
    progress: SuiteProgress | None = None,
) -> list[TaskResult]:
    """Measure a model. All that can be refused is refused before the first forward pass.

    Args:
        model: a model from ``load_model``.
        tokenizer: the model's own.
        documents: int ``[tokens]`` each, without special tokens, for perplexity; None leaves it out, and says
            so in the result.
        lengths: tokens, for every suite; or the lengths of each suite by its name.
        suites: what to measure, in order.
        samples: passkey prompts a length.
        seed: of the samples and the bootstrap.
        rows: most rows of text a length.
        trained_length: edge of the position bins; the model's ``max_position_embeddings`` if None. Give it
            where results before and after an extension are to have the same bins.
        progress: called after each row and each sample.

    Returns:
        For each suite one result a length. A row begins with BOS; an EOS ends a document only where the
        tokenizer has no BOS to begin one with.

    Raises:
        RopewalkError: for an unknown suite, a length too short for a prompt, or text too short for a row.
        EngineError: if the model or its engine cannot take such rows.
    """
    check_suites(suites)
    by_suite = {s: list(lengths[s] if isinstance(lengths, Mapping) else lengths) for s in suites}
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    texts: dict[int, EvaluationRows] = {}
    if documents is not None:
        for length in by_suite.get("perplexity", []):
            texts[length] = evaluation_rows(documents, length, bos, eos if bos is None else None, rows)
    for length in by_suite.get("passkey", []):
        # Refuses a length that is too short now, not after an hour of perplexity.
        passkey_samples(tokenizer, length, samples, seed)
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    results = []
    for suite in suites:
        if suite == "passkey":
            answered = passkey(
                model, tokenizer, by_suite[suite], samples, seed, progress=_named(progress, suite)
            )
            results += [_passkey_task(result, stated) for result in answered]
            continue
        head = OutputHead.of(model) if texts else None
        for length in by_suite[suite]:
            if head is None:
                results.append(TaskResult.not_run(suite, suite, length, "no text was given"))
                continue
            edges = default_bins(length, trained_length or stated)
            named = _named(progress, f"perplexity at {length:,} tokens")
            results.append(_perplexity_task(model, head, texts[length], edges, seed, stated, named))
    return results


def _named(progress: SuiteProgress | None, what: str) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(what, done, total)


def _beyond(length: int, stated: int | None) -> dict[str, Any]:
    """RoPE has no table that ends, so a longer input runs; that it is longer must be said."""
    return {"max_position_embeddings": stated, "beyond_config": stated is not None and length > stated}


def _perplexity_task(
    model: Any,
    head: OutputHead,
    text: EvaluationRows,
    edges: Sequence[int],
    seed: int,
    stated: int | None,
    progress: Progress | None,
) -> TaskResult:
    measured = perplexity_by_position(model, head, text.rows, edges, progress, seed)
    overall, length = measured.overall, text.rows[0].layout.total_length
    finite = math.isfinite(overall.perplexity)
    return TaskResult(
        suite="perplexity",
        task="perplexity",
        length=length,
        n=overall.n_windows,
        score=overall.perplexity,
        ci95=overall.ci95,
        reason=None if finite else "the perplexity is not a finite number",
        details={"rows": text.kind, "n_tokens": overall.n_tokens, **_beyond(length, stated)},
        positions=measured.bins,
    )


def _passkey_task(result: PasskeyResult, stated: int | None) -> TaskResult:
    tokens = [record.prompt_tokens for record in result.records]
    return TaskResult(
        suite="passkey",
        task="passkey",
        length=result.length,
        n=len(result.records),
        score=result.score,
        ci95=result.ci95,
        details={
            "prompt_tokens": [min(tokens), max(tokens)],
            "least_fill": min(record.fill for record in result.records),
            "bos_count": sorted({record.bos_count for record in result.records}),
            **_beyond(result.length, stated),
        },
        predictions=tuple(
            {"suite": "passkey", "task": "passkey", **record.to_json()} for record in result.records
        ),
    )
