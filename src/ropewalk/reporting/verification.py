"""Show a verification."""

from __future__ import annotations

from collections.abc import Iterator

from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.verification.case import first_layers
from ropewalk.verification.result import VerifyResult

PASSED = {True: "yes", False: "NO", None: MISSING}


def describe_verification(result: VerifyResult) -> Iterator[Part]:
    """Table of the checks, the reasons of those that failed or did not run, and the counts."""
    layers = "" if result.layers is None else f", {first_layers(result.layers)}"
    yield ResultTable(
        f"{result.model}{layers}: {result.rows} sequences of {result.length:,} tokens, pattern {result.pattern}; "
        f"{result.mesh}",
        ("check", "error", "budget", "passed", "seconds"),
        tuple(
            (
                check.name,
                _figure(check.error),
                _figure(check.budget),
                PASSED[check.passed],
                f"{check.seconds:.1f}",
            )
            for check in result.checks
        ),
        notes=("budget: the largest error that rounding alone explains",),
    )
    yield ""
    for verdict, word in ((None, "not run"), (False, "failed")):
        for check in result.checks:
            if check.passed is verdict:
                yield f"{word}: {check.name}: {check.note.removeprefix('not run here: ')}"
    found = [check.passed for check in result.checks]
    verdicts = ((True, "passed"), (False, "failed"), (None, "not run"))
    counts = ", ".join(f"{found.count(verdict)} {word}" for verdict, word in verdicts)
    yield f"{counts} in {result.seconds:.0f} s"


def _figure(value: float | None) -> str:
    return MISSING if value is None else "0" if value == 0 else f"{value:.1e}"
