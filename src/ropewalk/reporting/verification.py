"""Show a verification, and the probe of a trainer."""

from __future__ import annotations

from collections.abc import Iterator

from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.verification.case import first_layers
from ropewalk.verification.result import VerifyResult
from ropewalk.verification.trainers.probe import TrainerProbeResult

PASSED = {True: "yes", False: "NO", None: MISSING}
RESULTS = {True: "passed", False: "FAILED", None: MISSING}


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
    yield _counts(result)


def describe_trainer_probe(result: TrainerProbeResult) -> Iterator[Part]:
    """Table with one line for each check, and the counts."""
    ranks = "" if result.ranks == 1 else f", {result.ranks} processes"
    yield ResultTable(
        f"{result.trainer}: one step on {result.documents} documents of {result.tokens:,} tokens in all{ranks}",
        ("check", "result", "what was seen, and what to do"),
        tuple((check.name, RESULTS[check.passed], check.note) for check in result.checks),
        text_columns=3,
    )
    yield ""
    yield _counts(result)


def _counts(result: VerifyResult | TrainerProbeResult) -> str:
    found = [check.passed for check in result.checks]
    verdicts = ((True, "passed"), (False, "failed"), (None, "not run"))
    return (
        ", ".join(f"{found.count(verdict)} {word}" for verdict, word in verdicts)
        + f" in {result.seconds:.0f} s"
    )


def _figure(value: float | None) -> str:
    return MISSING if value is None else "0" if value == 0 else f"{value:.1e}"
