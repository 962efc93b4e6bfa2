"""Show the probe of a trainer."""

from __future__ import annotations

from collections.abc import Iterator

from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.verification.trainers.probe import TrainerProbeResult

RESULTS = {True: "passed", False: "FAILED", None: MISSING}


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
    found = [check.passed for check in result.checks]
    words = ((True, "passed"), (False, "failed"), (None, "not run"))
    yield ", ".join(f"{found.count(passed)} {word}" for passed, word in words) + f" in {result.seconds:.0f} s"
