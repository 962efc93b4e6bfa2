"""verify: on the user's own model and documents, that packing, ranks, checkpoints and RoPE change no number."""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.verification.case import Case, prepare
    from ropewalk.verification.result import Check, Outcome
    from ropewalk.verification.run import Planned, planned_checks, run_in, run_planned, summary, verify

_HOMES = {
    "Case": "case",
    "Check": "result",
    "Outcome": "result",
    "Planned": "run",
    "planned_checks": "run",
    "prepare": "case",
    "run_in": "run",
    "run_planned": "run",
    "summary": "run",
    "verify": "run",
}

__all__ = [
    "Case",
    "Check",
    "Outcome",
    "Planned",
    "planned_checks",
    "prepare",
    "run_in",
    "run_planned",
    "summary",
    "verify",
]


__getattr__ = lazy_names(__name__, _HOMES)
