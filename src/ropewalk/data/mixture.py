"""The mixture: which documents are read, how often and in which order; from lengths and sources alone.

Upsampling long documents inside each source is UpSampledMix, "per-source length upsampling" (Fu et al.,
arXiv:2402.10171). Its published mix moves the sources' shares of tokens somewhat (C4 26.50 to 19.53 %,
CommonCrawl 53.42 to 58.14 %, StackExchange 3.18 to 1.64 %); here ``per="source"`` keeps each share, and
``per="corpus"`` draws by length alone, so that the shares follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture_report import (
    Cell,
    Demand,
    MixtureReport,
    Proportions,
    Request,
    explain,
    refusal_of_empty,
    refusal_of_excess,
    report_on,
    shortage,
)
from ropewalk.errors import RopewalkError

__all__ = ["Cell", "Mixture", "MixtureReport", "MixtureSettings", "Proportions", "explain", "mix"]

Per = Literal["source", "corpus"]
Shortage = Literal["refuse", "cap"]
PERS: tuple[Per, ...] = get_args(Per)
SHORTAGES: tuple[Shortage, ...] = get_args(Shortage)
# Third word of the seed, so that no other use of the same seed meets the same random words.
_SUBSETS, _ORDER = 0x6D697831, 0x6D697832
# Far beyond any use, and small enough that no product of two leaves the range of float64 or int64.
_MOST_TOKENS, _MOST_WEIGHT, _MOST_EPOCHS = 10**18, 1e6, 1e6


@dataclass(frozen=True)
class MixtureSettings:
    """What a mixture is to be; the defaults read every document once, in the order of the corpus.

    Tokens are documents' own tokens, without BOS, EOS or tag. Give one of ``weights`` and ``shares``, and
    one of ``long_factor``, ``long_share`` and ``length_shares``, at most.

    Attributes:
        weights: how many times each source's documents are read on average: 2 reads each twice, 0.5 half of
            them, 0 none. A source that is not named has 1.
        shares: share of the tokens by source; they are normalised to sum to 1, so 3 and 1 are 0.75 and 0.25.
            Every source must be named; 0 leaves one out.
        tokens: tokens that the mixture is to have. None: with weights, what they give; with shares, the
            most for which no source has to give more than its own tokens; otherwise as many as there are.
        long_from: tokens; a document of this many or more is long.
        long_factor: a long document is drawn this many times as often as a short one of its source. A source
            of long or of short documents alone stays as it is.
        long_share: share of each source's tokens that lie in long documents, between 0 and 1.
        length_shares: bins of lengths in ascending order, each its first length (0 for the first bin) and its
            share of the tokens; the shares are normalised to sum to 1.
        per: whether lengths are upsampled inside each ``source``, which keeps the sources' shares, or over
            the ``corpus``: in a bin every document is as likely whatever its source, and the shares follow.
            A corpus takes neither weights nor shares.
        max_epochs: no source's documents of one bin are asked for more than this many times on average, so
            that no document is read more than this number, rounded up to a whole one. Up to 4 epochs cost
            little against new data (Muennighoff et al., arXiv:2305.16264).
        shortage: where ``max_epochs`` would be passed: ``refuse``, or ``cap``, which reads these documents
            ``max_epochs`` times; the tokens then missing are not made up from others.
        shuffle: with none of the above, read every document of a token or more once, in random order; any
            other mixture is in random order anyway.
        seed: 0 or more, of the choice and the order.

    Raises:
        RopewalkError: if a value is out of range or two contradict each other.
    """

    weights: Mapping[str, float] | None = None
    shares: Mapping[str, float] | None = None
    tokens: int | None = None
    long_from: int | None = None
    long_factor: float | None = None
    long_share: float | None = None
    length_shares: tuple[tuple[int, float], ...] | None = None
    per: Per = "source"
    max_epochs: float = 4.0
    shortage: Shortage = "refuse"
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("weights", "shares"):
            if (values := getattr(self, name)) is not None:
                checked = {str(key): _number(f"{name} of {key!r}", value) for key, value in values.items()}
                object.__setattr__(self, name, checked)
        if self.shares is not None and not any(self.shares.values()):
            raise RopewalkError(f"shares must hold one above 0, got {dict(self.shares)}")
        for name, number in (("tokens", self.tokens), ("long_from", self.long_from)):
            if number is not None:
                object.__setattr__(self, name, _whole(name, number, 1))
        object.__setattr__(self, "max_epochs", _number("max_epochs", self.max_epochs, 1, _MOST_EPOCHS))
        object.__setattr__(self, "seed", _whole("seed", self.seed, 0))
        if self.per not in PERS:
            raise RopewalkError(f"unknown per {self.per!r}; choose one of {', '.join(PERS)}")
        if self.shortage not in SHORTAGES:
            raise RopewalkError(f"unknown shortage {self.shortage!r}; choose one of {', '.join(SHORTAGES)}")
        self._check_lengths()
        self._check_together()

    def _check_lengths(self) -> None:
        if self.long_factor is not None:
            factor = _number("long_factor", self.long_factor)
            if factor == 0:
                raise RopewalkError("long_factor must be above 0, got 0")
            object.__setattr__(self, "long_factor", factor)
        if self.long_share is not None:
            share = _number("long_share", self.long_share, 0, 1)
            if share in (0, 1):
                raise RopewalkError(f"long_share must lie between 0 and 1 and be neither, got {share:g}")
            object.__setattr__(self, "long_share", share)
        if self.length_shares is not None:
            object.__setattr__(self, "length_shares", _checked_bins(self.length_shares))

    def _check_together(self) -> None:
        if self.weights is not None and self.shares is not None:
            raise RopewalkError(f"give weights or shares, not both (got {self.weights} and {self.shares})")
        lengths = {name: getattr(self, name) for name in ("long_factor", "long_share", "length_shares")}
        given = {name: value for name, value in lengths.items() if value is not None}
        if len(given) > 1:
            raise RopewalkError(
                f"give one of long_factor, long_share and length_shares, got {' and '.join(given)}"
            )
        if (self.long_from is None) != (self.long_factor is None and self.long_share is None):
            raise RopewalkError(
                "long_from goes with one of long_factor and long_share, and they with it; "
                f"got long_from {self.long_from}, long_factor {self.long_factor} and long_share {self.long_share}"
            )
        for name in ("weights", "shares"):
            if self.per == "corpus" and (values := getattr(self, name)) is not None:
                raise RopewalkError(
                    f"per corpus takes no {name}, as shares follow there; got {name} {values}"
                )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MixtureSettings:
        """The settings that ``dataclasses.asdict`` made ``values`` of, be it by way of JSON."""
        return cls(**values)

    @property
    def as_is(self) -> bool:
        """Whether nothing is asked for, not even another order."""
        return not (self.asks or self.shuffle)

    @property
    def asks(self) -> bool:
        """Whether anything but another order is asked for."""
        return len(self.starts) > 1 or any(
            value is not None for value in (self.weights, self.shares, self.tokens, self.length_shares)
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first length of each bin; one bin, from 0, where no length is asked for."""
        if self.length_shares is not None:
            return tuple(start for start, _ in self.length_shares)
        return (0,) if self.long_from is None else (0, self.long_from)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Documents in reading order.

    Attributes:
        documents: int64, indices into the lengths; a repeated document's index comes several times.
        report: what it consists of, beside what was asked for.
    """

    documents: NDArray[np.int64]
    report: MixtureReport


def mix(
    lengths: NDArray[np.int64],
    source_ids: NDArray[np.int32],
    sources: Sequence[str],
    settings: MixtureSettings,
) -> Mixture:
    """Choose documents and their order.

    The documents of one source and one bin of lengths are a cell. A cell that is asked for ``e`` epochs (its
    tokens asked over its tokens available) gives ``floor(e)`` whole copies, and for the fraction those that
    come first in a random permutation, up to the document at which the tokens are nearest to those wanted;
    none is drawn more than ``ceil(e)`` times. What a cell misses by is carried to the next shorter one of its
    source (of the corpus, with ``per="corpus"``). Tokens asked of a cell are rounded to a whole number.

    Args:
        lengths: int64 ``[n]``, own tokens of each candidate. A document without a token is never drawn,
            except that a mixture as is hands it on.
        source_ids: int32 ``[n]``, index of each candidate's source in ``sources``.
        sources: the names, each once.
        settings: what is asked for.

    Raises:
        RopewalkError: if the arguments do not fit each other, a source is unknown or not named, documents
            are asked for that there are none of, or more often than ``max_epochs``.
    """
    _check_candidates(lengths, source_ids, sources)
    starts = settings.starts
    shape = (len(sources), len(starts))
    cells = _cells(lengths, source_ids, starts, shape[0] * shape[1])
    # Sums in float64 are exact up to 2**53 tokens.
    available = np.bincount(cells, lengths, shape[0] * shape[1] + 1)[:-1].astype(np.int64).reshape(shape)
    if settings.as_is:
        request = Request(available, int(available.sum()), False, False, ())
        documents = np.arange(len(lengths))
    else:
        documents_of = np.bincount(cells, minlength=available.size + 1)[:-1].reshape(shape)
        request, capped = _plan(available, documents_of, sources, settings)
        units, pool = cells, available
        if settings.per == "corpus":
            units = np.where(cells < available.size, cells % shape[1], shape[1])
            pool = available.sum(0, keepdims=True)
        drawn = _draw(lengths, units, pool, capped, settings.seed)
        documents = drawn[np.argsort(_words(settings.seed, 0, _ORDER, len(drawn)), kind="stable")]
    return Mixture(documents, report_on(documents, lengths, cells, sources, starts, request, settings.as_is))


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
        raise RopewalkError("no document has a token, and a mixture needs one at least")
    corpus = settings.per == "corpus"
    pool = available.sum(0, keepdims=True) if corpus else available
    budgets = _budgets(pool.sum(1), sources, settings)
    wanted = budgets[:, None] * _length_targets(pool, settings)
    demand = Demand(
        sources=None if corpus else tuple(sources),
        documents=documents.sum(0, keepdims=True) if corpus else documents,
        pool=pool,
        budgets=budgets,
        wanted=wanted,
    )
    asked = np.rint(wanted)
    for group, b in np.argwhere((asked > 0) & (pool == 0)):
        raise RopewalkError(refusal_of_empty(demand, settings, group, b))
    # Rounded up, so that a float's last digit never decides; whole epochs stay exact.
    limits = np.ceil(settings.max_epochs * pool)
    excessive = asked > limits
    if excessive.any() and settings.shortage == "refuse":
        raise RopewalkError(refusal_of_excess(demand, settings))
    request = Request(
        # An empty pool has been asked for nothing.
        asked=np.rint(asked / np.maximum(pool, 1) * available if corpus else asked).astype(np.int64),
        total=round(float(budgets.sum())),
        by_source=settings.asks and not corpus,
        lengths_by_source=not corpus,
        shortages=tuple(shortage(demand, settings, group, b) for group, b in np.argwhere(excessive)),
    )
    return request, np.minimum(asked, limits).astype(np.int64)


def _budgets(
    tokens: NDArray[np.int64], sources: Sequence[str], settings: MixtureSettings
) -> NDArray[np.float64]:
    """Tokens asked of each group, of which it has ``tokens``; float64, not yet whole."""
    for name, named in (("weights", settings.weights), ("shares", settings.shares)):
        unknown = sorted(set(named or ()) - set(sources))
        if unknown:
            raise RopewalkError(
                f"{name} name an unknown source {unknown[0]!r}; there are {', '.join(sources)}"
            )
    if settings.shares is not None:
        return _budgets_of_shares(tokens, sources, settings.shares, settings.tokens)
    proportions = tokens.astype(np.float64)
    if settings.weights is not None:
        proportions *= [settings.weights.get(source, 1.0) for source in sources]
        if not proportions.any():
            raise RopewalkError(
                f"weights {settings.weights} leave no token; give a source with tokens one above 0"
            )
    return proportions if settings.tokens is None else proportions * settings.tokens / proportions.sum()


def _budgets_of_shares(
    tokens: NDArray[np.int64], sources: Sequence[str], named: Mapping[str, float], total: int | None
) -> NDArray[np.float64]:
    missing = [source for source in sources if source not in named]
    if missing:
        raise RopewalkError(
            f"shares leave out source {missing[0]!r}; name every source ({', '.join(sources)}); give 0 to leave one out"
        )
    shares = np.array([named[source] for source in sources])
    shares /= shares.sum()
    for source, share, there in zip(sources, shares, tokens, strict=True):
        if share > 0 and there == 0:
            raise RopewalkError(
                f"source {source!r} has no token to make up a share of {share:.4g}; give it 0"
            )
    if total is None:
        taken = shares > 0
        return shares * float(np.min(tokens[taken] / shares[taken]))
    return shares * total


def _length_targets(pool: NDArray[np.int64], settings: MixtureSettings) -> NDArray[np.float64]:
    """The share of each bin in its group's tokens, float64, ``[groups, bins]`` or ``[bins]`` for all alike."""
    if settings.length_shares is not None:
        shares = np.array([share for _, share in settings.length_shares])
        shares /= shares.sum()
    elif settings.long_share is not None:
        shares = np.array([1 - settings.long_share, settings.long_share])
    elif settings.long_factor is not None:
        drawn = pool * np.array([1.0, settings.long_factor])
        # A group without a token has no budget either, and any shares will do.
        shares = drawn / np.where(drawn.any(1), drawn.sum(1), 1.0)[:, None]
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
    """Documents whose tokens make up ``wanted``, in no order that matters.

    Args:
        lengths: int64 ``[n]``.
        units: ``[n]``, ``group * bins + bin`` of each candidate, a greater one where it is never drawn.
        pool, wanted: int64 ``[groups, bins]``, tokens that there are and tokens to draw.
        seed: of the random permutations.
    """
    groups, bins = pool.shape
    order = np.argsort(units, kind="stable")
    sizes = np.bincount(units, minlength=pool.size)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    drawn = [np.zeros(0, np.int64)]
    for group in range(groups):
        carried = 0
        for b in reversed(range(bins)):
            unit, tokens, there = group * bins + b, int(wanted[group, b]), int(pool[group, b])
            if tokens == 0:
                continue
            most = -(-tokens // there)
            goal = min(max(tokens + carried, 0), most * there)
            members = order[starts[unit] : ends[unit]]
            picked = _draw_cell(members, lengths, goal, there, seed, unit)
            carried += tokens - int(lengths[picked].sum())
            drawn.append(picked)
    return np.concatenate(drawn)


def _draw_cell(
    members: NDArray[np.int64], lengths: NDArray[np.int64], goal: int, there: int, seed: int, unit: int
) -> NDArray[np.int64]:
    """Whole copies of ``members``, which hold ``there`` tokens, and a random few: ``goal`` tokens, or nearest."""
    copies, rest = divmod(goal, there)
    whole = np.tile(members, copies)
    if rest == 0:
        return whole
    shuffled = members[np.argsort(_words(seed, unit, _SUBSETS, len(members)), kind="stable")]
    running = np.cumsum(lengths[shuffled])
    # The first that reaches the rest; it stays out where the tokens before it are as near.
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
            f"lengths and source ids must be two lists of one length, got shapes {lengths.shape} and {source_ids.shape}"
        )
    if len(set(sources)) != len(sources):
        raise RopewalkError(f"each source must be named once, got {', '.join(sources)}")
    if not len(lengths):
        return
    if lengths.min() < 0:
        raise RopewalkError(f"lengths must be 0 or more, got {lengths.min()}")
    for extreme in (source_ids.min(), source_ids.max()):
        if not 0 <= extreme < len(sources):
            raise RopewalkError(f"source id {extreme} names none of {len(sources)} sources, counted from 0")


def _checked_bins(bins: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    if any(len(entry) != 2 for entry in bins):
        raise RopewalkError(f"length_shares must be pairs of a first length and a share, got {list(bins)}")
    checked = tuple(
        (_whole("a first length of length_shares", start, 0), _number("a share of length_shares", share))
        for start, share in bins
    )
    starts = [start for start, _ in checked]
    if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
        raise RopewalkError(f"length_shares must begin with length 0 and ascend, got first lengths {starts}")
    if not any(share for _, share in checked):
        raise RopewalkError("length_shares must hold a share above 0, got none")
    return checked


def _number(name: str, value: object, least: float = 0, most: float = _MOST_WEIGHT) -> float:
    # NaN is neither less nor more.
    numeric = (int, float, np.integer, np.floating)
    if not isinstance(value, numeric) or isinstance(value, bool) or not least <= value <= most:
        raise RopewalkError(f"{name} must be a number from {least:g} to {most:g}, got {value!r}")
    return float(value)


def _whole(name: str, value: object, least: int) -> int:
    if (
        not isinstance(value, (int, np.integer))
        or isinstance(value, bool)
        or not least <= value <= _MOST_TOKENS
    ):
        raise RopewalkError(f"{name} must be a whole number from {least} to {_MOST_TOKENS:g}, got {value!r}")
    return int(value)
