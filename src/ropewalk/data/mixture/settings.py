"""MixtureSettings: what a mixture is to be; and which settings near to them a corpus would allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.data.mixture.report import Demand

Per = Literal["source", "corpus"]
Shortage = Literal["refuse", "cap"]
PERS: tuple[Per, ...] = get_args(Per)
SHORTAGES: tuple[Shortage, ...] = get_args(Shortage)
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
            A corpus takes neither weights nor shares, and has no meaning without lengths.
        max_epochs: no source's documents of one bin are asked for more than this many times on average, so
            that no document is read more than this number, rounded up to a whole one. Up to 4 epochs cost
            little against new data (Muennighoff et al., arXiv:2305.16264).
        shortage: where ``max_epochs`` would be passed, or there are no documents of a length that is asked
            for: ``refuse``, or ``cap``, which reads those that there are ``max_epochs`` times; the tokens then
            missing are not made up from others.
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
        if self.per == "corpus" and self.long_from is None and self.length_shares is None:
            raise RopewalkError(
                "per corpus has no meaning without long_from or length_shares; choose per source"
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


# A piece of advice in words, and the changes of settings that it stands for: its nearest and, if any, farthest.
_Advice = tuple[str, list[dict[str, Any]]]
# Some units in the last place of numbers up to 10,000, so that 0.4 is not rounded down to 0.3999.
_NOISE = 1e-11
# Tokens of a group that are none of any cell, when they are rounded to whole ones.
_NOTHING = 0.5
_CAP: _Advice = ("shortage cap", [{"shortage": "cap"}])


def advice_where_empty(
    demand: Demand, settings: MixtureSettings, b: int, fits: Callable[[MixtureSettings], bool]
) -> list[str]:
    """What can be had instead of tokens of documents that a group has none of, each by itself.

    Args:
        demand: what the settings ask for.
        settings: as asked for.
        b: the bin without a document.
        fits: whether the corpus gives what other settings ask for.
    """
    found: list[_Advice] = []
    if settings.length_shares is not None:
        without = [
            (start, 0.0 if i == b else share) for i, (start, share) in enumerate(settings.length_shares)
        ]
        found.append(("a share of 0 for these lengths", [{"length_shares": without}]))
    if settings.long_share is not None:
        as_they_are = {"long_share": None, "long_factor": 1}
        found.append(("long_factor (which leaves such documents as they are)", [as_they_are]))
    if settings.per == "source" and bool(demand.pool[:, b].any()):
        over_all = "per corpus (lengths over all sources together"
        corpus: list[_Advice] = [
            (f"{over_all})", [{"per": "corpus"}]),
            (f"{over_all}) with shortage cap", [{"per": "corpus", "shortage": "cap"}]),
        ]
        found += [each for each in corpus if _all_fit(settings, each[1], fits)][:1]
    found.append(_CAP)
    return [text for text, changes in found if _all_fit(settings, changes, fits)]


def advice_where_too_many(
    demand: Demand, settings: MixtureSettings, group: int, b: int, fits: Callable[[MixtureSettings], bool]
) -> list[str]:
    """What can be had instead of too many epochs, each by itself.

    Args:
        demand: what the settings ask for.
        settings: as asked for.
        group, b: the cell that would repeat most.
        fits: whether the corpus gives what other settings ask for.
    """
    epochs = demand.wanted / np.maximum(demand.pool, 1)
    total = math.floor(float(demand.budgets.sum()) * settings.max_epochs / float(epochs[group, b]))
    least = rounded(float(epochs[group, b]), up=True)
    found: list[_Advice] = [
        (f"a total of up to {total} tokens", [{"tokens": total}]),
        *_weights_that_fit(demand, settings, epochs),
        *_shares_that_fit(demand, settings, group),
        *_length_shares_that_fit(demand, settings, b),
        *_long_that_fits(demand, settings),
        (f"max_epochs from {least}", [{"max_epochs": float(least)}]),
        _CAP,
    ]
    return [text for text, changes in found if _all_fit(settings, changes, fits)]


def _all_fit(
    settings: MixtureSettings, changes: list[dict[str, Any]], fits: Callable[[MixtureSettings], bool]
) -> bool:
    try:
        return all(fits(replace(settings, **change)) for change in changes)
    except RopewalkError:
        # Out of range, or at odds with another setting.
        return False


def _weights_that_fit(
    demand: Demand, settings: MixtureSettings, epochs: NDArray[np.float64]
) -> Iterator[_Advice]:
    # With a total, another weight of one source changes what all are asked for.
    if settings.weights is None or settings.tokens is not None or demand.sources is None:
        return
    most = epochs.max(1)
    names = {
        name: rounded(settings.weights.get(name, 1.0) * settings.max_epochs / each)
        for name, each in zip(demand.sources, most.tolist(), strict=True)
        if each > settings.max_epochs
    }
    change = {"weights": {**settings.weights, **{name: float(weight) for name, weight in names.items()}}}
    if len(names) == 1:
        yield f"a weight of it up to {', '.join(names.values())}", [change]
    else:
        yield f"weights up to {','.join(f'{name}={weight}' for name, weight in names.items())}", [change]


def _shares_that_fit(demand: Demand, settings: MixtureSettings, group: int) -> Iterator[_Advice]:
    # Without a total, another share changes the total as well.
    if settings.shares is None or settings.tokens is None or demand.sources is None:
        return
    # The share at which the scarcest bin of each source meets the cap.
    epochs = (demand.wanted / np.maximum(demand.pool, 1)).max(1)
    shares = demand.budgets / demand.budgets.sum()
    most = np.where(shares > 0, shares * settings.max_epochs / np.where(epochs > 0, epochs, 1.0), 0.0)
    for fitting in _fitting_shares(shares, most):
        change = dict(zip(demand.sources, map(float, fitting), strict=True))
        listed = ",".join(f"{name}={share}" for name, share in zip(demand.sources, fitting, strict=True))
        yield (
            f"a share of it up to {rounded(float(most[group]))} where the rest goes to other sources ({listed})",
            [{"shares": change}],
        )


def _length_shares_that_fit(demand: Demand, settings: MixtureSettings, b: int) -> Iterator[_Advice]:
    if settings.length_shares is None:
        return
    some = demand.budgets > _NOTHING
    shares = np.array([share for _, share in settings.length_shares])
    shares /= shares.sum()
    most = (settings.max_epochs * demand.pool[some] / demand.budgets[some, None]).min(0)
    starts = settings.starts
    for fitting in _fitting_shares(shares, np.where(shares > 0, most, 0.0)):
        listed = ",".join(f"{start}={share}" for start, share in zip(starts, fitting, strict=True))
        yield (
            f"a share of these lengths up to {rounded(float(most[b]))} where the rest goes to other lengths ({listed})",
            [{"length_shares": tuple(zip(starts, map(float, fitting), strict=True))}],
        )


def _fitting_shares(shares: NDArray[np.float64], most: NDArray[np.float64]) -> Iterator[list[str]]:
    """Shares of which none is above ``most``, if any: the excess goes to the others by the room that they have.

    As decimals that sum to 1: short ones where these keep below ``most``.
    """
    kept = np.minimum(shares, most)
    room = most - kept
    # Rounding decides nothing here, as the shares are tried before they are offered.
    if most.sum() < 1 - 1e-12:
        return
    fitting = kept + room * ((1 - kept.sum()) / (room.sum() or 1.0))
    short = max(4, 3 - math.floor(math.log10(fitting[fitting > 0].min())))
    for digits in (min(short, 15), 15):
        units = np.floor(fitting * 10.0**digits + _NOISE).astype(np.int64)
        units[int((most - fitting).argmax())] += 10**digits - units.sum()
        decimals = [f"{unit / 10**digits:.15g}" for unit in units.tolist()]
        if digits == 15 or bool((units / 10**digits <= most + _NOISE).all()):
            yield decimals
            return


def _long_that_fits(demand: Demand, settings: MixtureSettings) -> Iterator[_Advice]:
    """The long factors or shares with which no cell passes the cap, if there are any.

    With budget b and long documents l, both in shares of a group's tokens, long documents are read b f / w
    times and short ones b / w times under a factor f, where w = f l + 1 - l; under a share x it is b x / l
    and b (1 - x) / (1 - l). Solved for the cap.
    """
    if settings.long_factor is None and settings.long_share is None:
        return
    some = demand.budgets > _NOTHING
    tokens = demand.pool[some].sum(1)
    budget, long = demand.budgets[some] / tokens, demand.pool[some, 1] / tokens
    cap = settings.max_epochs
    if settings.long_factor is None:
        least, most = float((1 - cap / budget * (1 - long)).max()), float((cap / budget * long).min())
        name, value, greatest = "long_share", settings.long_share or 0.0, 1.0
    elif bool((budget > cap).any()):
        return
    else:
        bounded = budget > cap * long
        most = float((cap * (1 - long[bounded]) / (budget - cap * long)[bounded]).min(initial=math.inf))
        least = float(((budget[long > 0] / cap - 1 + long[long > 0]) / long[long > 0]).max(initial=0.0))
        name, value, greatest = "long_factor", settings.long_factor, _MOST_WEIGHT
    if least > most or least <= value <= most:
        return
    bounds = [("from", rounded(least, up=True))] if least > 0 else []
    bounds += [("up to", rounded(most))] if most < greatest else []
    words = " ".join(f"{word} {bound}" for word, bound in bounds)
    yield f"{name} {words}", [{name: float(bound)} for _, bound in bounds]


def rounded(value: float, up: bool = False) -> str:
    """Four significant digits, rounded so that a bound still holds, but for the last digits of float64."""
    if value <= 0:
        return "0"
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    digits = math.ceil(value * scale - _NOISE) if up else math.floor(value * scale + _NOISE)
    return f"{digits / scale:.15g}"


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
