"""LongPPL: perplexity over key tokens, those that a model predicts well only because it sees far back.

An evaluator reads each text twice: as a whole, and through short contexts that move through it step by step. A
token is a key token where the long context raises its log-probability by more than ``alpha`` and brings it above
``beta``. LongPPL is the perplexity of the model under evaluation on those tokens alone.

Source: Fang et al., arXiv:2410.23771. Their code begins no row with BOS but the first; here every row begins with
one where the tokenizer has it, long or short, so that the difference is of context and not of BOS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.perplexity import check_prefill_chunk
from ropewalk.evaluation.results import ITSELF, TaskResult
from ropewalk.evaluation.rows import Ids
from ropewalk.evaluation.running import Progress, evaluating
from ropewalk.evaluation.sliding import Window, finite, read_windows
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval, exp_nats, ratio_interval
from ropewalk.integrations.losses import OutputHead

SHORT_CONTEXT = 4096
STEP = 1024
ALPHA = 2.0
BETA = -2.0


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Another model that chooses the key tokens.

    Attributes:
        name: for the record.
        model: a causal decoder.
        head: its output head.
        tokenizer: its own, of the same vocabulary as that of the model under evaluation.
    """

    name: str
    model: Any
    head: OutputHead
    tokenizer: Any


@dataclass(frozen=True)
class KeyTokens:
    """What one document adds.

    Attributes:
        index: its number among those given, from 0.
        tokens: key tokens.
        nats: of the model under evaluation on them, together.
        compared: tokens that the short rows show less text before than the long row does.
        all_tokens: scored tokens of the text.
        all_nats: of the model under evaluation on them.
    """

    index: int
    tokens: int
    nats: float
    compared: int
    all_tokens: int
    all_nats: float


@dataclass(frozen=True)
class LongPerplexity:
    """LongPPL of some documents at one length.

    Attributes:
        length: tokens of a long row, BOS included; longer documents are cut to their beginning.
        short_context: tokens of text before a token, at least, in the short rows.
        step: tokens that share a short row; the last of them sees ``short_context + step - 1``.
        alpha, beta: thresholds in nats, of the difference and of the log-probability.
        evaluator: what chose the key tokens.
        documents: in order, without those too short to compare.
        n_short: those.
        not_finite: documents in which a loss was no finite number, so that nothing can be chosen.
        perplexity: exp of the mean loss of all key tokens; NaN without any, or with ``not_finite`` ones.
        ci95: its 95 % interval over documents (Student's, of the mean loss).
    """

    length: int
    short_context: int
    step: int
    alpha: float
    beta: float
    evaluator: str
    documents: tuple[KeyTokens, ...]
    n_short: int
    not_finite: tuple[int, ...]
    perplexity: float
    ci95: Interval

    @property
    def n_key_tokens(self) -> int:
        return sum(each.tokens for each in self.documents)

    @property
    def n_compared(self) -> int:
        return sum(each.compared for each in self.documents)

    @property
    def share(self) -> float:
        """Of key tokens among those compared."""
        return self.n_key_tokens / self.n_compared

    @property
    def overall(self) -> float:
        """Perplexity of all tokens of the same texts."""
        nats = math.fsum(each.all_nats for each in self.documents)
        return exp_nats(nats / sum(each.all_tokens for each in self.documents))


def key_tokens(
    long_losses: NDArray[np.float64], short_losses: NDArray[np.float64], alpha: float, beta: float
) -> NDArray[np.bool_]:
    """Which tokens are key tokens.

    Args:
        long_losses: ``[tokens]`` in nats, after the whole text so far.
        short_losses: ``[tokens]`` in nats, after a short context.
        alpha: nats that the long context must spare, more than.
        beta: log-probability that it must lead to, more than.

    Returns:
        ``[tokens]``.

    Source: Fang et al., arXiv:2410.23771; both inequalities are strict.
    """
    chosen: NDArray[np.bool_] = (short_losses - long_losses > alpha) & (-long_losses > beta)
    return chosen


def short_windows(n_tokens: int, short_context: int, step: int) -> Iterator[Window]:
    """The short rows whose context is shorter than the text before the token.

    The beginning of a text, ``short_context + step`` tokens, is seen by short rows as by the long one; so it has
    no row, and its difference is zero.

    Example:
        >>> [(w.start, w.first, w.end) for w in short_windows(10, 3, 2)]
        [(2, 5, 7), (4, 7, 9), (6, 9, 10)]
    """
    for start in range(step, n_tokens - short_context, step):
        first = start + short_context
        yield Window(start, first, min(first + step, n_tokens))


def long_perplexity(
    model: Any,
    head: OutputHead,
    documents: Sequence[Ids],
    bos_id: int | None,
    length: int,
    short_context: int = SHORT_CONTEXT,
    step: int = STEP,
    alpha: float = ALPHA,
    beta: float = BETA,
    evaluator: Evaluator | None = None,
    tokenizer: Any = None,
    batch_size: int = 1,
    prefill_chunk: int | None = None,
    progress: Progress | None = None,
) -> LongPerplexity:
    """Perplexity of a model on the tokens for which long context matters.

    Args:
        model: a model from ``load_model``; its training mode is left as it was.
        head: its output head.
        documents: int ``[tokens]`` each, without special tokens. Those of at most ``short_context + step`` tokens
            have nothing to compare; they are left out and counted.
        bos_id: put in front of every row; None for tokenizers that have none.
        length: tokens of a long row, BOS included.
        short_context: tokens of text, BOS not counted.
        step: tokens that share a short row.
        alpha, beta: in nats, see :func:`key_tokens`.
        evaluator: chooses the key tokens; the model itself if None. To compare models, give all of them the same.
        tokenizer: the model's own, needed with an evaluator, whose vocabulary must be the same.
        batch_size: short rows in one pass.
        prefill_chunk: tokens of a pass, as in :func:`~ropewalk.evaluation.perplexity.causal_losses`.
        progress: called with the rows done and all rows, long and short.

    Returns:
        What each document adds, and the perplexity of all of it. No key token, or a loss that is not finite,
        makes it NaN, and :func:`longppl_task` says which.

    Raises:
        RopewalkError: if an argument is out of range, no document is long enough, or the vocabularies differ.
        EngineError: if a model cannot be read in chunks.

    Source: Fang et al., arXiv:2410.23771, with its context of 4096, step of 1024, alpha of 2 and beta of -2.
    """
    room = length - (bos_id is not None)
    _check(short_context, step, alpha, beta, batch_size)
    check_long_perplexity(documents, bos_id, length, short_context, step)
    if evaluator is not None:
        _check_vocabulary(tokenizer, evaluator)
    models = [(model, head)] if evaluator is None else [(model, head), (evaluator.model, evaluator.head)]
    for each, _ in models:
        check_prefill_chunk(each, prefill_chunk)
    beginning = short_context + step
    texts = {index: document[:room] for index, document in enumerate(documents) if len(document) > beginning}
    plans = {index: list(short_windows(len(text), short_context, step)) for index, text in texts.items()}
    count = _counter(progress, len(models) * len(texts) + sum(map(len, plans.values())))
    found: list[KeyTokens] = []
    not_finite: list[int] = []
    with evaluating(models[0][0]), evaluating(models[-1][0]):
        for index, text in texts.items():
            # Without BOS nothing comes before the first token, so it is not scored.
            whole = [(text, Window(0, int(bos_id is None), len(text)))]
            longs = [_losses(*each, whole, bos_id, 1, prefill_chunk, count) for each in models]
            parts = [(text, window) for window in plans[index]]
            short = _losses(*models[-1], parts, bos_id, batch_size, prefill_chunk, count)
            if not all(np.isfinite(losses).all() for losses in (*longs, short)):
                not_finite.append(index)
            chosen = key_tokens(longs[-1][-len(short) :], short, alpha, beta)
            found.append(_document(index, longs[0], chosen))
    perplexity, ci95 = (math.nan, NO_INTERVAL) if not_finite else _perplexity(found)
    return LongPerplexity(
        length,
        short_context,
        step,
        alpha,
        beta,
        ITSELF if evaluator is None else evaluator.name,
        tuple(found),
        len(documents) - len(texts),
        tuple(not_finite),
        perplexity,
        ci95,
    )


def check_long_perplexity(
    documents: Sequence[Ids], bos_id: int | None, length: int, short_context: int, step: int
) -> None:
    """Raise where :func:`long_perplexity` has nothing to compare.

    Args:
        documents, bos_id, length, short_context, step: as there.
    """
    room = length - (bos_id is not None)
    if short_context + step >= room:
        raise RopewalkError(
            f"a short context of {short_context} tokens in steps of {step} leaves nothing to compare at a length "
            f"of {length}; together they must be less than {room}"
        )
    longest = max(map(len, documents), default=0)
    if longest <= short_context + step:
        raise RopewalkError(
            f"LongPPL needs a document longer than a short context of {short_context} tokens and a step of {step} "
            f"together; the longest of {len(documents)} has {longest}"
        )


def _check(short_context: int, step: int, alpha: float, beta: float, batch_size: int) -> None:
    for name, value in (("short_context", short_context), ("step", step), ("batch_size", batch_size)):
        if value < 1:
            raise RopewalkError(f"{name} must be 1 or more, got {value}")
    for name, threshold in (("alpha", alpha), ("beta", beta)):
        if not math.isfinite(threshold):
            raise RopewalkError(f"{name} must be a finite number of nats, got {threshold}")


def _check_vocabulary(tokenizer: Any, evaluator: Evaluator) -> None:
    if tokenizer is None:
        raise RopewalkError(
            f"the evaluator {evaluator.name} needs the model's tokenizer beside its own, got None"
        )
    own, other = tokenizer.get_vocab(), evaluator.tokenizer.get_vocab()
    if own != other:
        raise RopewalkError(
            f"the evaluator {evaluator.name} has another vocabulary ({len(other)} tokens) than the model "
            f"({len(own)}), so its key tokens are not the model's; choose one with the same tokenizer"
        )


def _counter(progress: Progress | None, total: int) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return count


def _losses(
    model: Any,
    head: OutputHead,
    windows: Sequence[tuple[Ids, Window]],
    bos_id: int | None,
    batch_size: int,
    prefill_chunk: int | None,
    count: Callable[[], None],
) -> NDArray[np.float64]:
    """Losses of the windows' scored tokens, in the order of the windows."""
    found: dict[int, NDArray[np.float64]] = {}
    for number, losses in read_windows(model, head, windows, bos_id, batch_size, prefill_chunk):
        found[number] = losses
        count()
    return np.concatenate([found[number] for number in range(len(windows))])


def _document(index: int, losses: NDArray[np.float64], chosen: NDArray[np.bool_]) -> KeyTokens:
    key = losses[-len(chosen) :][chosen]
    return KeyTokens(index, len(key), math.fsum(key), len(chosen), len(losses), math.fsum(losses))


def _perplexity(documents: Sequence[KeyTokens]) -> tuple[float, Interval]:
    """LongPPL and its interval; NaN without key tokens."""
    totals, counts = [each.nats for each in documents], [each.tokens for each in documents]
    if not sum(counts):
        return math.nan, NO_INTERVAL
    low, high = ratio_interval(totals, counts, at_least=0)
    return exp_nats(math.fsum(totals) / sum(counts)), (exp_nats(low), exp_nats(high))


def longppl_task(result: LongPerplexity) -> TaskResult:
    """The result as a task; not run where there is no key token, or a loss is no number."""
    details: dict[str, Any] = {
        "evaluator": result.evaluator,
        "short_context": result.short_context,
        "step": result.step,
        "alpha": result.alpha,
        "beta": result.beta,
        "n_key_tokens": result.n_key_tokens,
        "n_compared": result.n_compared,
        "n_tokens": sum(each.all_tokens for each in result.documents),
        "share": result.share,
        "perplexity": finite(result.overall),
        "documents": len(result.documents),
        "documents_short": result.n_short,
        # The first token of a row is not scored.
        "documents_shorter_than_length": sum(d.all_tokens < result.length - 1 for d in result.documents),
    }
    reason = None
    if result.not_finite:
        reason = (
            f"losses of document {result.not_finite[0]} are no finite numbers, so no key token can be chosen"
        )
    elif not result.n_key_tokens:
        reason = (
            f"none of {result.n_compared} tokens is a key token: no long context spared {result.evaluator} more "
            f"than {result.alpha:g} nats and led to a log-probability above {result.beta:g}"
        )
    if reason is not None:
        task = TaskResult.not_run("longppl", "longppl", result.length, reason, unit="perplexity")
        return replace(task, details=details)
    holding = [each for each in result.documents if each.tokens]
    return TaskResult(
        suite="longppl",
        task="longppl",
        length=result.length,
        n=len(holding),
        score=result.perplexity,
        ci95=result.ci95,
        details=details,
        unit="perplexity",
        samples=tuple({"index": d.index, "nats": d.nats, "tokens": d.tokens} for d in holding),
    )
