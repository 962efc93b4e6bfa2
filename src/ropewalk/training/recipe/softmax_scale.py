"""Softmax scale section of a recipe: a constant on attention's scores, measured after training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.io.settings import Count, Length, Settings

UNSCALED = 1.0


class SoftmaxScale(Settings):
    """A constant factor on the scores of attention, chosen after training by the loss at longer lengths.

    Every scale is measured on the same held-out documents, which no evaluation reads. Its objective is the mean over
    the lengths of the mean loss per token of the first so many tokens of each row. The scale with the lowest one is
    folded into the weights. 1 is always measured, and taken if none is better.
    """

    lengths: list[Length] = Field(
        min_length=1,
        description="target lengths in tokens; the objective is the mean of the losses at these lengths",
    )
    scales: list[Annotated[float, Field(gt=0)]] = Field(
        default=[0.9, 1.1, 1.2, 1.3, 1.4, 1.5],
        min_length=1,
        description="scales to measure, besides 1",
    )
    documents: Count = Field(
        default=4,
        ge=1,
        description="number of rows of the longest length to measure on; a row is the beginning of one document, or "
        "several documents joined if too few are long enough",
    )

    @property
    def candidates(self) -> list[float]:
        """The scales to measure, 1 first."""
        return list(dict.fromkeys([UNSCALED, *self.scales]))
