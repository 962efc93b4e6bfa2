"""LongPPL: perplexity over key tokens, which are tokens that a model predicts well only with long context.

An evaluator model reads each text twice: as a whole, and through a short context that moves over the text in steps. A
token is a key token if the long context raises its log-probability by more than ``alpha``, to more than ``beta``.
LongPPL is the perplexity of the model under test on the key tokens.

The evaluator may have another tokenizer. Its key tokens then select spans of the text (adjacent ones are merged), and
a token of the model is a key token if one span contains all its characters.

Source: Fang et al., arXiv:2410.23771, and PKU-ML/LongPPL, ``longppl/longppl.py``. Differences from that code:

- Every row, long or short, begins with BOS if the tokenizer has one, so that rows differ only in context. In the
  original code, only the first row has BOS.
- White space that a tokenizer leaves out of its offsets counts to the following token, as in other tokenizers.
  Otherwise " word" of one tokenizer would not be contained in "word" of the other.
- Tokens of the same character (such as the bytes of an emoji) have equal offsets, so they are key tokens together. For
  this reason, an evaluator with the model's own tokenizer may select a few more tokens than the model as its own
  evaluator, which needs no mapping by characters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.protocol import Progress, evaluating
from ropewalk.evaluation.results import ITSELF, TaskResult
from ropewalk.evaluation.rows import Ids, Window
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval, exp_nats, finite_or_none, ratio_interval
from ropewalk.evaluation.tasks.perplexity import with_digest_of_text
from ropewalk.evaluation.tasks.suite import WHAT, LikelihoodInput, LikelihoodSuite
from ropewalk.io.settings import Length, Option, Settings

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.likelihoods import WindowReader
    from ropewalk.models.compute.losses import OutputHead

SHORT_CONTEXT = 4096
STEP = 1024
STEPS_OF_SHORT_CONTEXT = 4
"""The step is this fraction of the short context, as in the paper: 1024 for 4096 tokens."""
ALPHA = 2.0
BETA = -2.0


@dataclass(frozen=True)
class KeyTokenRule:
    """Rule that selects the key tokens of a text.

    Attributes:
        length: tokens of a long row, including BOS; longer documents are truncated at the end.
        short_context: minimum number of tokens before a scored token in the short rows, not counting BOS.
        step: scored tokens per short row; the last of them has ``short_context + step - 1`` tokens of context.
        alpha, beta: thresholds in nats on the gain and on the log-probability; see :func:`key_tokens`.

    Raises:
        RopewalkError: if a number is out of range.

    Source: Fang et al., arXiv:2410.23771; the defaults are theirs: context 4096, step 1024, alpha 2 and beta -2.
    """

    length: int
    short_context: int = SHORT_CONTEXT
    step: int = STEP
    alpha: float = ALPHA
    beta: float = BETA

    def __post_init__(self) -> None:
        for name, value in (("short_context", self.short_context), ("step", self.step)):
            if value < 1:
                raise RopewalkError(f"{name} must be 1 or more, got {value}")
        for name, threshold in (("alpha", self.alpha), ("beta", self.beta)):
            if not math.isfinite(threshold):
                raise RopewalkError(f"{name} must be a finite number of nats, got {threshold}")

    @property
    def beginning(self) -> int:
        """Tokens at the beginning of a text without a shorter context to compare with: a short context and a step."""
        return self.short_context + self.step


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A separate model that selects the key tokens.

    Attributes:
        name: name for the record.
        model: a causal decoder.
        head: the output head of ``model``.
        tokenizer: the tokenizer of ``model``, with a ``tokenizers`` backend.
        max_position_embeddings: longest input in tokens that its config states; None if it states none.
    """

    name: str
    model: Any
    head: OutputHead
    tokenizer: Any
    max_position_embeddings: int | None = None


@dataclass(frozen=True, eq=False)
class Reading:
    """A tokenised text with character offsets.

    Attributes:
        input_ids: ``[tokens]``, without special tokens.
        spans: int64 ``[tokens, 2]``, start and end of each token in characters.
    """

    input_ids: Ids
    spans: NDArray[np.int64]


@dataclass(frozen=True)
class KeyTokens:
    """Key tokens of one document and their losses.

    Attributes:
        index: index of the document in the given sequence, from 0.
        tokens: number of key tokens.
        nats: total loss of the model under test on the key tokens.
        compared: number of tokens with less context in the evaluator's short rows than in its long row.
        all_tokens: number of scored tokens of the text.
        all_nats: total loss of the model under test on all scored tokens.
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
        rule: rule that selected the key tokens.
        evaluator: name of the model that selected the key tokens.
        evaluator_tokens: length of the evaluator's longest row, including BOS.
        evaluator_stated: ``max_position_embeddings`` of a separate evaluator; None for the model itself.
        documents: the documents in order, without those that are too short to compare.
        n_short: number of documents that are too short.
        not_finite: indices of documents with a loss that is not finite, in which no key token can be selected.
        perplexity: exp of the mean loss of all key tokens; NaN if there are none or ``not_finite`` is not empty.
        ci95: 95 % interval of the perplexity over documents (Student's, of the mean loss).
    """

    rule: KeyTokenRule
    evaluator: str
    evaluator_tokens: int
    evaluator_stated: int | None
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
        """Share of key tokens among the compared tokens."""
        return self.n_key_tokens / self.n_compared

    @property
    def overall(self) -> float:
        """Perplexity over all tokens of the same texts."""
        nats = math.fsum(each.all_nats for each in self.documents)
        return exp_nats(nats / sum(each.all_tokens for each in self.documents))


def key_tokens(
    long_losses: NDArray[np.float64], short_losses: NDArray[np.float64], alpha: float, beta: float
) -> NDArray[np.bool_]:
    """Select the key tokens.

    Args:
        long_losses: ``[tokens]`` in nats, with the whole text before each token as context.
        short_losses: ``[tokens]`` in nats, with a short context.
        alpha: the long context must reduce the loss by more than this, in nats.
        beta: the log-probability with the long context must be above this, in nats.

    Returns:
        Boolean mask ``[tokens]``.

    Source: Fang et al., arXiv:2410.23771; both inequalities are strict.
    """
    chosen: NDArray[np.bool_] = (short_losses - long_losses > alpha) & (-long_losses > beta)
    return chosen


def read_with_offsets(tokenizer: Any, text: str) -> Reading:
    """Tokenise a text with the character offsets of each token.

    Args:
        tokenizer: a tokenizer with a ``tokenizers`` backend.
        text: the text, without special tokens.

    Raises:
        RopewalkError: if the tokenizer gives no offsets.
    """
    read = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
    )
    offsets = [tuple(each) for each in read["offset_mapping"]]
    if text.strip() and not any(end > start for start, end in offsets):
        raise RopewalkError(
            f"the tokenizer {tokenizer.name_or_path!r} gives no character offsets, which LongPPL needs to map key "
            "tokens between two tokenizers; leave out --evaluator, or use only tokenizers that give offsets"
        )
    spans = np.array(_with_white_space(offsets, text), dtype=np.int64).reshape(-1, 2)
    return Reading(np.array(read["input_ids"], dtype=np.int64), spans)


def _with_white_space(offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Extend offsets by white space that they leave out.

    Each token that is only white space gets one character, and the rest goes to the next token. Complete offsets stay
    unchanged.
    """
    found: list[tuple[int, int]] = []
    end, blank = 0, 0
    # The last entry stands behind the text and collects white space at its end; it is removed below.
    for start, stop in [*offsets, (len(text), len(text) + 1)]:
        if stop <= start:
            blank += 1
            continue
        gap = start - end if text[end:start].isspace() else 0
        for _ in range(blank):
            found.append((end, end + min(gap, 1)))
            end, gap = end + min(gap, 1), max(gap - 1, 0)
        found.append((start - gap, stop))
        end, blank = max(end, stop), 0
    return found[:-1]


def mapped_key_tokens(
    chosen: NDArray[np.bool_], chooser: NDArray[np.int64], spans: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Map key tokens of the evaluator to the model's tokenizer: tokens inside the text of the evaluator's key tokens.

    Args:
        chosen: boolean mask ``[evaluator tokens]`` of the evaluator's key tokens.
        chooser: ``[evaluator tokens, 2]``, character spans of the evaluator's tokens.
        spans: ``[tokens, 2]``, character spans of the model's tokens.

    Returns:
        Boolean mask ``[tokens]``. A token without characters is never a key token.

    Source: PKU-ML/LongPPL, ``merge_intervals`` and ``cal_overlap``.
    """
    size = 1 + max((int(each[:, 1].max()) for each in (chooser, spans) if len(each)), default=0)
    # Interval union by counting: +1 where a chosen span starts, -1 where it ends; covered if the sum is positive.
    edges = np.zeros(size, dtype=np.int64)
    # Not edges[...] += 1, which would count spans that begin at the same character only once.
    np.add.at(edges, chooser[chosen, 0], 1)
    np.add.at(edges, chooser[chosen, 1], -1)
    # before[i] is the number of covered characters before character i.
    before = np.concatenate([[0], np.cumsum(np.cumsum(edges) > 0)])
    width = spans[:, 1] - spans[:, 0]
    inside: NDArray[np.bool_] = (width > 0) & (before[spans[:, 1]] - before[spans[:, 0]] == width)
    return inside


def readings(
    documents: Sequence[Ids], tokenizer: Any, other: Any, room: int
) -> Iterator[tuple[Reading, Reading]]:
    """Tokenise the same texts with the model's and with the evaluator's tokenizer.

    Documents are decoded and tokenised again, as in the authors' code, because truncated or normalised tokens have no
    text of their own.

    Args:
        documents: int ``[tokens]`` each, without special tokens.
        tokenizer: the model's tokenizer, which encoded the documents.
        other: the evaluator's tokenizer.
        room: maximum length of a text in tokens of the model.
    """
    for document in documents:
        ids = document[:room].tolist()
        # Truncation may split a character, which decodes to a replacement character.
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False).rstrip(
            "\ufffd"
        )
        own = read_with_offsets(tokenizer, text)
        # A text may encode to more tokens than the ones that it was decoded from.
        if len(own.input_ids) > room:
            # Cut where the last kept token ends, so that the evaluator reads the same text.
            text = text[: int(own.spans[:room, 1].max(initial=0))]
            own = Reading(own.input_ids[:room], own.spans[:room])
        yield own, read_with_offsets(other, text)


def short_windows(n_tokens: int, short_context: int, step: int) -> Iterator[Window]:
    """Yield the short rows whose context is shorter than the text before the token.

    The first ``short_context + step`` tokens of a text have the same context in short rows as in the long row. They
    need no row, and their difference is zero.

    Example:
        >>> [(w.start, w.first, w.end) for w in short_windows(10, 3, 2)]
        [(2, 5, 7), (4, 7, 9), (6, 9, 10)]
    """
    for start in range(step, n_tokens - short_context, step):
        first = start + short_context
        yield Window(start, first, min(first + step, n_tokens))


def long_perplexity(
    reader: WindowReader,
    documents: Sequence[Ids],
    rule: KeyTokenRule,
    evaluator: Evaluator | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> LongPerplexity:
    """Compute the perplexity of a model on the tokens that need long context.

    Args:
        reader: the model; its training mode is left unchanged.
        documents: int ``[tokens]`` each, without special tokens. Documents of at most ``short_context + step`` tokens
            have nothing to compare; they are skipped and counted.
        rule: rule that selects the key tokens.
        evaluator: model that selects the key tokens; None for the model itself. To compare models, use the same
            evaluator for all. ``short_context`` and ``step`` count its own tokens.
        tokenizer: the model's tokenizer; needed with an evaluator.
        progress: called with the number of completed rows and the total, long and short.

    Returns:
        The contributions of the documents, and their perplexity. It is NaN if there is no key token or a loss is not
        finite; :func:`longppl_task` gives the reason.

    Raises:
        RopewalkError: if no document is long enough, or a tokenizer gives no offsets.
        EngineError: if a model cannot read a sequence in chunks.

    Source: Fang et al., arXiv:2410.23771.
    """
    if evaluator is None:
        check_long_perplexity(documents, reader.bos_id, rule)
        chooser = reader
    else:
        chooser = replace(
            reader, model=evaluator.model, head=evaluator.head, bos_id=evaluator.tokenizer.bos_token_id
        )
    pairs = _pairs(documents, rule.length - reader.special, tokenizer, evaluator)
    # Once, if the model is its own evaluator.
    for each in dict.fromkeys((reader, chooser)):
        each.check()
    texts = {index: pair for index, pair in enumerate(pairs) if len(pair[1].input_ids) > rule.beginning}
    if not texts:
        # As its own evaluator, the model has passed check_long_perplexity above.
        assert evaluator is not None
        raise too_short(evaluator.name, [len(other.input_ids) for _, other in pairs], rule)
    plans = {
        index: list(short_windows(len(other.input_ids), rule.short_context, rule.step))
        for index, (_, other) in texts.items()
    }
    count = _counter(progress, (1 + (evaluator is not None)) * len(texts) + sum(map(len, plans.values())))
    found: list[KeyTokens] = []
    not_finite: list[int] = []
    with evaluating(reader.model), evaluating(chooser.model):
        for index, (own, other) in texts.items():
            losses = longs = _losses(reader, _whole(own, reader), count)
            # As its own evaluator, the model has read the long row already.
            if evaluator is not None:
                longs = _losses(chooser, _whole(other, chooser), count)
            short = _losses(chooser, [(other.input_ids, window) for window in plans[index]], count)
            # The other documents are measured all the same, so that the record has their counts.
            if not all(np.isfinite(each).all() for each in (losses, longs, short)):
                not_finite.append(index)
            chosen = np.zeros(len(other.input_ids), dtype=np.bool_)
            # The short rows score the last tokens; before them both contexts are the same.
            chosen[-len(short) :] = key_tokens(longs[-len(short) :], short, rule.alpha, rule.beta)
            compared = np.arange(len(other.input_ids)) >= len(other.input_ids) - len(short)
            if evaluator is not None:
                # Compared from the same character on, because the two tokenizers have different indices.
                compared = own.spans[:, 0] >= other.spans[-len(short), 0]
                chosen = mapped_key_tokens(chosen, other.spans, own.spans)
            found.append(_document(index, losses, chosen, int(compared.sum())))
    perplexity, ci95 = (math.nan, NO_INTERVAL) if not_finite else _perplexity(found)
    return LongPerplexity(
        rule,
        ITSELF if evaluator is None else evaluator.name,
        max(len(other.input_ids) for _, other in texts.values()) + chooser.special,
        None if evaluator is None else evaluator.max_position_embeddings,
        tuple(found),
        len(documents) - len(texts),
        tuple(not_finite),
        perplexity,
        ci95,
    )


def _whole(reading: Reading, reader: WindowReader) -> list[tuple[Ids, Window]]:
    """Return a text as one window; without BOS, the first token has no context and is not scored."""
    return [(reading.input_ids, Window(0, 1 - reader.special, len(reading.input_ids)))]


def check_long_perplexity(documents: Sequence[Ids], bos_id: int | None, rule: KeyTokenRule) -> None:
    """Raise if no document is long enough for LongPPL with the model as its own evaluator.

    Args:
        documents: int ``[tokens]`` each, without special tokens.
        bos_id: BOS id of the model's tokenizer; None if it has none.
        rule: rule that selects the key tokens.
    """
    room = rule.length - (bos_id is not None)
    if rule.beginning >= room:
        raise RopewalkError(
            f"short_context {rule.short_context} and step {rule.step} leave nothing to compare at a length of "
            f"{rule.length} tokens; short_context plus step must be less than {room}"
        )
    longest = max(map(len, documents), default=0)
    if longest <= rule.beginning:
        raise RopewalkError(
            f"LongPPL needs a document longer than the short context of {rule.short_context} tokens plus the step of "
            f"{rule.step}; the longest of {len(documents)} documents has {longest} tokens"
        )


def too_short(evaluator: str, lengths: Sequence[int], rule: KeyTokenRule) -> RopewalkError:
    """Return the error for texts that are too short for an evaluator.

    Args:
        evaluator: name of the evaluator.
        lengths: length of each text in tokens of the evaluator.
        rule: rule that selects the key tokens.
    """
    return RopewalkError(
        f"LongPPL needs a text of more than {rule.beginning} tokens (short context plus step), counted with the "
        f"tokenizer of the evaluator {evaluator!r}; after truncation to {rule.length} tokens of the model's "
        f"tokenizer, the longest of {len(lengths)} texts has {max(lengths, default=0)}"
    )


def _pairs(
    documents: Sequence[Ids], room: int, tokenizer: Any, evaluator: Evaluator | None
) -> list[tuple[Reading, Reading]]:
    """Return each text as tokenised for the model and the evaluator; without an evaluator, the given tokens twice."""
    if evaluator is None:
        # Only a mapping between two tokenizers needs spans.
        nowhere = np.zeros((0, 2), dtype=np.int64)
        same = (Reading(document[:room], nowhere) for document in documents)
        return [(each, each) for each in same]
    if tokenizer is None:
        raise RopewalkError(
            f"the evaluator {evaluator.name!r} has a tokenizer of its own, so LongPPL needs the model's tokenizer too, "
            "got None; pass tokenizer="
        )
    return list(readings(documents, tokenizer, evaluator.tokenizer, room))


def _counter(progress: Progress | None, total: int) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return count


def _losses(
    reader: WindowReader, windows: Sequence[tuple[Ids, Window]], count: Callable[[], None]
) -> NDArray[np.float64]:
    """Compute the losses of the windows' scored tokens, in the order of the windows."""
    found: dict[int, NDArray[np.float64]] = {}
    for number, losses in reader.losses(windows):
        # The reader yields the longest windows first.
        found[number] = losses
        count()
    return np.concatenate([found[number] for number in range(len(windows))])


def _document(index: int, losses: NDArray[np.float64], chosen: NDArray[np.bool_], compared: int) -> KeyTokens:
    """Sum a document's losses; ``losses`` lacks the first token if that token has no context."""
    key = losses[chosen[len(chosen) - len(losses) :]]
    return KeyTokens(index, len(key), math.fsum(key), compared, len(losses), math.fsum(losses))


def _perplexity(documents: Sequence[KeyTokens]) -> tuple[float, Interval]:
    """Return LongPPL and its interval; NaN without key tokens."""
    totals, counts = [each.nats for each in documents], [each.tokens for each in documents]
    if not sum(counts):
        return math.nan, NO_INTERVAL
    low, high = ratio_interval(totals, counts, at_least=0)
    return exp_nats(math.fsum(totals) / sum(counts)), (exp_nats(low), exp_nats(high))


def longppl_task(result: LongPerplexity) -> TaskResult:
    """Convert the result to a task result; its status is ``not run`` without key tokens or with losses not finite."""
    rule = result.rule
    details: dict[str, Any] = {
        "evaluator": result.evaluator,
        "evaluator_tokens": result.evaluator_tokens,
        "mapping": "tokens" if result.evaluator == ITSELF else "characters",
        "short_context": rule.short_context,
        "step": rule.step,
        "alpha": rule.alpha,
        "beta": rule.beta,
        "n_key_tokens": result.n_key_tokens,
        "n_compared": result.n_compared,
        "n_tokens": sum(each.all_tokens for each in result.documents),
        "share": result.share,
        "perplexity": finite_or_none(result.overall),
        "documents": len(result.documents),
        "documents_short": result.n_short,
        # One less than the length: the first token of a row is not scored.
        "documents_shorter_than_length": sum(d.all_tokens < rule.length - 1 for d in result.documents),
    }
    reason = None
    if result.not_finite:
        reason = f"losses of document {result.not_finite[0]} are not finite, so no key tokens can be selected"
    elif not result.n_key_tokens:
        reason = (
            f"none of {result.n_compared} tokens is a key token: the long context never reduced the loss of "
            f"{result.evaluator} by more than {rule.alpha:g} nats to a log-probability above {rule.beta:g}"
        )
    if reason is not None:
        task = TaskResult.not_run("longppl", "longppl", rule.length, reason, unit="perplexity")
        return replace(task, details=details)
    stated = result.evaluator_stated
    if stated is not None and result.evaluator_tokens > stated:
        reason = (
            f"the evaluator {result.evaluator} read up to {result.evaluator_tokens} tokens, more than the {stated} of "
            "its config"
        )
    holding = [each for each in result.documents if each.tokens]
    return TaskResult(
        suite="longppl",
        task="longppl",
        length=rule.length,
        n=len(holding),
        score=result.perplexity,
        ci95=result.ci95,
        reason=reason,
        details=details,
        unit="perplexity",
        samples=tuple({"index": d.index, "nats": d.nats, "tokens": d.tokens} for d in holding),
    )


def _resolved(value: Any) -> Any:
    """Replace ``embedded`` by the path of the demo model in the package."""
    from ropewalk.data.read.embedded import resolve_model

    return resolve_model(value) if isinstance(value, str) else value


class LongPplSettings(Settings):
    """Settings of LongPPL."""

    short_context: Annotated[Length, WHAT] = Field(
        default=SHORT_CONTEXT,
        ge=STEPS_OF_SHORT_CONTEXT,
        description="Length in tokens of LongPPL's short context. LongPPL counts only key tokens: those that the "
        "model predicts well with the whole text, but not with a sliding window of this length.",
    )
    evaluator: Annotated[str | None, BeforeValidator(_resolved), WHAT, Option(metavar="MODEL")] = Field(
        default=None,
        description="Checkpoint that selects LongPPL's key tokens. It may have another tokenizer than the model. "
        "Default: the model itself.",
    )


def _rule(length: int, given: LikelihoodInput) -> KeyTokenRule:
    short_context = given.settings.of(LongPplSettings).short_context
    return KeyTokenRule(length, short_context, max(1, short_context // STEPS_OF_SHORT_CONTEXT))


def _check(task: str, length: int, given: LikelihoodInput) -> None:
    """Raise if no text is long enough, counted in tokens of the model that selects the key tokens."""
    settings, tokenizer = given.settings.of(LongPplSettings), given.tokenizer
    documents, rule, bos = (
        given.documents[: given.settings.rows],
        _rule(length, given),
        tokenizer.bos_token_id,
    )
    if settings.evaluator is None:
        check_long_perplexity(documents, bos, rule)
        return
    from ropewalk.data import load_tokenizer

    read = readings(documents, tokenizer, load_tokenizer(settings.evaluator), length - (bos is not None))
    lengths = [len(other.input_ids) for _, other in read]
    if max(lengths, default=0) <= rule.beginning:
        raise too_short(settings.evaluator, lengths, rule)


def _measure(task: str, length: int, given: LikelihoodInput, progress: Progress | None) -> TaskResult:
    settings, under_test = given.settings.of(LongPplSettings), given.under_test
    measured = long_perplexity(
        under_test.window_reader(length),
        given.documents[: given.settings.rows],
        _rule(length, given),
        _evaluator(settings.evaluator, under_test.model),
        given.tokenizer,
        progress,
    )
    return with_digest_of_text(longppl_task(measured), given, length)


def _evaluator(path: str | None, model: Any) -> Evaluator | None:
    """Load the evaluator in the dtype and on the device of the model under test."""
    if path is None:
        return None
    from ropewalk.data import load_tokenizer
    from ropewalk.models.compute.losses import OutputHead
    from ropewalk.models.config.model import ModelConfig
    from ropewalk.models.load import load_model

    loaded = load_model(path, dtype=model.dtype, device=model.device)
    stated = ModelConfig.of(loaded.config)
    tokenizer = load_tokenizer(path, stated.vocab_size)
    return Evaluator(path, loaded, OutputHead.of(loaded), tokenizer, stated.max_position_embeddings)


SUITE = LikelihoodSuite(
    name="longppl",
    settings={"longppl": LongPplSettings},
    tasks=("longppl",),
    check=_check,
    measure=_measure,
)
