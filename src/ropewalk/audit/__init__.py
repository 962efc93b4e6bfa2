"""How far arithmetic breaks relative positions in a model, in which step, and what mends it.

Names are imported on first use: reading results needs no torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.audit.ablation import dominant_step, ladder
    from ropewalk.audit.arithmetic import EXACT, STEPS, Arithmetic, stock_arithmetic
    from ropewalk.audit.drift import Series, measure_drift
    from ropewalk.audit.effective_frequencies import angle_error_with_turns, rope_findings, rope_stages
    from ropewalk.audit.first_token import first_token_effects
    from ropewalk.audit.mitigations import measure_mends
    from ropewalk.audit.passes import Runner, Subject, logit_difference
    from ropewalk.audit.results import Audit, Drift, FirstTokenEffect, Mend, RopeStage, Rung, Sink
    from ropewalk.audit.run import AuditSettings, audit, forward_passes
    from ropewalk.audit.summary import finding

_HOMES = {
    "EXACT": "arithmetic",
    "STEPS": "arithmetic",
    "Arithmetic": "arithmetic",
    "Audit": "results",
    "AuditSettings": "run",
    "Drift": "results",
    "FirstTokenEffect": "results",
    "Mend": "results",
    "RopeStage": "results",
    "Rung": "results",
    "Runner": "passes",
    "Series": "drift",
    "Sink": "results",
    "Subject": "passes",
    "angle_error_with_turns": "effective_frequencies",
    "audit": "run",
    "dominant_step": "ablation",
    "finding": "summary",
    "first_token_effects": "first_token",
    "forward_passes": "run",
    "ladder": "ablation",
    "logit_difference": "passes",
    "measure_drift": "drift",
    "measure_mends": "mitigations",
    "rope_findings": "effective_frequencies",
    "rope_stages": "effective_frequencies",
    "stock_arithmetic": "arithmetic",
}

__all__ = [
    "EXACT",
    "STEPS",
    "Arithmetic",
    "Audit",
    "AuditSettings",
    "Drift",
    "FirstTokenEffect",
    "Mend",
    "RopeStage",
    "Rung",
    "Runner",
    "Series",
    "Sink",
    "Subject",
    "angle_error_with_turns",
    "audit",
    "dominant_step",
    "finding",
    "first_token_effects",
    "forward_passes",
    "ladder",
    "logit_difference",
    "measure_drift",
    "measure_mends",
    "rope_findings",
    "rope_stages",
    "stock_arithmetic",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
