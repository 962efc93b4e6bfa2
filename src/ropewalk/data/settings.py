"""Settings for turning documents into packed rows: sources, mixture, row policies, validation split and work.

Each setting is declared once, here. Its description becomes the help text; the docstring adds details. Recipes compose
these models and the command line derives its options from them, so this module imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from ropewalk.attention.choices import Pattern, Positions
from ropewalk.data.mixture.settings import MixtureSettings, comma_list, with_commas
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import COMMON, TEXT, Count, Length, Option, Seed, Settings, Text, written

if TYPE_CHECKING:
    from ropewalk.data.tokens.tokenise import SpecialTokens

Bos = Literal["auto", "document", "row", "none"]
LongDocuments = Literal["split", "truncate", "skip"]
Packing = Literal["sequential", "best_fit"]
Remainder = Literal["drop", "pad"]


Workers = Annotated[
    Count, Field(ge=0, description="Number of tokenisation processes; 0 starts one per CPU core.")
]


def processes(workers: int) -> int:
    """Number of processes to start; 0 workers means one per CPU core."""
    return workers or os.cpu_count() or 1


TokenType = Literal["uint8", "uint16", "uint32", "int32", "uint64", "int64"]

LATER_FIELDS = (
    *("messages_field", "separator_id", "token_dtype", "source_per"),
    *("loss_spans_field", "train_around_spans"),
)
"""Fields of a source that digests omit where they are unset, so that tokens and rows of earlier versions are found."""


class SourceFields(Settings):
    """Settings of reading: the fields of a record, the layout of token files, and the number of documents.

    Attributes:
        loss_spans_field: a list of ``[start, end]`` in characters of the text, ascending and apart. A token is a target
            if one of its characters lies in a span. A record without the field, or with null, is trained on whole.
        train_around_spans: the spans are checked all the same.
        separator_id: beside an index, every document must begin or end with it, and it is removed as well.
        token_dtype: needed for ``.npy`` and ``.bin`` files without an index. Ids are little-endian.
    """

    group: ClassVar[str | None] = "Documents"

    text_field: str = Field(
        default="text",
        description="Record field that holds the text. Without this field, token ids are read from the field "
        "input_ids.",
    )
    messages_field: str | None = Field(
        default=None,
        description="Record field that holds the messages of a chat, for records without the text field. Only the "
        "assistant's turns count in the loss. Default: no chats.",
    )
    loss_spans_field: str | None = Field(
        default=None,
        description="Record field that holds the parts of the text that count in the loss, as a list of [start, end] "
        "in characters. Default: the whole text counts.",
    )
    train_around_spans: bool = Field(
        default=False,
        description="Let the text around the spans of --loss-spans-field count in the loss too, so that every token "
        "does.",
    )
    source_field: str | None = Field(
        default="source",
        description='Record field that holds the name of the source. With "", no field is read.',
    )
    source_per: Literal["file", "folder"] | None = Field(
        default=None,
        description="In a folder, each file or each folder directly in it is a source of its own, named after it, "
        "whatever the source field says. Default: one source for the whole folder.",
    )
    separator_id: Count | None = Field(
        default=None,
        ge=0,
        description="Token id that separates the documents of a token file (.bin, .ds, .npy) without an index file. "
        "The id is removed from the documents.",
    )
    token_dtype: TokenType | None = Field(
        default=None,
        description="Type of the ids in a token file that does not state it (.npy, or .bin without .idx).",
    )
    max_documents: Count | None = Field(
        default=None,
        ge=1,
        description="Maximum number of documents to read from any one path, such as a folder. Default: all.",
    )

    @field_validator("source_field")
    @classmethod
    def _none(cls, value: str | None) -> str | None:
        return value or None

    @model_validator(mode="after")
    def _spans_to_train_around(self) -> SourceFields:
        if self.train_around_spans and self.loss_spans_field is None:
            raise ValueError(
                "train_around_spans needs loss_spans_field; set the field, or omit train_around_spans"
            )
        return self

    @property
    def later_fields(self) -> dict[str, Any]:
        """The fields of ``LATER_FIELDS`` that are set."""
        known = type(self).model_fields
        return {name: value for name in LATER_FIELDS if (value := getattr(self, name)) != known[name].default}

    @property
    def masks_loss(self) -> bool:
        """Whether documents may have tokens that are never targets, so that they must stay whole."""
        return self.messages_field is not None or (
            self.loss_spans_field is not None and not self.train_around_spans
        )


class SourceSpec(SourceFields):
    """One source of documents; a plain string stands for its path.

    Attributes:
        path: the embedded corpus accepts a split, ``embedded[:train|validation|all]``, and has another part,
            ``embedded:retrieval-documents``.
        source_field: use dots to reach nested records (``meta.redpajama_set_name``).
    """

    path: str = Field(
        description="File, folder, hf:owner/name[:config][@split], or embedded (text that ropewalk ships)."
    )
    name: str | None = Field(
        default=None,
        description="Name of the source for all documents in path. Default: the value of the record's source field. "
        "If the record lacks this field: the name of the file or folder, without its suffix.",
    )

    @model_validator(mode="before")
    @classmethod
    @written(TEXT)
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit keys of later versions that are unset, so that runs of earlier versions go on."""
        stated: dict[str, Any] = handler(self)
        later = {"source_per", "loss_spans_field", "train_around_spans"} - self.later_fields.keys()
        return {key: value for key, value in stated.items() if key not in later}

    @model_validator(mode="after")
    def _one_name(self) -> SourceSpec:
        if self.name is not None and self.source_per is not None:
            raise ValueError(
                f"source_per {self.source_per} names each source after its {self.source_per}; omit the name "
                f"{self.name!r}, or omit source_per"
            )
        return self


class InterleaveSettings(Settings):
    """Interleaved chunks: cut the documents of a row into chunks and shuffle the chunks of all documents.

    Chunks of one document keep their order, and attention visibility follows the document. The defaults are those
    of AnchorContext (arXiv:2411.13476); ``true`` in a recipe selects them.

    Attributes:
        min_length, max_length: tokens of a document within the row. Shorter and longer documents are not cut, but
            are shuffled like the chunks.
        seed: together with the row's number, determines the cuts and the shuffle.
    """

    group: ClassVar[str | None] = "Interleaved chunks"

    min_length: Annotated[Length, Option(name="--chunk-min")] = Field(
        default=64, ge=1, description="Documents of fewer tokens are not cut."
    )
    max_length: Annotated[Length, Option(name="--chunk-max")] = Field(
        default=2048, ge=1, description="Documents of more tokens are not cut."
    )
    parts: Annotated[
        tuple[Annotated[Count, Field(ge=2)], ...],
        BeforeValidator(comma_list(int)),
        Option(name="--chunk-parts", metavar="NUMBER,...", text=with_commas),
    ] = Field(
        default=(2, 3), description="Number of chunks per document, drawn uniformly from these numbers."
    )
    cut_points: Annotated[
        tuple[float, float],
        BeforeValidator(comma_list(float)),
        Option(name="--chunk-cuts", metavar="NUMBER,NUMBER", text=with_commas),
    ] = Field(
        default=(0.2, 0.8),
        description="Range in which to cut, as fractions of the document's length.",
    )
    seed: Annotated[Seed, Option(hidden=True)] = Field(
        default=0, description="Random seed for the cuts and the shuffle."
    )

    @model_validator(mode="before")
    @classmethod
    @written({"const": True})
    def _from_flag(cls, value: Any) -> Any:
        return {} if value is True else value

    @model_validator(mode="after")
    def _in_order(self) -> InterleaveSettings:
        if not self.parts:
            raise ValueError("parts must name at least one number of chunks, got none")
        if self.min_length > self.max_length:
            raise ValueError(
                f"min_length must not exceed max_length, got {self.min_length} and {self.max_length}"
            )
        if not 0 <= self.cut_points[0] < self.cut_points[1] <= 1:
            raise ValueError(
                f"cut points must be two fractions from 0 to 1, the smaller first, got {list(self.cut_points)}"
            )
        return self


def _no_word(value: str) -> str:
    # Common vocabularies have such a word, and YAML does not read it as null.
    if value == "none":
        raise ValueError(
            "must be the text of a special token; to add no token, set bos to none or eos to false"
        )
    return value


SpecialToken = Annotated[Text, AfterValidator(_no_word), Option(metavar="TOKEN")]
"""A special token of a tokenizer by its text: <|endoftext|>."""

TOKENS = ("bos_token", "eos_token", "anchor_token")
"""Policies that name tokens."""
LIMITS = ("documents_up_to", "documents_above")
"""Settings of packing that leave out documents by their lengths."""


class RowPolicies(Settings):
    """Policies for packing documents into rows, independent of the rows' length and pattern.

    Attributes:
        bos: ``document`` starts every document with BOS, but not its continuation in another row. ``row`` starts
            every row with BOS and adds no other. ``none`` adds none. ``auto`` means ``row`` for the pattern
            ``anchor``, otherwise ``document``, or ``none`` if the tokenizer has no BOS token. The pattern
            ``anchor`` allows only ``row``.
        tag: visible to its document. It follows the document's BOS; a continuation has no tag.
        long_documents: ``split`` over several rows, ``truncate`` to one row, or ``skip``.
        packing: ``sequential`` keeps the order of the documents; ``best_fit`` follows arXiv:2404.10830.
        remainder: for the last row, or with ``best_fit`` the emptiest row: ``drop`` its tokens, or ``pad`` the row
            with tokens that are never targets.
        bos_token, eos_token, anchor_token: special tokens of the tokenizer by their text, for training rows alone.
            Evaluations start prompts and documents with the tokenizer's own BOS, as programs that read the model do.
    """

    group: ClassVar[str | None] = "Rows"

    bos: Bos = Field(
        default="auto",
        description="Where to add BOS: document (before each document), row (at the beginning of each row), none, or "
        "auto (row for the pattern anchor, otherwise document).",
    )
    eos: bool = Field(default=True, description="End every document with EOS.")
    tag: str | None = Field(
        default=None,
        description='Text to insert before each document, excluded from the loss. "{source}" stands for the name of '
        "the document's source. Default: no text.",
    )
    long_documents: LongDocuments = Field(
        default="split",
        description="What to do with a document longer than a row: split it over several rows, truncate it to one row, "
        "or skip it.",
    )
    packing: Packing = Field(
        default="sequential",
        description="How to fill rows: sequential (keep the order of the documents, and cut a document where its row "
        "ends) or best_fit (cut only documents longer than a row, and pad).",
    )
    remainder: Remainder = Field(
        default="drop",
        description="What to do with the last row (with best_fit, the emptiest row) if it is not full: drop its "
        "tokens, or pad it.",
    )
    interleave: InterleaveSettings | None = Field(
        default=None,
        description="Cut the documents of each row into chunks and shuffle the chunks within the row: true, or a "
        "mapping with the keys `data.interleave.*` below.",
    )
    bos_token: SpecialToken | None = Field(
        default=None,
        description="Special token of the tokenizer that is BOS in rows. Default: its bos_token.",
    )
    eos_token: SpecialToken | None = Field(
        default=None,
        description="Special token of the tokenizer that ends documents. Default: its eos_token.",
    )
    anchor_token: SpecialToken | None = Field(
        default=None,
        description="Special token of the tokenizer that is the anchor of each row, for the pattern anchor. Default: "
        "BOS, or EOS for a tokenizer without BOS.",
    )

    @field_validator("tag")
    @classmethod
    def _template(cls, tag: str | None) -> str | None:
        if tag is not None:
            _check_tag(tag)
        return tag

    @field_validator("interleave", mode="before")
    @classmethod
    @written({"const": False})
    def _off(cls, value: Any) -> Any:
        return None if value is False else value

    @model_validator(mode="after")
    def _tokens_are_used(self) -> RowPolicies:
        if self.bos_token is not None and self.bos == "none":
            raise ValueError(f"bos_token {self.bos_token} has no effect with bos none; omit one of them")
        if self.eos_token is not None and not self.eos:
            raise ValueError(f"eos_token {self.eos_token} has no effect with eos false; omit one of them")
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit tokens that are not chosen, so that rows and recipes of earlier versions are found."""
        stated: dict[str, Any] = handler(self)
        later = (*TOKENS, *LIMITS)
        return {key: value for key, value in stated.items() if key not in later or value is not None}


class PackingSettings(RowPolicies):
    """Settings for packing documents into rows of one length and attention pattern.

    Attributes:
        pattern: attention pattern, as in PackedLayout. ``anchor`` puts one anchor token at index 0.
        positions: with ``reset``, the continuation of a cut document also restarts at its first token in the row.
        documents_up_to, documents_above: a document counts with the tokenizer's BOS and EOS and with its tag, whether
            or not its row has them, so that folders of short and of long documents share none and lack none.
    """

    context: Annotated[Length, Option(name="--length"), COMMON] = Field(
        ge=2, description="Row length in tokens, such as 131072 or 128k."
    )
    pattern: Annotated[Pattern, COMMON] = Field(
        default="anchor",
        description="What a token attends to in training: full (all earlier tokens), intra_document (its document) or "
        "anchor (its document and the first token of the row).",
    )
    positions: Positions = Field(
        default="continuous",
        description="RoPE positions: continuous (they count through the row) or reset (they restart in each document).",
    )
    documents_up_to: Length | None = Field(
        default=None,
        ge=1,
        description="Pack only documents of at most this many tokens, with BOS, tag and EOS. Default: documents of "
        "any length.",
    )
    documents_above: Length | None = Field(
        default=None,
        ge=1,
        description="Pack only documents of more than this many tokens, with BOS, tag and EOS. Default: documents of "
        "any length.",
    )

    @property
    def kind(self) -> str | None:
        """The documents that are packed, in words; None if their lengths do not matter."""
        limits = []
        if self.documents_above is not None:
            limits.append(f"more than {self.documents_above:,} tokens")
        if self.documents_up_to is not None:
            limits.append(f"at most {self.documents_up_to:,} tokens")
        return f"documents of {' and '.join(limits)}" if limits else None

    @model_validator(mode="after")
    def _some_length_is_left(self) -> PackingSettings:
        above, up_to = self.documents_above, self.documents_up_to
        if above is not None and up_to is not None and above >= up_to:
            raise ValueError(
                f"documents_above {above} and documents_up_to {up_to} leave no document; raise documents_up_to, or "
                "omit one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_bos(self) -> PackingSettings:
        if self.pattern == "anchor" and self.bos not in ("auto", "row"):
            raise ValueError(
                "the pattern anchor starts each row with the anchor and allows no other BOS; set bos to auto or row"
                f", got {self.bos}"
            )
        if self.interleave is not None and self.bos == "row" and self.pattern != "anchor":
            raise ValueError(
                "interleaving would move the BOS that bos row puts first in a row; set bos to document or none "
                f"with the pattern {self.pattern}"
            )
        if self.anchor_token is not None and self.pattern != "anchor":
            raise ValueError(
                f"anchor_token {self.anchor_token} has no effect on the pattern {self.pattern}; set pattern to anchor, "
                "or omit anchor_token"
            )
        return self

    @property
    def anchor_length(self) -> int:
        """Number of tokens before the first document of a row."""
        return 1 if self.pattern == "anchor" else 0

    def bos_policy(self, special: SpecialTokens) -> Literal["document", "row", "none"]:
        """The BOS policy for this tokenizer, with ``auto`` resolved.

        Raises:
            RopewalkError: if the settings require a BOS or EOS token that the tokenizer lacks.
        """
        if self.eos and special.eos is None:
            raise RopewalkError(
                "the tokenizer has no EOS token to end documents with; choose one of its tokens with eos_token, or set "
                "eos to false"
            )
        if self.bos == "auto":
            if self.pattern == "anchor":
                return "row"
            return "none" if special.bos is None else "document"
        if special.bos is None and (
            self.bos == "document" or (self.bos == "row" and self.pattern != "anchor")
        ):
            raise RopewalkError(
                f"the tokenizer has no BOS token to start a {self.bos} with; choose one of its tokens with bos_token, "
                "or set bos to none"
                + ("" if self.bos == "document" else ", or set pattern to anchor, which starts rows with EOS")
            )
        return self.bos

    def room(self, special: SpecialTokens) -> int:
        """Number of tokens in a row available to documents: all except a BOS that starts every row."""
        return self.context - (self.bos_policy(special) == "row")


def _check_tag(tag: str) -> None:
    """Refuse a tag that is not a valid template, is empty, or uses any field other than ``{source}``."""
    try:
        parts = list(string.Formatter().parse(tag))
    except ValueError as error:
        raise ValueError(
            f"the tag {tag!r} is not a valid template: {error}; write {{source}} for the source name"
        ) from error
    for _, name, specification, conversion in parts:
        if name is not None and (name != "source" or specification or conversion):
            raise ValueError(
                f"the tag {tag!r} may contain only the placeholder {{source}}, without a format specification"
            )
    if not tag:
        raise ValueError("the tag is empty; omit it to insert no tag")


class ValidationSettings(Settings):
    """Settings of the validation split: how many documents to hold out. None by default.

    Attributes:
        documents: holds out the documents with the smallest hashes; all documents if the corpus has fewer.
        fraction: approximate share of the documents, chosen by their hashes.
    """

    group: ClassVar[str | None] = "Validation"

    documents: Annotated[Count, Option(name="--validation-documents"), COMMON] = Field(
        default=0, ge=0, description="Number of documents to hold out for validation."
    )
    fraction: Annotated[float, Option(name="--validation-fraction")] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of the documents to hold out, instead of --validation-documents.",
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
"""Requirement on ``shard``; error messages put the setting's name before it."""


class WorkSettings(Settings):
    """How to divide the work, and where to keep intermediate files; none of this changes a row.

    Attributes:
        engine, address: see :mod:`ropewalk.runs.executors`.
        shard: (index from 0, number of machines). Machines that share the folder of rows share the work: each does its
            own share first, then what is missing of the others'.
        token_store: if None, tokenised documents stay in the rows' folder until the rows are complete.
    """

    group: ClassVar[str | None] = "Work"

    engine: Annotated[Literal["embedded", "ray"], Option()] = Field(
        default="embedded",
        description="Where to run the work: embedded (in processes on this machine) or ray (on a Ray cluster whose "
        "nodes share the folder of --out).",
    )
    address: Annotated[str | None, Option(metavar="HOST:PORT")] = Field(
        default=None,
        description="Ray cluster to use: auto (the cluster of this machine), or the address of a cluster's head "
        "node. Default: the environment variable RAY_ADDRESS if it is set, otherwise a new Ray cluster on this "
        "machine alone.",
    )
    shard: Annotated[tuple[int, int], Option(metavar="I/N", text=lambda shard: f"{shard[0]}/{shard[1]}")] = (
        Field(
            default=(0, 1),
            description="Part of the work to do first on this machine, counted from 0: 0/4 to 3/4 on four machines "
            "that share the folder of --out. Not with --engine ray.",
        )
    )
    token_store: Annotated[Path | None, Option(metavar="DIR")] = Field(
        default=None,
        description="Folder in which to keep the tokenised documents, so that later commands and other machines need "
        "not tokenise them again. Default: they are deleted when the rows are complete.",
    )
    workers: Annotated[Workers, COMMON] = 0

    @field_validator("shard", mode="before")
    @classmethod
    @written(TEXT)
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

    @model_validator(mode="after")
    def _one_division_of_the_work(self) -> WorkSettings:
        if self.engine == "ray" and self.shard != (0, 1):
            raise ValueError("engine ray divides the work among its nodes; omit shard")
        if self.engine != "ray" and self.address is not None:
            raise ValueError(f"address {self.address} is that of a Ray cluster; set engine to ray")
        return self


class PackSettings(Settings):
    """Settings for packing documents, independent of their sources.

    Attributes:
        rows: how to pack documents into rows.
        mixture: which documents to read, how often and in which order.
        validation: which documents to hold out.
        work: how to divide the work; does not change any row.
    """

    tokenizer: Annotated[str, COMMON] = Field(description="Tokenizer or model: a folder or a Hub id.")
    rows: PackingSettings
    mixture: MixtureSettings = MixtureSettings()
    validation: ValidationSettings = ValidationSettings()
    work: WorkSettings = WorkSettings()


class PackConfig(PackSettings):
    """Full configuration of a packing run: :class:`PackSettings` plus the sources in reading order."""

    sources: tuple[SourceSpec, ...] = Field(description="Sources of the documents, in reading order.")
    withheld: tuple[int, ...] = Field(
        default=(),
        description="Hashes of texts to leave out, because other rows hold them out for validation.",
    )

    def alone(self) -> PackConfig:
        """This configuration for a single machine that keeps its tokens in the rows' folder."""
        work = self.work.model_copy(
            update={"shard": (0, 1), "token_store": None, "engine": "embedded", "address": None}
        )
        return self.model_copy(update={"work": work})


class CountSettings(Settings):
    """Settings for counting documents and tokens."""

    tokenizer: Annotated[str | None, COMMON] = Field(
        default=None,
        description="Tokenizer or model: a folder or a Hub id. Default: the tokenizer of a tiny model that ropewalk "
        "ships.",
    )
    length: Annotated[Length | None, COMMON] = Field(
        default=None,
        ge=2,
        description="Row length in tokens, such as 128k, for which to compare attention in packed rows with full "
        "attention. Default: the trained length of the model in the tokenizer's folder or repository. If there is no "
        "such model, this comparison is left out.",
    )
    workers: Annotated[Workers, COMMON] = 0


class StatsConfig(CountSettings):
    """Configuration of a count, over documents or over one folder of packed rows.

    Packed rows state their own tokenizer and length.
    """

    sources: tuple[SourceSpec, ...] = Field(
        min_length=1, description="One folder of packed rows, or sources of documents."
    )


class PreviewConfig(Settings):
    """Settings of a preview: the rows to show, and how much of each document."""

    rows: Count = Field(default=3, ge=1, description="Number of rows to print, starting with the first.")
    tokenizer: str | None = Field(
        default=None,
        description="Tokenizer or model: a folder or a Hub id. Required only if the tokenizer has moved since the rows "
        "were packed.",
    )
    tokens: Count = Field(
        default=200,
        ge=1,
        description="Number of tokens to print at the start and at the end of each document.",
    )
