"""Data section of a recipe: sources or packed rows, and the settings of packing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.data.settings import RowPolicies, SourceSpec
from ropewalk.io.settings import FREE, Count, Settings


class _Documents(Settings):
    """Where the documents come from, and how they are mixed; these keys stand before the policies of rows."""

    sources: list[SourceSpec] = Field(
        default=[], description="sources of documents; give either sources or rows"
    )
    rows: Annotated[list[str], FREE] = Field(
        default=[],
        description="folders of rows that `ropewalk data pack` wrote: one folder for each combination of context and "
        "attention pattern in the stages",
    )
    mixture: MixtureSettings | None = Field(
        default=None,
        description="which documents to use and how often; default: every document once, in order",
    )


class StageData(_Documents):
    """Documents of one stage; keys that are not given are the run's."""

    sources: list[SourceSpec] = Field(
        default=[],
        description="sources of this stage's documents; only if the run's data has sources, not rows; default: the "
        "run's sources",
    )
    rows: Annotated[list[str], FREE] = Field(
        default=[],
        description="folders of this stage's packed rows; only if the run's data has rows, not sources; default: the "
        "run's rows",
    )
    mixture: MixtureSettings | None = Field(
        default=None, description="which documents to use and how often; default: the run's mixture"
    )

    def over(self, data: Data) -> Data:
        """The run's data with the documents of this stage.

        Raises:
            ValidationError: if the stage names packed rows and the run sources, or the other way round.
        """
        own = {name: value for name in _Documents.model_fields if (value := getattr(self, name))}
        return Data.model_validate({**dict(data), **own})


class Data(RowPolicies, _Documents):
    """Which documents, and how they become rows."""

    validation_documents: Count = Field(
        default=256, ge=0, description="number of documents to hold out of training for evaluation"
    )
    validation_sources: list[SourceSpec] = Field(
        default=[], description="sources of the evaluation's documents, instead of held-out documents"
    )
    workers: Annotated[Count, FREE] = Field(default=1, ge=1, description="number of tokenisation processes")
    cache: Annotated[str | None, FREE] = Field(
        default=None, description="folder for packed rows; default: `data` in the output folder"
    )

    @model_validator(mode="after")
    def _sources_or_rows(self) -> Data:
        if bool(self.sources) == bool(self.rows):
            raise ValueError("set either 'sources' (documents) or 'rows' (packed rows), not both")
        if self.rows:
            decided = ("mixture", *RowPolicies.model_fields, "validation_documents", "workers", "cache")
            fields = type(self).model_fields
            given = [key for key in decided if getattr(self, key) != fields[key].default]
            if given:
                raise ValueError(
                    f"{given[0]!r} has no effect on rows that are packed already; omit {given[0]!r}"
                )
        return self
