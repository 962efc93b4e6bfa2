"""Settings of a data mixture: how often each source and each length of documents is read, filters and woven tasks.

Each setting is declared once, here; see :mod:`ropewalk.data.settings`, which composes this model.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ropewalk.io.lengths import parse_length
from ropewalk.io.settings import COMMON, TEXT, Length, Option, Seed, Settings, Tokens, written

_MOST_WEIGHT = 1e6
"""Far beyond any real use, and small enough that the product of two weights stays within float64."""


@written(TEXT)
def _numbers_by_name(value: Any) -> Any:
    """Parse ``books=0.3,web=0.7`` into a mapping; return any other type unchanged.

    Raises:
        ValueError: if a part is not ``name=number``, a name appears twice, or a value is a boolean.
    """
    if isinstance(value, dict):
        for name, each in value.items():
            # YAML's `yes` is a bool, which pydantic would otherwise accept as the number 1.
            if isinstance(each, bool):
                raise ValueError(f"{name!r} must have a number, got {each}")
    if not isinstance(value, str):
        return value
    values: dict[str, float] = {}
    for part in value.split(","):
        # At the last sign: a name may contain others.
        name, equals, number = part.rpartition("=")
        name = name.strip()
        try:
            found = float(number)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ValueError("must be name=number pairs separated by commas")
        if name in values:
            raise ValueError(f"{name!r} is given twice")
        values[name] = found
    return values


@written(TEXT)
def _shares_by_length(value: Any) -> Any:
    """Parse ``0=0.3,4k=0.3,32k=0.4`` into (first length, share) pairs; return any other type unchanged."""
    named = _numbers_by_name(value)
    if not isinstance(value, str):
        return value
    # parse_length refuses 0, at which the first bin begins.
    return [(0 if name == "0" else parse_length(name), share) for name, share in named.items()]


def comma_list(kind: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A validator that parses comma-separated numbers into a list and returns any other type unchanged."""

    @written(TEXT)
    def parts(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [kind(word) for word in value.split(",")]
        except ValueError as error:
            raise ValueError("must be numbers separated by commas") from error

    return parts


def with_commas(values: Any) -> str:
    return ",".join(map(str, values))


Weight = Annotated[float, Field(ge=0, le=_MOST_WEIGHT)]
BySource = Annotated[dict[str, Weight], BeforeValidator(_numbers_by_name), Option(metavar="NAME=NUMBER,...")]
"""A number for each source, written as books=2,web=0.5 on the command line."""

LengthShares = Annotated[
    tuple[tuple[Length, Weight], ...], BeforeValidator(_shares_by_length), Option(metavar="LENGTH=NUMBER,...")
]
"""Length bins, each with its first length and a share; written as 0=0.3,4k=0.3,32k=0.4 on the command line."""


Preset = Literal["olmo3"]
PRESETS: dict[str, dict[str, Any]] = {
    "olmo3": {"long_from": 8192, "long_share": 0.34, "drop_gzip_low": 0.2, "drop_gzip_high": 0.2},
}
"""Settings of published mixtures. Long documents of OLMo 3 (arXiv:2512.13961) exceed its trained 8,192 tokens."""

SyntheticTask = Literal["needle", "count"]
SYNTHETIC_TASKS: tuple[SyntheticTask, ...] = ("needle", "count")

LATER_MIXTURE = (
    *("preset", "drop_gzip_low", "drop_gzip_high"),
    *("synthetic_share", "synthetic_tasks", "synthetic_loss"),
)
"""Settings of a mixture that are not written where they are unset, so that rows of earlier versions are found."""


class MixtureSettings(Settings):
    """The data mixture; the defaults read every document once, in corpus order.

    All token counts exclude BOS, EOS and tags. Give at most one of ``weights`` and ``shares``, and at most one
    of ``long_factor``, ``long_share`` and ``length_shares``.

    Attributes:
        preset: gives the settings of ``PRESETS`` that are not given themselves; all are written into a resolved recipe.
        weights: average epochs per source: 2 reads each document twice, 0.5 reads half of them, 0 reads none.
        shares: normalised to sum to 1, so 3 and 1 mean 0.75 and 0.25. Name every source; 0 leaves a source out.
        tokens: if None, the total follows from the weights; with shares, it is the largest total for which no
            source must repeat tokens; otherwise it is the size of the corpus.
        long_factor: relative to a short document of the same source. A source that has only long or only short
            documents does not change.
        length_shares: bins in ascending order, the first from 0; the shares are normalised to sum to 1.
        per: with ``corpus``, every document of a length bin is equally likely whatever its source, and the
            sources' shares follow. ``corpus`` excludes weights and shares, and requires a length setting.
        max_epochs: an average over one source's documents of one length bin. Up to 4 epochs cost little compared
            with new data (Muennighoff et al., arXiv:2305.16264).
        shortage: also applies if a requested length bin has no documents. ``cap`` reads the available documents
            ``max_epochs`` times and does not replace the missing tokens with other documents.
        shuffle: if no other mixture setting is given, reads every non-empty document once.
        drop_gzip_low, drop_gzip_high: applied before any other setting of the mixture
            (:mod:`ropewalk.data.mixture.gzip_ratio`). Long documents are those from ``long_from``, or in the last bin
            of ``length_shares``. Chats have no ratio, and are kept.
        synthetic_share: applied after all other settings of the mixture, to each reading of a long document
            (:mod:`ropewalk.data.mixture.synthetic`, :mod:`ropewalk.data.rows.weave`).
    """

    group: ClassVar[str | None] = "Mixture"

    preset: Preset | None = Field(
        default=None,
        description="Published mixture whose settings to use where they are not given: olmo3 (34 % of the tokens from "
        "documents of 8k tokens or more, without the fifth of these with the lowest and the highest gzip ratio).",
    )

    weights: Annotated[BySource | None, COMMON] = Field(
        default=None,
        description="Number of epochs over each source: books=2,web=0.5. With --total-tokens, only the ratio of the "
        "numbers counts. Default: 1.",
    )
    shares: BySource | None = Field(
        default=None,
        description="Share of the tokens for each source, instead of --weights: books=0.3,web=0.7.",
    )
    tokens: Annotated[Tokens | None, Option(name="--total-tokens"), COMMON] = Field(
        default=None,
        ge=1,
        description="Number of tokens to draw, such as 500M. Default: as many as --weights gives. With --shares: "
        "as many as possible without repeating a source.",
    )
    long_from: Length | None = Field(
        default=None,
        ge=1,
        description="Length in tokens, such as 32k, from which a document is long. Needs --long-factor, --long-share, "
        "--drop-gzip-low, --drop-gzip-high or --synthetic-share.",
    )
    long_factor: float | None = Field(
        default=None,
        gt=0,
        le=_MOST_WEIGHT,
        description="Factor by which long documents are drawn more often than short ones. Needs --long-from.",
    )
    long_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the tokens to draw from long documents, instead of --long-factor. Needs --long-from.",
    )
    length_shares: LengthShares | None = Field(
        default=None,
        description="Share of the tokens for each range of document lengths, instead of --long-from. "
        "0=0.3,4k=0.3,32k=0.4 draws 30 % from documents below 4k tokens, 30 % from 4k to 32k, and 40 % from 32k up.",
    )
    drop_gzip_low: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of each source's long documents to drop because their text compresses worst: those with "
        "the lowest gzip ratio. Needs --long-from or --length-shares.",
    )
    drop_gzip_high: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of each source's long documents to drop because their text compresses best: those with "
        "the highest gzip ratio. Needs --long-from or --length-shares.",
    )
    synthetic_share: BySource | None = Field(
        default=None,
        description="Share of each source's long documents to get a synthetic task: books=0.05,web=0.01. It is a "
        "question about the text at its end, with the answer. Sources that are not named get none. Needs --long-from "
        "or --length-shares.",
    )
    synthetic_tasks: Annotated[
        tuple[SyntheticTask, ...],
        BeforeValidator(comma_list(str)),
        Option(metavar="TASK,...", text=with_commas),
    ] = Field(
        default=SYNTHETIC_TASKS,
        description="Synthetic tasks to choose from: needle (find one of four sentences hidden in the text) and count "
        "(how often words occur in it).",
    )
    synthetic_loss: Literal["all", "answers"] = Field(
        default="all",
        description="Which tokens of a document with a synthetic task count in the loss: all, or those of the answers "
        "alone.",
    )
    per: Literal["source", "corpus"] = Field(
        default="source",
        description="How --long-from and --length-shares apply: source (within each source, which keeps its share of "
        "the tokens) or corpus (to all sources together).",
    )
    max_epochs: float = Field(
        default=4.0,
        ge=1,
        le=1e6,
        description="Maximum number of epochs over the documents of a source. With --length-shares or --long-from, "
        "each range of lengths has this maximum.",
    )
    shortage: Literal["refuse", "cap"] = Field(
        default="refuse",
        description="What to do if a source cannot fill its share within --max-epochs: refuse (stop before packing) or "
        "cap (use what there is and report the missing tokens).",
    )
    shuffle: bool = Field(
        default=False,
        description="Read documents in random order. Implied by --weights, --shares, --total-tokens, --long-from and "
        "--length-shares.",
    )
    seed: Seed = Field(default=0, description="Random seed for choosing and ordering documents.")

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("preset") not in PRESETS:
            return value
        given = {name: each for name, each in value.items() if each is not None}
        return {**PRESETS[value["preset"]], **given}

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        stated: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in stated.items()
            if name not in LATER_MIXTURE or value != fields[name].default
        }

    @field_validator("shares")
    @classmethod
    def _some_share(cls, shares: dict[str, float] | None) -> dict[str, float] | None:
        if shares is not None and not any(shares.values()):
            raise ValueError(f"must contain a share above 0, got {shares}")
        return shares

    @field_validator("synthetic_share")
    @classmethod
    def _parts_of_documents(cls, shares: dict[str, float] | None) -> dict[str, float] | None:
        if shares is not None and (not any(shares.values()) or max(shares.values()) > 1):
            raise ValueError(f"must contain a share above 0, and none above 1, got {shares}")
        return shares

    @field_validator("synthetic_tasks")
    @classmethod
    def _each_once(cls, tasks: tuple[SyntheticTask, ...]) -> tuple[SyntheticTask, ...]:
        if not tasks or len(set(tasks)) < len(tasks):
            raise ValueError(f"must name tasks, each once, got {with_commas(tasks) or 'none'}")
        return tasks

    @field_validator("length_shares")
    @classmethod
    def _bins_ascend(cls, bins: tuple[tuple[int, float], ...] | None) -> tuple[tuple[int, float], ...] | None:
        if bins is None:
            return None
        starts = [start for start, _ in bins]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise ValueError(f"must start at length 0 and increase, got first lengths {starts}")
        if not any(share for _, share in bins):
            raise ValueError("must contain a share above 0")
        return bins

    @model_validator(mode="after")
    def _go_together(self) -> MixtureSettings:
        if self.weights is not None and self.shares is not None:
            raise ValueError(f"give weights or shares, not both (got {self.weights} and {self.shares})")
        lengths = {name: getattr(self, name) for name in ("long_factor", "long_share", "length_shares")}
        given = [name for name, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise ValueError(
                f"give one of long_factor, long_share and length_shares, got {' and '.join(given)}"
            )
        upsampled = self.long_factor is not None or self.long_share is not None
        wants_long = self.drops or self.synthetic_share is not None
        if upsampled != (self.long_from is not None) and not (wants_long and self.long_from is not None):
            raise ValueError(
                "long_factor and long_share need long_from, and long_from needs one of these, drop_gzip_low, "
                f"drop_gzip_high or synthetic_share; got long_from {self.long_from}, long_factor {self.long_factor} "
                f"and long_share {self.long_share}"
            )
        if self.long_from is not None and self.length_shares is not None:
            raise ValueError(
                "give long_from or length_shares, whose last length is that of long documents; not both"
            )
        if wants_long and self.long_length is None:
            raise ValueError(
                "drop_gzip_low, drop_gzip_high and synthetic_share are for long documents; give long_from, or "
                "length_shares with more than one length"
            )
        if self.synthetic_share is None:
            for name in ("synthetic_tasks", "synthetic_loss"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    said = with_commas(value) if isinstance(value, tuple) else value
                    raise ValueError(
                        f"{name} {said} has no effect without synthetic_share; give a share, or omit it"
                    )
        if self.drop_gzip_low + self.drop_gzip_high >= 1:
            raise ValueError(
                f"drop_gzip_low {self.drop_gzip_low:g} and drop_gzip_high {self.drop_gzip_high:g} must leave some "
                "documents; their sum must be below 1"
            )
        for name in ("weights", "shares"):
            if self.per == "corpus" and (values := getattr(self, name)) is not None:
                raise ValueError(
                    f"per corpus determines the sources' shares itself; remove {name}, got {name} {values}"
                )
        if self.per == "corpus" and not upsampled and self.length_shares is None:
            raise ValueError(
                "per corpus needs long_factor, long_share or length_shares; add one of them or choose per source"
            )
        return self

    @property
    def as_is(self) -> bool:
        """Whether each document that is left is read once, in the order of the corpus."""
        return not (self.asks or self.shuffle)

    @property
    def drops(self) -> bool:
        """Whether long documents are dropped by their gzip ratio."""
        return self.drop_gzip_low > 0 or self.drop_gzip_high > 0

    @property
    def unchanged(self) -> bool:
        """Whether the corpus is read unchanged, in its own order."""
        return self.as_is and not self.drops and self.synthetic_share is None

    @property
    def long_length(self) -> int | None:
        """Tokens from which a document is long; None if no setting says so."""
        if self.length_shares is not None and len(self.length_shares) > 1:
            return self.length_shares[-1][0]
        return self.long_from

    @property
    def asks(self) -> bool:
        """Whether any setting other than the order changes the mixture."""
        return len(self.starts) > 1 or any(
            value is not None for value in (self.weights, self.shares, self.tokens, self.length_shares)
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first length of each bin; without length settings there is one bin, from 0."""
        if self.length_shares is not None:
            return tuple(start for start, _ in self.length_shares)
        upsampled = self.long_factor is not None or self.long_share is not None
        return (0, self.long_from) if upsampled and self.long_from is not None else (0,)
