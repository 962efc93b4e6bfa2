"""Check and Outcome: what one comparison found, and what it is called."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What one comparison found.

    Attributes:
        error: how far the two sides differ; None where nothing was compared.
        budget: how far they may, from rounding alone.
        passed: None where the check has nothing to compare here, and ``note`` says why.
        note: what was compared, or what is wrong, in words.
    """

    error: float | None
    budget: float | None
    passed: bool | None
    note: str = ""

    @classmethod
    def within(cls, error: float, budget: float, good: str, bad: str) -> Outcome:
        """Passed where the error is a number and within the budget; ``bad`` says what is wrong otherwise."""
        passed = math.isfinite(error) and error <= budget
        return cls(error, budget, passed, good if passed else bad)

    @classmethod
    def not_run(cls, reason: str) -> Outcome:
        return cls(None, None, None, reason)


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what should hold.
        compared: what with what.
        error, budget, passed, note: as of :class:`Outcome`.
        seconds: it took.
    """

    name: str
    compared: str
    error: float | None
    budget: float | None
    passed: bool | None
    seconds: float
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values; an error that is no number is None."""
        finite = self.error is not None and math.isfinite(self.error)
        return {**asdict(self), "error": self.error if finite else None}
