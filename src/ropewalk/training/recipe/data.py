"""The recipe's part on documents: where they come from, how they are mixed and framed, how they become rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import FREE, SAME, Count, Length, OnResume, Settings, Tokens

_PACKED = "it decides the rows, and those of the run are packed"


class Source(Settings):
    """One place that documents come from; a plain string in the recipe is its path."""

    on_resume = OnResume("fixed", _PACKED)

    path: str = Field(description="file, folder, hf:owner/name[:config][@split], or embedded")
    name: str | None = Field(
        None, description="source name of its documents; their own field or the file's stem"
    )
    text_field: str = Field("text", description="field that holds the text (JSONL, Parquet, hub)")
    source_field: str | None = Field("source", description="field that names the source where there is one")
    max_documents: Count | None = Field(None, ge=1, description="read no more documents than this; all")

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class Mixture(Settings):
    """Which documents, how often; with none of these every document once, in the order of the sources."""

    on_resume = OnResume("fixed", _PACKED)

    weights: dict[str, float] | None = Field(
        None, description="how often each source is read; 1 if not named"
    )
    shares: dict[str, float] | None = Field(None, description="or: share of tokens of each source")
    tokens: Tokens | None = Field(None, description="tokens that the mixture is to have")
    long_from: Length | None = Field(None, description="a document this long is long")
    long_factor: float | None = Field(None, description="draw long documents this many times as often")
    long_share: float | None = Field(None, description="or: share of each source's tokens in long documents")
    length_shares: tuple[tuple[Length, float], ...] | None = Field(
        None, description="or: share of tokens by length, `[[0, 0.3], [4k, 0.3], [32k, 0.4]]`"
    )
    per: Literal["source", "corpus"] = Field(
        "source", description="upsample within each source, which keeps their shares, or over all"
    )
    max_epochs: float = Field(4.0, description="no document is read more often, rounded up")
    shortage: Literal["refuse", "cap"] = Field(
        "refuse", description="where that is not enough: refuse, or cap and report"
    )
    shuffle: bool = Field(False, description="random order; a mixture has it anyway")
    seed: int = Field(0, ge=0, lt=2**63, description="of the choice and the order")

    @model_validator(mode="after")
    def _check(self) -> Mixture:
        # Imported here: a recipe without a mixture needs none of it.
        from ropewalk.data.mixture.mixture import MixtureSettings

        with _refused_as_value():
            MixtureSettings(**self.model_dump())
        return self


class Interleave(Settings):
    """Interleaved chunks; defaults as in AnchorContext. `true` in the recipe takes the defaults."""

    on_resume = OnResume("fixed", _PACKED)

    min_length: Length = Field(64, description="shortest document that is cut")
    max_length: Length = Field(2048, description="longest document that is cut")
    parts: tuple[Count, ...] = Field((2, 3), description="into how many parts, one of these")
    cut_points: tuple[float, float] = Field((0.2, 0.8), description="cuts lie between these shares")
    seed: int = Field(0, ge=0, lt=2**63, description="of the cuts and the shuffle")

    @model_validator(mode="before")
    @classmethod
    def _from_flag(cls, value: Any) -> Any:
        return {} if value is True else value

    @model_validator(mode="after")
    def _check(self) -> Interleave:
        from ropewalk.data.rows.settings import InterleaveSettings

        with _refused_as_value():
            InterleaveSettings(**self.model_dump())
        return self


class Data(Settings):
    """Which documents, and how they are framed."""

    on_resume = OnResume("fixed", _PACKED)

    sources: list[Source] = Field([], description="where the documents come from; or `rows`")
    rows: Annotated[list[str], SAME] = Field(
        [], description="folders of `ropewalk data pack`, one for each context and pattern of the stages"
    )
    mixture: Mixture | None = Field(None, description="which documents, how often; all once, as they come")
    bos: Literal["auto", "document", "row", "none"] = Field(
        "auto", description="auto: one a row for anchor (the anchor), else one a document"
    )
    eos: bool = Field(True, description="an EOS token ends every document")
    tag: str | None = Field(
        None, description="text before each document, not trained on; `{source}` is its source"
    )
    long_documents: Literal["split", "truncate", "skip"] = Field(
        "split", description="what becomes of a document longer than a row"
    )
    packing: Literal["sequential", "best_fit"] = Field(
        "sequential", description="cut documents at a row's end, or only those longer than a row, and pad"
    )
    remainder: Literal["drop", "pad"] = Field("drop", description="what becomes of the row that is not full")
    interleave: Interleave | None = Field(None, description="cut documents and shuffle the parts of a row")
    validation_documents: Count = Field(
        256, ge=0, description="documents held out of training for the evaluation before and after"
    )
    validation_sources: list[Source] = Field(
        [], description="documents for the evaluation from elsewhere, in place of held-out ones"
    )
    workers: Annotated[Count, FREE] = Field(1, ge=1, description="tokenisation processes")
    cache: Annotated[str | None, FREE] = Field(
        None, description="folder of packed rows; `data` in the output folder if not given"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_interleaving(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("interleave") is False:
            return {**value, "interleave": None}
        return value

    @model_validator(mode="after")
    def _sources_or_rows(self) -> Data:
        if self.tag is not None:
            from ropewalk.data.rows.settings import check_tag

            with _refused_as_value():
                check_tag(self.tag)
        if bool(self.sources) == bool(self.rows):
            raise ValueError("give either sources, or rows that are packed already")
        if self.rows:
            decided = (
                "mixture",
                "bos",
                "eos",
                "tag",
                "long_documents",
                "packing",
                "remainder",
                "interleave",
                "validation_documents",
                "workers",
                "cache",
            )
            fields = type(self).model_fields
            given = [key for key in decided if getattr(self, key) != fields[key].default]
            if given:
                raise ValueError(f"{given[0]} was decided when the rows were packed; leave it out")
        return self


@contextmanager
def _refused_as_value() -> Iterator[None]:
    """pydantic collects ValueErrors alone."""
    try:
        yield
    except RopewalkError as error:
        raise ValueError(str(error)) from error
