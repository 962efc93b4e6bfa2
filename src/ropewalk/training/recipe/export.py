"""Export section of a recipe: which weights become the result of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ropewalk.io.settings import FREE, Count, Settings, written

AVERAGE_OF = 5


class Export(Settings):
    """Which weights of the last stage a run exports; a plain word, such as ``average``, sets ``weights``."""

    free = FREE

    weights: Literal["last", "best", "average"] = Field(
        default="last",
        description="weights to export; last: those after the last step; best: those with the best score during "
        "training; average: the mean of the last checkpoints' weights (arXiv:2411.13476 averages the scores of five "
        "checkpoints instead)",
    )
    average_of: Count = Field(
        default=AVERAGE_OF,
        ge=2,
        description="average: number of latest checkpoints to average; checkpoints.keep must be at least as large",
    )
    by: str | None = Field(
        default=None,
        min_length=1,
        description="best: name of the score that decides, such as passkey/1024 or ruler/vt/4096; the name of a "
        "suite or task alone, such as ruler or ruler/vt, stands for the mean of its scores; default: the suite of "
        "the evaluations during training; required if there are several suites",
    )

    @model_validator(mode="before")
    @classmethod
    @written({"enum": ["last", "best", "average"]})
    def _from_word(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Export):
            raise ValueError(
                "must be 'last', 'best', 'average' or a mapping with the keys 'weights', 'average_of' and 'by'"
            )
        return {"weights": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Export:
        if self.average_of != AVERAGE_OF and self.weights != "average":
            raise ValueError(
                f"average_of is {self.average_of}, which has no effect if 'weights' is {self.weights!r}; remove "
                "average_of"
            )
        if self.by is not None and self.weights != "best":
            raise ValueError(
                f"the key 'by' ({self.by}) has no effect if 'weights' is {self.weights!r}; remove 'by'"
            )
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> Any:
        """Write a plain word if nothing else is set."""
        return self.weights if Export(weights=self.weights) == self else handler(self)

    def selects(self, name: str, only: str) -> bool:
        """Whether a measurement's score decides which weights are the best.

        Args:
            name: name of the measurement, such as ``passkey/1024``.
            only: name to go by if the recipe gives none.
        """
        by = (self.by or only).split("/")
        return name.split("/")[: len(by)] == by
