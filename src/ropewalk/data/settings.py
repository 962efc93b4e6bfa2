"""What a person sets to turn documents into packed rows: sources, mixture, policies of the rows, validation, work.

Each setting is declared here once, and its description says what it is; docstrings add what takes more words. Recipes
compose these models, and the command line derives its options from them, so this module imports neither torch nor
numpy.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ropewalk.attention.choices import Pattern, Positions
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import parse_length
from ropewalk.io.settings import Count, Length, OnResume, Option, Seed, Settings, Tokens

if TYPE_CHECKING:
    from ropewalk.data.tokens.tokenise import SpecialTokens

Bos = Literal["auto", "document", "row", "none"]
LongDocuments = Literal["split", "truncate", "skip"]
Packing = Literal["sequential", "best_fit"]
Remainder = Literal["drop", "pad"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)
REMAINDERS: tuple[Remainder, ...] = get_args(Remainder)

DECIDES_ROWS = OnResume("fixed", "it decides the rows, and those of the run are packed")

_MOST_WEIGHT = 1e6
"""Far beyond any use, and small enough that no product of two leaves the range of float64."""


def _numbers_by_name(value: Any) -> Any:
    """``books=0.3,web=0.7`` as a mapping; anything but text as it is.

    Raises:
        ValueError: if a part is no name and number, a name comes twice, or a value is true or false.
    """
    if isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, bool):
                raise ValueError(f"{name!r} must have a number, got {each}")
    if not isinstance(value, str):
        return value
    values: dict[str, float] = {}
    for part in value.split(","):
        name, equals, number = part.rpartition("=")
        name = name.strip()
        try:
            found = float(number)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ValueError("must be name=number with commas between them")
        if name in values:
            raise ValueError(f"names {name!r} twice")
        values[name] = found
    return values


def _shares_by_length(value: Any) -> Any:
    """``0=0.3,4k=0.3,32k=0.4`` as pairs of a first length and a share; anything but text as it is."""
    named = _numbers_by_name(value)
    if not isinstance(value, str):
        return value
    return [(0 if name == "0" else parse_length(name), share) for name, share in named.items()]


def _comma_list(kind: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Numbers with commas between them as a list; anything but text as it is."""

    def parts(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return [kind(word) for word in value.split(",")]
        except ValueError as error:
            raise ValueError("must be numbers with commas between them") from error

    return parts


def _with_commas(values: Any) -> str:
    return ",".join(map(str, values))


Weight = Annotated[float, Field(ge=0, le=_MOST_WEIGHT)]
BySource = Annotated[dict[str, Weight], BeforeValidator(_numbers_by_name), Option(metavar="NAME=NUMBER,...")]
"""A number for each source; on the command line books=2,web=0.5."""

LengthShares = Annotated[
    tuple[tuple[Length, Weight], ...], BeforeValidator(_shares_by_length), Option(metavar="LENGTH=NUMBER,...")
]
"""Bins of lengths, each its first length and a share; on the command line 0=0.3,4k=0.3,32k=0.4."""


Workers = Annotated[Count, Field(ge=0, description="Tokenisation processes; 0 takes one for each core.")]


def processes(workers: int) -> int:
    """Tokenisation processes that a number of workers stands for."""
    return workers or os.cpu_count() or 1


class SourceFields(Settings):
    """Which fields of a record are read, and how many records."""

    group: ClassVar[str | None] = "Documents"
    on_resume: ClassVar[OnResume | None] = DECIDES_ROWS

    text_field: str = Field("text", description="Field of a record that holds the text.")
    source_field: str | None = Field(
        "source",
        description='Field that names the source, where a record has it; "" reads none.',
    )
    max_documents: Count | None = Field(
        None, ge=1, description="Read no more documents than this of each source; all if not given."
    )

    @field_validator("source_field")
    @classmethod
    def _none(cls, value: str | None) -> str | None:
        return value or None


class SourceSpec(SourceFields):
    """One place that documents come from; a plain string is its path.

    Attributes:
        path: of the embedded documents a part may be named: ``embedded[:train|validation|all]``.
        source_field: dots reach into nested records (``meta.redpajama_set_name``).
    """

    path: str = Field(description="File, folder, hf:owner/name[:config][@split], or embedded.")
    name: str | None = Field(
        None,
        description="Source name of its documents; their own field, or the file's stem, if not given.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class MixtureSettings(Settings):
    """What a mixture is to be; the defaults read every document once, in the order of the corpus.

    Tokens are documents' own tokens, without BOS, EOS or tag. Give one of ``weights`` and ``shares``, and
    one of ``long_factor``, ``long_share`` and ``length_shares``, at most.

    Attributes:
        weights: averages over a source's documents: 2 reads each twice, 0.5 half of them, 0 none.
        shares: they are normalised to sum to 1, so 3 and 1 are 0.75 and 0.25. Every source must be named; 0
            leaves one out.
        tokens: None: with weights, what they give; with shares, the most for which no source has to give more
            than its own tokens; otherwise as many as there are.
        long_factor: against a short document of its source. A source of long or of short documents alone stays
            as it is.
        length_shares: bins in ascending order, the first from 0; the shares are normalised to sum to 1.
        per: over the ``corpus`` every document of a bin is as likely whatever its source, and the shares
            follow. A corpus takes neither weights nor shares, and has no meaning without lengths.
        max_epochs: an average over a source's documents of one bin. Up to 4 epochs cost little against new
            data (Muennighoff et al., arXiv:2305.16264).
        shortage: also where there are no documents of a length that is asked for. ``cap`` reads those that
            there are ``max_epochs`` times; the tokens then missing are not made up from others.
        shuffle: with none of the above, every document of a token or more is read once.
    """

    group: ClassVar[str | None] = "Mixture"
    on_resume: ClassVar[OnResume | None] = DECIDES_ROWS

    weights: BySource | None = Field(
        None, description="How often each source is read: books=2,web=0.5; 1 if not named."
    )
    shares: BySource | None = Field(
        None, description="Or: share of the tokens of each source: books=0.3,web=0.7."
    )
    tokens: Annotated[Tokens | None, Option(name="--total-tokens")] = Field(
        None, ge=1, description="Tokens that the mixture is to have."
    )
    long_from: Length | None = Field(
        None, ge=1, description="A document of this many tokens is long: 4k, 32k."
    )
    long_factor: float | None = Field(
        None, gt=0, le=_MOST_WEIGHT, description="Draw long documents this many times as often."
    )
    long_share: float | None = Field(
        None, gt=0, lt=1, description="Or: share of each source's tokens in long documents."
    )
    length_shares: LengthShares | None = Field(
        None, description="Or: share of the tokens by length, each from: 0=0.3,4k=0.3,32k=0.4."
    )
    per: Literal["source", "corpus"] = Field(
        "source",
        description="Upsample long documents within each source (keeps the sources' shares) or over the whole corpus.",
    )
    max_epochs: float = Field(
        4.0, ge=1, le=1e6, description="Times that a document is read at most, rounded up."
    )
    shortage: Literal["refuse", "cap"] = Field(
        "refuse", description="Where that is not enough: refuse, or cap at it and say what is missing."
    )
    shuffle: bool = Field(False, description="Take documents in random order; a mixture always does.")
    seed: Seed = Field(0, description="Random seed of the choice and the order.")

    @field_validator("shares")
    @classmethod
    def _some_share(cls, shares: dict[str, float] | None) -> dict[str, float] | None:
        if shares is not None and not any(shares.values()):
            raise ValueError(f"must hold a share above 0, got {shares}")
        return shares

    @field_validator("length_shares")
    @classmethod
    def _bins_ascend(cls, bins: tuple[tuple[int, float], ...] | None) -> tuple[tuple[int, float], ...] | None:
        if bins is None:
            return None
        starts = [start for start, _ in bins]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise ValueError(f"must begin with length 0 and ascend, got first lengths {starts}")
        if not any(share for _, share in bins):
            raise ValueError("must hold a share above 0")
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
        if (self.long_from is None) != (self.long_factor is None and self.long_share is None):
            raise ValueError(
                "long_from goes with one of long_factor and long_share, and they with it; "
                f"got long_from {self.long_from}, long_factor {self.long_factor} and long_share {self.long_share}"
            )
        for name in ("weights", "shares"):
            if self.per == "corpus" and (values := getattr(self, name)) is not None:
                raise ValueError(f"per corpus takes no {name}, as shares follow there; got {name} {values}")
        if self.per == "corpus" and self.long_from is None and self.length_shares is None:
            raise ValueError(
                "per corpus has no meaning without long_from or length_shares; choose per source"
            )
        return self

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


class InterleaveSettings(Settings):
    """Interleaved chunks: documents of a row are cut, and the parts of all documents shuffled.

    The order inside a document stays, and visibility follows the document. Defaults are the settings of
    AnchorContext (arXiv:2411.13476); ``true`` in a recipe takes them.

    Attributes:
        min_length, max_length: of a document as it lies in the row; shorter and longer ones stay whole, but are
            shuffled like the parts.
        seed: with the row's number it decides the cuts and the shuffle.
    """

    group: ClassVar[str | None] = "Interleaved chunks"
    on_resume: ClassVar[OnResume | None] = DECIDES_ROWS

    min_length: Annotated[Length, Option(name="--chunk-min")] = Field(
        64, ge=1, description="Tokens of the shortest document that is cut."
    )
    max_length: Annotated[Length, Option(name="--chunk-max")] = Field(
        2048, ge=1, description="Tokens of the longest document that is cut."
    )
    parts: Annotated[
        tuple[Annotated[Count, Field(ge=2)], ...],
        BeforeValidator(_comma_list(int)),
        Option(name="--chunk-parts", metavar="NUMBER,...", text=_with_commas),
    ] = Field((2, 3), description="Into how many parts: one of these, each as likely.")
    cut_points: Annotated[
        tuple[float, float],
        BeforeValidator(_comma_list(float)),
        Option(name="--chunk-cuts", metavar="NUMBER,NUMBER", text=_with_commas),
    ] = Field((0.2, 0.8), description="Cuts lie between these shares of the document's length.")
    seed: Annotated[Seed, Option(hidden=True)] = Field(
        0, description="Random seed of the cuts and the shuffle."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_flag(cls, value: Any) -> Any:
        return {} if value is True else value

    @model_validator(mode="after")
    def _in_order(self) -> InterleaveSettings:
        if not self.parts:
            raise ValueError("interleaved documents need a number of parts, got none")
        if self.min_length > self.max_length:
            raise ValueError(
                f"interleaved documents need min_length <= max_length, got {self.min_length} and {self.max_length}"
            )
        if not 0 <= self.cut_points[0] < self.cut_points[1] <= 1:
            raise ValueError(
                f"cut points must be two shares from 0 to 1, the smaller first, got {list(self.cut_points)}"
            )
        return self


class RowPolicies(Settings):
    """How documents become rows, whatever the rows' length and pattern.

    Attributes:
        bos: ``document``: first in every document, not in a continuation. ``row``: first in every row, nowhere
            else. ``none``: nowhere. ``auto`` is ``none`` where it would be ``document`` and the tokenizer has no
            BOS token. The pattern ``anchor`` takes no other policy than ``row``.
        tag: seen by its document. It comes after the document's BOS; a continuation has none.
        long_documents: ``split`` over several rows, ``truncate``d to one row's length, or left out (``skip``).
        packing: ``sequential`` takes documents in the order that they come; ``best_fit`` is that of
            arXiv:2404.10830.
        remainder: of the last row, under ``best_fit`` of the emptiest one: its tokens are left out (``drop``), or
            it is filled up with padding that is never a target (``pad``).
    """

    group: ClassVar[str | None] = "Rows"
    on_resume: ClassVar[OnResume | None] = DECIDES_ROWS

    bos: Bos = Field(
        "auto",
        description="Where BOS goes; auto is one a row for the pattern anchor (the anchor), else one a document.",
    )
    eos: bool = Field(True, description="End every document with EOS.")
    tag: str | None = Field(
        None, description='Text before each document, not trained on: "{source}: " names its source.'
    )
    long_documents: LongDocuments = Field(
        "split", description="What becomes of a document longer than a row."
    )
    packing: Packing = Field(
        "sequential",
        description="sequential cuts documents at a row's end; best_fit cuts only those longer than a row, and pads.",
    )
    remainder: Remainder = Field("drop", description="What becomes of the row that is not full.")
    interleave: InterleaveSettings | None = Field(
        None, description="Cut documents and shuffle the parts of a row."
    )

    @field_validator("tag")
    @classmethod
    def _template(cls, tag: str | None) -> str | None:
        if tag is not None:
            _check_tag(tag)
        return tag

    @field_validator("interleave", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if value is False else value


class PackingSettings(RowPolicies):
    """How documents become rows of one length and pattern; every policy has a name, and none is implied.

    Attributes:
        pattern: as in PackedLayout. ``anchor`` puts one anchor token at index 0.
        positions: the continuation of a cut document counts as a document of its row, and restarts as well.
    """

    context: Annotated[Length, Option(name="--length")] = Field(
        ge=2, description="Tokens of a row: 131072, 128k, 1M."
    )
    pattern: Pattern = Field("anchor", description="Which tokens of a row see each other.")
    positions: Positions = Field(
        "continuous", description="RoPE positions: over the row, or restarting in each document."
    )

    @model_validator(mode="after")
    def _one_bos(self) -> PackingSettings:
        if self.pattern == "anchor" and self.bos not in ("auto", "row"):
            raise ValueError(
                "pattern anchor begins each row with the anchor and has no other BOS; bos must be auto or row"
                f", got {self.bos}"
            )
        if self.interleave is not None and self.bos == "row" and self.pattern != "anchor":
            raise ValueError(
                f"bos row begins the first document of a row, and interleaving would move it; choose bos document or "
                f"none for the pattern {self.pattern}"
            )
        return self

    @property
    def anchor_length(self) -> int:
        """Tokens that stand before the first document of a row."""
        return 1 if self.pattern == "anchor" else 0

    def bos_policy(self, special: SpecialTokens) -> Literal["document", "row", "none"]:
        """The policy that ``auto`` stands for with this tokenizer.

        Raises:
            RopewalkError: if the settings ask for a BOS or EOS token that the tokenizer lacks.
        """
        if self.eos and special.eos is None:
            raise RopewalkError("the tokenizer has no EOS token to end documents with; choose eos false")
        if self.bos == "auto":
            if self.pattern == "anchor":
                return "row"
            return "none" if special.bos is None else "document"
        if special.bos is None and (
            self.bos == "document" or (self.bos == "row" and self.pattern != "anchor")
        ):
            raise RopewalkError(
                f"the tokenizer has no BOS token to begin {self.bos}s with; choose bos none"
                + ("" if self.bos == "document" else ", or the pattern anchor, which takes EOS")
            )
        return self.bos

    def room(self, special: SpecialTokens) -> int:
        """Tokens of a row that documents can take: all but a BOS that every row begins with."""
        return self.context - (self.bos_policy(special) == "row")


def _check_tag(tag: str) -> None:
    """Refuse a tag that is no template, is empty, or names anything but ``{source}``."""
    try:
        parts = list(string.Formatter().parse(tag))
    except ValueError as error:
        raise ValueError(
            f"the tag {tag!r} is no template: {error}; write {{source}} for the source"
        ) from error
    for _, name, specification, conversion in parts:
        if name is not None and (name != "source" or specification or conversion):
            raise ValueError(f"the tag {tag!r} names {{{name}}}, or formats it; only {{source}} is known")
    if not tag:
        raise ValueError("the tag is empty; leave it out to put none")


class ValidationSettings(Settings):
    """How many documents are held out; neither given means none.

    Attributes:
        documents: those whose hashes are smallest; all if the corpus has fewer.
        fraction: about this share; the documents' hashes decide.
    """

    group: ClassVar[str | None] = "Validation"

    documents: Annotated[Count, Option(name="--validation-documents")] = Field(
        0, ge=0, description="Documents to hold out for validation."
    )
    fraction: Annotated[float, Option(name="--validation-fraction")] = Field(
        0.0, ge=0, lt=1, description="Or: share of the documents to hold out."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> ValidationSettings:
        if self.documents and self.fraction:
            raise ValueError(
                f"give a number of validation documents or a fraction, not both "
                f"(got {self.documents} and {self.fraction})"
            )
        return self


SHARDS = "must be i/n with i from 0 to n-1, such as 0/4"
"""What a machine's part must be, after its name."""


class WorkSettings(Settings):
    """Who does the work, and where intermediate files lie; nothing of it changes a row.

    Attributes:
        shard: (number from 0, of how many). Each machine begins with its own share of the documents. With one folder
            of tokens they share that work, without it each does all of it.
        token_store: None keeps tokenised documents in the folder of the rows until these are complete.
    """

    group: ClassVar[str | None] = "Work"

    shard: Annotated[tuple[int, int], Option(metavar="I/N", text=lambda shard: f"{shard[0]}/{shard[1]}")] = (
        Field(
            (0, 1),
            description="This machine's part, 0/4 to 3/4; with one --out or --token-store, machines share the work.",
        )
    )
    token_store: Path | None = Field(
        None,
        description="Folder that keeps tokenised documents, for other rows of the same documents and other machines.",
    )
    workers: Workers = 0

    @field_validator("shard", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        number, slash, parts = value.partition("/")
        if not slash or not number.isdecimal() or not parts.isdecimal():
            raise ValueError(SHARDS)
        return int(number), int(parts)

    @field_validator("shard")
    @classmethod
    def _one_of_them(cls, shard: tuple[int, int]) -> tuple[int, int]:
        number, machines = shard
        if not 0 <= number < machines:
            raise ValueError(SHARDS)
        return shard


class PackSettings(Settings):
    """How documents become packed rows, wherever they come from.

    Attributes:
        rows: how documents become rows.
        mixture: which documents, how often and in which order.
        validation: which documents are held out.
        work: who does the work; it changes no row.
    """

    tokenizer: str = Field(description="Model or tokenizer: a folder or a hub name.")
    rows: PackingSettings
    mixture: MixtureSettings = MixtureSettings()
    validation: ValidationSettings = ValidationSettings()
    work: WorkSettings = WorkSettings()


class PackConfig(PackSettings):
    """All that decides packed rows, and who makes them: :class:`PackSettings`, and the sources in reading order."""

    sources: tuple[SourceSpec, ...] = Field(description="Where the documents come from.")

    def alone(self) -> PackConfig:
        """The same as the work of one machine, with its tokens beside the rows."""
        work = self.work.model_copy(update={"shard": (0, 1), "token_store": None})
        return self.model_copy(update={"work": work})


class CountSettings(Settings):
    """How documents are counted."""

    tokenizer: str | None = Field(
        None,
        description="Model or tokenizer to count documents with; the embedded checkpoint's if not given.",
    )
    length: Length | None = Field(
        None,
        ge=2,
        description="Tokens of a row, to count attention on documents: 64k. If not given, what the model beside the "
        "tokenizer is trained for; without a model there, attention is not counted.",
    )
    workers: Workers = 0


class StatsConfig(CountSettings):
    """What is counted, and how: documents, or one folder of packed rows, which has its own tokenizer and length."""

    sources: tuple[SourceSpec, ...] = Field(
        min_length=1, description="One folder of packed rows; or where the documents come from."
    )


class PreviewConfig(Settings):
    """Which rows are shown, and how much of them."""

    rows: Count = Field(3, ge=1, description="How many rows, from the first on.")
    tokenizer: str | None = Field(
        None, description="Where the tokenizer is, if no longer where the rows name it."
    )
    tokens: Count = Field(200, ge=1, description="Tokens to show at each end of a document.")
