"""The recipe's part on documents: the settings of data, composed, and which stage's rows are packed already."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from ropewalk.data.settings import DECIDES_ROWS, MixtureSettings, RowPolicies, SourceSpec
from ropewalk.io.settings import FREE, SAME, Count, Settings


class _Documents(Settings):
    """Where the documents come from, and how they are mixed; these keys stand before the policies of rows."""

    sources: list[SourceSpec] = Field([], description="where the documents come from; or `rows`")
    rows: Annotated[list[str], SAME] = Field(
        [], description="folders of `ropewalk data pack`, one for each context and pattern of the stages"
    )
    mixture: MixtureSettings | None = Field(
        None, description="which documents, how often; all once, as they come"
    )


class Data(RowPolicies, _Documents):
    """Which documents, and how they become rows."""

    on_resume = DECIDES_ROWS

    validation_documents: Count = Field(
        256, ge=0, description="documents held out of training for the evaluation before and after"
    )
    validation_sources: list[SourceSpec] = Field(
        [], description="documents for the evaluation from elsewhere, in place of held-out ones"
    )
    workers: Annotated[Count, FREE] = Field(1, ge=1, description="tokenisation processes")
    cache: Annotated[str | None, FREE] = Field(
        None, description="folder of packed rows; `data` in the output folder if not given"
    )

    @model_validator(mode="after")
    def _sources_or_rows(self) -> Data:
        if bool(self.sources) == bool(self.rows):
            raise ValueError("give either sources, or rows that are packed already")
        if self.rows:
            decided = ("mixture", *RowPolicies.model_fields, "validation_documents", "workers", "cache")
            fields = type(self).model_fields
            given = [key for key in decided if getattr(self, key) != fields[key].default]
            if given:
                raise ValueError(f"{given[0]} was decided when the rows were packed; leave it out")
        return self
