"""Choose which documents to read, how often and in which order, from their lengths and sources alone.

Upsampling long documents within each source is "per-source length upsampling" (Fu et al.,
arXiv:2402.10171). Its published mix moves the sources' shares of tokens somewhat (C4 26.50 to 19.53 %,
CommonCrawl 53.42 to 58.14 %, StackExchange 3.18 to 1.64 %); here ``per="source"`` keeps each share, and
``per="corpus"`` draws by length alone, so that the shares follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ropewalk.data.mixture.report import (
    MixtureReport,
    Request,
    TotalFrom,
    either,
    lengths_in_words,
    report_on,
)
from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import counted

# Third word of the seed: keeps this random stream apart from other uses of the same seed.
_SUBSETS, _ORDER = 0x6D697831, 0x6D697832
# Some units in the last place of numbers up to 10,000, so that 0.4 is not rounded up to 0.4001.
_NOISE = 1e-11


@dataclass(frozen=True, eq=False)
class Mixture:
    """Documents in reading order.

    Attributes:
        documents: int64, indices into the lengths; a repeated document appears several times.
        report: the achieved mixture compared with the requested one.
    """

    documents: NDArray[np.int64]
    report: MixtureReport


@dataclass(frozen=True, eq=False)
class Demand:
    """Tokens requested from each group; a group is a source, or the whole corpus.

    Attributes:
        sources: the groups' names; None for the corpus.
        documents, pool: int64 ``[groups, bins]``, available documents and their tokens.
        budgets: float64 ``[groups]``, tokens requested from each group.
        wanted: float64 ``[groups, bins]``, tokens requested from each bin.
        requested: the same, rounded to whole tokens.
        limits: float64 ``[groups, bins]``, most whole tokens that each bin may provide; 0 if it has no documents.
    """

    sources: tuple[str, ...] | None
    documents: NDArray[np.int64]
    pool: NDArray[np.int64]
    budgets: NDArray[np.float64]
    wanted: NDArray[np.float64]
    requested: NDArray[np.float64]
    limits: NDArray[np.float64]

    def name(self, group: int) -> str:
        """The group's name for use in a sentence."""
        return "the corpus" if self.sources is None else f"source {self.sources[group]!r}"


def mix(
    lengths: NDArray[np.int64],
    source_ids: NDArray[np.int32],
    sources: Sequence[str],
    settings: MixtureSettings,
) -> Mixture:
    """Choose documents and their order.

    A cell is the set of documents of one source and one length bin. If ``e`` epochs are requested from a cell
    (requested over available tokens), each document is drawn ``floor(e)`` times. The fractional part comes from
    the first documents of a random permutation, up to the document that brings the total nearest to the request.
    No document is drawn more than ``ceil(e)`` times. The difference is carried to the next shorter cell of the
    same source (of the corpus with ``per="corpus"``). Requested tokens are rounded to a whole number.

    Args:
        lengths: int64 ``[n]``, own tokens of each candidate. An empty document is never drawn, except by a mixture
            that keeps the corpus unchanged.
        source_ids: int32 ``[n]``, index of each candidate's source in ``sources``.
        sources: unique source names.
        settings: the requested mixture.

    Raises:
        RopewalkError: if the arguments are inconsistent, a source is unknown or missing, a requested bin has no
            documents, or a bin would exceed ``max_epochs``; with ``shortage="cap"`` only if every requested bin is
            empty.
    """
    _check_candidates(lengths, source_ids, sources)
    starts = settings.starts
    shape = (len(sources), len(starts))
    # Empty documents get a cell of their own behind the last, which [:-1] leaves out of every sum.
    cells = _cells(lengths, source_ids, starts, shape[0] * shape[1])
    # Sums in float64 are exact up to 2**53 tokens.
    available = np.bincount(cells, lengths, shape[0] * shape[1] + 1)[:-1].astype(np.int64).reshape(shape)
    if settings.as_is:
        tokens = int(available.sum())
        request = Request(
            sources=tuple(sources),
            starts=starts,
            asked=available,
            by_length=available.sum(0),
            total=tokens,
            total_from="corpus",
            by_source=False,
            lengths_by_source=False,
            as_is=True,
        )
        # In the order of the corpus: nothing is drawn, so nothing needs a seed.
        documents = np.arange(len(lengths))
    else:
        documents_of = np.bincount(cells, minlength=available.size + 1)[:-1].reshape(shape)
        request, capped = _plan(available, documents_of, sources, settings)
        units, pool = cells, available
        if settings.per == "corpus":
            # The bin alone, without the source; empty documents keep a number behind the last.
            units = np.where(cells < available.size, cells % shape[1], shape[1])
            pool = available.sum(0, keepdims=True)
        sampled = _draw(lengths, units, pool, capped, settings.seed)
        # Sorting by raw Philox words instead of Generator.permutation: numpy guarantees the words never to change, and
        # so the order stays the same with any version of numpy.
        documents = sampled[np.argsort(_words(settings.seed, 0, _ORDER, len(sampled)), kind="stable")]
    return Mixture(documents, report_on(documents, lengths, cells, request))


def _cells(
    lengths: NDArray[np.int64], source_ids: NDArray[np.int32], starts: Sequence[int], count: int
) -> NDArray[np.integer]:
    """``source * bins + bin`` of each candidate; ``count``, the number of cells, for one without a token."""
    bins = np.searchsorted(np.array(starts), lengths, side="right") - 1
    # The smallest type, as numpy sorts 16 bits by radix.
    return np.where(lengths > 0, source_ids.astype(np.int64) * len(starts) + bins, count).astype(
        np.min_scalar_type(count)
    )


def _plan(
    available: NDArray[np.int64],
    documents: NDArray[np.int64],
    sources: Sequence[str],
    settings: MixtureSettings,
) -> tuple[Request, NDArray[np.int64]]:
    """The request, and the tokens to draw, capped: int64 ``[groups, bins]``, a group a source or the corpus."""
    if not available.any():
        raise RopewalkError("every document is empty; a mixture needs at least one token")
    demand = _demand(available, documents, sources, settings)
    requested = demand.requested
    excessive = np.argwhere(requested > demand.limits)
    capped = np.minimum(requested, demand.limits)
    if len(excessive):
        if settings.shortage == "refuse":
            fits = partial(_fits, available, documents, sources, settings)
            raise RopewalkError(_refusal(demand, settings, fits))
        if not capped.any():
            raise RopewalkError(
                f"none of the {round(float(demand.budgets.sum())):,} requested tokens are available, because no "
                "document has a requested length; change long_from or length_shares"
            )
    corpus = demand.sources is None
    request = Request(
        sources=tuple(sources),
        starts=settings.starts,
        # A request to the whole corpus is divided among sources in proportion to their available tokens.
        asked=np.rint(requested / np.maximum(demand.pool, 1) * available if corpus else requested).astype(
            np.int64
        ),
        by_length=requested.sum(0).astype(np.int64),
        total=round(float(demand.budgets.sum())),
        total_from=_total_from(settings),
        by_source=settings.asks and not corpus,
        lengths_by_source=not corpus,
        shortages=tuple(_shortage(demand, settings, group, b) for group, b in excessive),
    )
    return request, capped.astype(np.int64)


def _demand(
    available: NDArray[np.int64],
    documents: NDArray[np.int64],
    sources: Sequence[str],
    settings: MixtureSettings,
) -> Demand:
    corpus = settings.per == "corpus"
    pool = available.sum(0, keepdims=True) if corpus else available
    budgets = _budgets(pool.sum(1), sources, settings)
    wanted = budgets[:, None] * _length_targets(pool, settings)
    return Demand(
        sources=None if corpus else tuple(sources),
        documents=documents.sum(0, keepdims=True) if corpus else documents,
        pool=pool,
        budgets=budgets,
        wanted=wanted,
        requested=np.rint(wanted),
        # Rounded up: float64 rounding noise in the request must not cause a refusal.
        limits=np.ceil(settings.max_epochs * pool),
    )


def _fits(
    available: NDArray[np.int64],
    documents: NDArray[np.int64],
    sources: Sequence[str],
    settings: MixtureSettings,
    change: Mapping[str, Any],
) -> bool:
    """Whether the corpus can provide the mixture after a change of settings that keeps the bins."""
    try:
        changed = MixtureSettings(**{**dict(settings), **change})
        demand = _demand(available, documents, sources, changed)
    except (RopewalkError, ValidationError):
        # The changed setting is out of range or conflicts with another one.
        return False
    if changed.shortage == "cap":
        return bool(np.minimum(demand.requested, demand.limits).any())
    return not (demand.requested > demand.limits).any()


def _total_from(settings: MixtureSettings) -> TotalFrom:
    if settings.tokens is not None:
        return "tokens"
    if settings.shares is not None:
        return "shares"
    return "corpus" if settings.weights is None else "weights"


def _budgets(
    tokens: NDArray[np.int64], sources: Sequence[str], settings: MixtureSettings
) -> NDArray[np.float64]:
    """Tokens requested from each group, which has ``tokens`` available; float64, not yet rounded."""
    for name, named in (("weights", settings.weights), ("shares", settings.shares)):
        unknown = sorted(set(named or ()) - set(sources))
        if unknown:
            raise RopewalkError(
                f"unknown source {unknown[0]!r} in {name}; the sources are {', '.join(sources)}"
            )
    if settings.shares is not None:
        return _budgets_of_shares(tokens, sources, settings.shares, settings.tokens)
    proportions = tokens.astype(np.float64)
    if settings.weights is not None:
        proportions *= [settings.weights.get(source, 1.0) for source in sources]
        if not proportions.any():
            raise RopewalkError(
                f"weights {settings.weights} select no tokens; give a non-empty source a weight above 0"
            )
    return proportions if settings.tokens is None else proportions * settings.tokens / proportions.sum()


def _budgets_of_shares(
    tokens: NDArray[np.int64], sources: Sequence[str], named: Mapping[str, float], total: int | None
) -> NDArray[np.float64]:
    missing = [source for source in sources if source not in named]
    if missing:
        raise RopewalkError(
            f"source {missing[0]!r} is missing in shares; give each of the sources {', '.join(sources)} a share (0 "
            "excludes a source)"
        )
    shares = np.array([named[source] for source in sources])
    shares /= shares.sum()
    for source, share, available in zip(sources, shares, tokens, strict=True):
        if share > 0 and available == 0:
            raise RopewalkError(
                f"source {source!r} has no tokens for its share of {share:.4g}; set its share to 0"
            )
    # The source that is scarcest relative to its share limits the total, so that no source has to repeat tokens.
    if total is None:
        taken = shares > 0
        return shares * float(np.min(tokens[taken] / shares[taken]))
    return shares * total


def _length_targets(pool: NDArray[np.int64], settings: MixtureSettings) -> NDArray[np.float64]:
    """Each bin's share of its group's tokens; float64, ``[groups, bins]``, or ``[bins]`` if all groups agree."""
    if settings.length_shares is not None:
        shares = np.array([share for _, share in settings.length_shares])
        shares /= shares.sum()
    elif settings.long_share is not None:
        shares = np.array([1 - settings.long_share, settings.long_share])
    elif settings.long_factor is not None:
        sampled = pool * np.array([1.0, settings.long_factor])
        # An empty group has no budget, so its shares do not matter; avoid dividing 0 by 0.
        shares = sampled / np.where(sampled.any(1), sampled.sum(1), 1.0)[:, None]
    else:
        shares = np.ones(1)
    return shares


def _draw(
    lengths: NDArray[np.int64],
    units: NDArray[np.integer],
    pool: NDArray[np.int64],
    wanted: NDArray[np.int64],
    seed: int,
) -> NDArray[np.int64]:
    """Draw documents whose tokens add up to ``wanted``; the caller shuffles the result.

    Args:
        lengths: int64 ``[n]``, tokens of each candidate.
        units: ``[n]``, ``group * bins + bin`` of each candidate; a larger number marks one never to draw.
        pool, wanted: int64 ``[groups, bins]``, available tokens and tokens to draw.
        seed: seed of the random permutations.
    """
    groups, bins = pool.shape
    # One sort for all cells, so that the work does not grow with their number.
    order = np.argsort(units, kind="stable")
    sizes = np.bincount(units, minlength=pool.size)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    sampled = [np.zeros(0, np.int64)]
    for group in range(groups):
        carried = 0
        # From the longest bin down: long documents miss a request by the most tokens, and shorter ones make up for it.
        for b in reversed(range(bins)):
            unit, tokens, available = group * bins + b, int(wanted[group, b]), int(pool[group, b])
            if tokens == 0:
                continue
            # A cell with tokens to draw has documents: the limits are 0 for an empty one.
            most = -(-tokens // available)
            # Even with tokens carried over, no document may be read more often than its own cell requests.
            goal = min(max(tokens + carried, 0), most * available)
            members = order[starts[unit] : ends[unit]]
            picked = _draw_cell(members, lengths, goal, available, seed, unit)
            carried += tokens - int(lengths[picked].sum())
            sampled.append(picked)
    return np.concatenate(sampled)


def _draw_cell(
    members: NDArray[np.int64], lengths: NDArray[np.int64], goal: int, available: int, seed: int, unit: int
) -> NDArray[np.int64]:
    """Whole copies of ``members`` (``available`` tokens) and a random subset, as near ``goal`` tokens as possible."""
    # Whole readings of the cell first, so that numbers of readings within a cell differ by one at most.
    copies, rest = divmod(goal, available)
    whole = np.tile(members, copies)
    if rest == 0:
        return whole
    shuffled = members[np.argsort(_words(seed, unit, _SUBSETS, len(members)), kind="stable")]
    running = np.cumsum(lengths[shuffled])
    # The first document that reaches the rest; leave it out if stopping before it is at least as close.
    last = int(np.searchsorted(running, rest))
    below = int(running[last - 1]) if last else 0
    taken = last + (int(running[last]) - rest < rest - below)
    return np.concatenate([whole, shuffled[:taken]])


def _words(seed: int, unit: int, purpose: int, count: int) -> NDArray[np.uint64]:
    return np.random.Philox(np.random.SeedSequence([seed, unit, purpose])).random_raw(count)


def _check_candidates(
    lengths: NDArray[np.int64], source_ids: NDArray[np.int32], sources: Sequence[str]
) -> None:
    if lengths.ndim != 1 or lengths.shape != source_ids.shape:
        raise RopewalkError(
            f"lengths and source_ids must be 1-dimensional and equally long, got shapes {lengths.shape} and "
            f"{source_ids.shape}"
        )
    if len(set(sources)) != len(sources):
        raise RopewalkError(f"source names must be unique, got {', '.join(sources)}")
    if not len(lengths):
        return
    if lengths.min() < 0:
        raise RopewalkError(f"lengths must be 0 or more, got {lengths.min()}")
    for extreme in (source_ids.min(), source_ids.max()):
        if not 0 <= extreme < len(sources):
            raise RopewalkError(
                f"source ids must be from 0 to {len(sources) - 1}, because the number of sources is {len(sources)}, "
                f"got {extreme}"
            )


def _shortage(demand: Demand, settings: MixtureSettings, group: int, b: int) -> str:
    """A sentence that reports the tokens missing from a cell that is empty or was capped at ``max_epochs``."""
    if not demand.pool[group, b]:
        nothing = _nothing(demand, settings, group, b)
        return f"{nothing[0].upper()}{nothing[1:]}; these tokens are missing."
    missing = round(float(demand.wanted[group, b]) - settings.max_epochs * int(demand.pool[group, b]))
    excess = _excess(demand, settings, group, b)
    times = "once" if settings.max_epochs == 1 else f"{settings.max_epochs:g} times"
    return (
        f"{excess[0].upper()}{excess[1:]}; the documents are read {times}, and about "
        f"{counted(missing, 'token')} are missing."
    )


def _refusal(demand: Demand, settings: MixtureSettings, fits: Callable[[Mapping[str, Any]], bool]) -> str:
    """Explain why the corpus cannot provide the mixture, and suggest settings that it can provide.

    The message is about the first empty cell, or if none is empty, the cell that would repeat most.

    Args:
        demand: the requested tokens, more than are available.
        settings: the requested settings.
        fits: whether the corpus can provide the mixture after a change of settings.
    """
    empty = np.argwhere((demand.requested > 0) & (demand.pool == 0)).tolist()
    if empty:
        group, b = empty[0]
        reason, changes = _nothing(demand, settings, group, b), _instead_of_nothing(demand, settings, b)
    else:
        epochs = demand.wanted / np.maximum(demand.pool, 1)
        group, b = (int(index) for index in np.unravel_index(int(epochs.argmax()), epochs.shape))
        reason = _excess(demand, settings, group, b)
        # The whole request shrinks in proportion, until this cell is read max_epochs times.
        total = math.floor(float(demand.budgets.sum()) * settings.max_epochs / float(epochs[group, b]))
        least = _rounded_up(float(epochs[group, b]))
        changes = {
            f"set the mixture's tokens (--total-tokens) to {total} or less": {"tokens": total},
            f"raise max_epochs (--max-epochs) to {least} or more": {"max_epochs": float(least)},
        }
    changes["set shortage (--shortage) to cap and use only the available tokens"] = {"shortage": "cap"}
    # Each suggestion is tried on the same corpus, so that following one never leads to the next refusal.
    possible = [words for words, change in changes.items() if fits(change)]
    if not possible:
        return f"{reason}; change long_from or length_shares"
    return f"{reason}; {either(possible)}"


def _instead_of_nothing(demand: Demand, settings: MixtureSettings, b: int) -> dict[str, dict[str, Any]]:
    """Setting changes that may help if a group has no document in bin ``b``, by their description."""
    changes: dict[str, dict[str, Any]] = {}
    if settings.length_shares is not None:
        others = [
            (start, 0.0 if i == b else share) for i, (start, share) in enumerate(settings.length_shares)
        ]
        changes["set the share of these lengths in length_shares to 0"] = {"length_shares": others}
    if settings.long_share is not None:
        as_they_are = {"long_share": None, "long_factor": 1}
        changes[
            "set long_factor instead of long_share (long_factor does not require long documents in every source)"
        ] = as_they_are
    if settings.per == "source" and bool(demand.pool[:, b].any()):
        changes["set per (--per) to corpus to request the lengths from all sources together"] = {
            "per": "corpus"
        }
    return changes


def _nothing(demand: Demand, settings: MixtureSettings, group: int, b: int) -> str:
    return (
        f"{demand.name(group)} has no document{_bin_in_words(settings, b)}, but the mixture requests "
        f"{counted(round(float(demand.wanted[group, b])), 'token')} from such documents"
    )


def _excess(demand: Demand, settings: MixtureSettings, group: int, b: int) -> str:
    wanted, available = float(demand.wanted[group, b]), int(demand.pool[group, b])
    return (
        f"{demand.name(group)} has {counted(available, 'token')} in "
        f"{counted(int(demand.documents[group, b]), 'document')}{_bin_in_words(settings, b)}, but the mixture "
        f"requests {counted(round(wanted), 'token')}: {_rounded_up(wanted / available)} epochs on average, more than "
        f"max_epochs {settings.max_epochs:g}"
    )


def _bin_in_words(settings: MixtureSettings, b: int) -> str:
    starts = settings.starts
    return lengths_in_words(starts[b], starts[b + 1] if b + 1 < len(starts) else None)


def _rounded_up(value: float) -> str:
    """Four significant digits, rounded up so that the number remains a valid bound despite float64 noise."""
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale - _NOISE) / scale:.15g}"
