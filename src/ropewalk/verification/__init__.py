"""verify: on the user's own model and documents, that packing, ranks, checkpoints and RoPE change no number."""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.verification.case import Case, prepare
    from ropewalk.verification.result import Check, Outcome
    from ropewalk.verification.running import Planned, planned_checks, run_in, run_planned, summary, verify

_HOMES = {
    "Case": "case",
    "Check": "result",
    "Outcome": "result",
    "Planned": "running",
    "planned_checks": "running",
    "prepare": "case",
    "run_in": "running",
    "run_planned": "running",
    "summary": "running",
    "verify": "running",
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
