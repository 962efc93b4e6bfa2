"""Result types: the outcome of one comparison, a named check, and the result of all checks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.io.results import Result


@dataclass(frozen=True)
class Outcome:
    """Outcome of one comparison.

    Attributes:
        error: difference of the two sides; None if nothing was compared.
        budget: largest difference that rounding alone explains; None if nothing was compared.
        passed: whether ``error`` is within ``budget``. None if the check does not apply here; ``note`` then gives the
            reason.
        note: details as text: how much was compared, such as the numbers of documents and rows; if the check failed,
            what is wrong; if the check was not run, the reason.
    """

    error: float | None
    budget: float | None
    passed: bool | None
    note: str = ""

    @classmethod
    def within(cls, error: float, budget: float, good: str, bad: str) -> Outcome:
        """Pass if the error is finite and within the budget; the note is ``good`` on success and ``bad`` on failure."""
        passed = math.isfinite(error) and error <= budget
        return cls(error, budget, passed, good if passed else bad)

    @classmethod
    def not_run(cls, reason: str) -> Outcome:
        return cls(None, None, None, reason)


@dataclass(frozen=True, kw_only=True)
class Check(Outcome):
    """One line of the report: an outcome with the name of its check.

    Attributes:
        name: the property that was checked.
        compared: the two sides of the comparison, as "A with B"; the text depends only on the name.
        seconds: duration of the check.
    """

    name: str
    compared: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the name first; a non-finite error becomes None, since JSON has no infinity."""
        finite = self.error is not None and math.isfinite(self.error)
        own = {"name": self.name, "compared": self.compared}
        # asdict alone would put the inherited fields before the name.
        return {**own, **asdict(self), "error": self.error if finite else None}


@dataclass(frozen=True)
class VerifyResult(Result):
    """Result of all checks, on rank 0.

    Attributes:
        model: model of the recipe.
        layers: number of layers that were verified, counted from the first; None for all layers.
        rows, length: number of packed rows that were verified, and tokens per row.
        context: context of the recipe's first stage, in tokens.
        pattern, precision, device: attention pattern, precision and device that were verified.
        versions: versions of the software.
        mesh: number of processes that ran the checks, and how they were started, in words.
        recipe_mesh: the recipe's own mesh, if checks ran on it in addition to ``mesh``; otherwise None.
        seconds: duration of all checks together.
        checks: the checks in the order in which they ran.
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
        """Plain values, with the numbers of passed, failed and skipped checks before the checks."""
        plain = super().to_json()
        checks = plain.pop("checks")
        verdicts = [check.passed for check in self.checks]
        counts = {name: verdicts.count(verdict) for name, verdict in VERDICTS.items()}
        return {**plain, **counts, "checks": checks}


VERDICTS = {"passed": True, "failed": False, "not_run": None}
"""Value of ``passed`` that each count of :meth:`VerifyResult.to_json` counts."""
