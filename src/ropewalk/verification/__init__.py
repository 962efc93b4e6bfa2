"""verify: check that packing, parallelism, and saving and loading checkpoints do not change a model's results."""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.verification.case import Case, prepare
    from ropewalk.verification.checks import Claim, Planned, planned_checks
    from ropewalk.verification.result import Check, Outcome, VerifyResult
    from ropewalk.verification.run import run_checks, run_in, run_planned, verify
    from ropewalk.verification.settings import VerifySettings

_HOMES = {
    "Case": "case",
    "Check": "result",
    "Claim": "checks",
    "Outcome": "result",
    "Planned": "checks",
    "VerifyResult": "result",
    "VerifySettings": "settings",
    "planned_checks": "checks",
    "prepare": "case",
    "run_checks": "run",
    "run_in": "run",
    "run_planned": "run",
    "verify": "run",
}

__all__ = [
    "Case",
    "Check",
    "Claim",
    "Outcome",
    "Planned",
    "VerifyResult",
    "VerifySettings",
    "planned_checks",
    "prepare",
    "run_checks",
    "run_in",
    "run_planned",
    "verify",
]


__getattr__ = lazy_names(__name__, _HOMES)
