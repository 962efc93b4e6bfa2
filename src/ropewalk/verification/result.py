"""What one comparison found, what it is called, and what all of them found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.io.results import Result


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


@dataclass(frozen=True, kw_only=True)
class Check(Outcome):
    """One line of the report: an outcome, and what it is of.

    Attributes:
        name: what should hold.
        compared: what with what.
        seconds: it took.
    """

    name: str
    compared: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, the name first; an error that is no number is None."""
        finite = self.error is not None and math.isfinite(self.error)
        own = {"name": self.name, "compared": self.compared}
        return {**own, **asdict(self), "error": self.error if finite else None}


@dataclass(frozen=True)
class VerifyResult(Result):
    """What all checks found, in the process that leads.

    Attributes:
        model: the recipe's.
        layers: first layers that were verified; None for all.
        rows, length: packed rows and tokens of each that were verified.
        context: of the recipe's first stage, tokens.
        pattern, precision, device: as of :class:`~ropewalk.verification.case.Case`.
        versions: of the software.
        mesh: which processes ran.
        recipe_mesh: the recipe's, where it was verified.
        seconds: that all took.
        checks: in the order that they ran.
    """

    model: str
    layers: int | None
    rows: int
    length: int
    context: int
    pattern: str
    precision: str
    device: str
    versions: dict[str, str]
    mesh: str
    recipe_mesh: str | None
    seconds: float
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check.name for check in self.checks if check.passed is False]

    def to_json(self) -> dict[str, Any]:
        """The counts of what passed, failed and did not run stand before the checks."""
        plain = super().to_json()
        checks = plain.pop("checks")
        verdicts = [check.passed for check in self.checks]
        counts = {name: verdicts.count(verdict) for name, verdict in VERDICTS.items()}
        return {**plain, **counts, "checks": checks}


VERDICTS = {"passed": True, "failed": False, "not_run": None}
"""Names of the counts."""
