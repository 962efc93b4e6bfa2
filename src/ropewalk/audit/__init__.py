"""Measure how far arithmetic breaks relative positions in a model, which step causes it, and what mitigates it.

Names are imported on first use: reading results must not require torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names, make_callable

if TYPE_CHECKING:
    from ropewalk.audit.ablation import ablate_steps
    from ropewalk.audit.arithmetic import EXACT, Arithmetic, stock_arithmetic
    from ropewalk.audit.drift import Series, measure_drift
    from ropewalk.audit.effective_frequencies import angle_error_with_turns, rope_findings, rope_stages
    from ropewalk.audit.first_token import first_token_effects
    from ropewalk.audit.mitigations import measure_mitigations
    from ropewalk.audit.passes import Runner, logit_difference
    from ropewalk.audit.results import (
        STEPS,
        Audit,
        AuditResult,
        Drift,
        FirstTokenEffect,
        Mitigation,
        RopeStage,
        Sink,
        StepAblation,
        dominant_step,
        finding,
    )
    from ropewalk.audit.run import audit, audit_model, forward_passes
    from ropewalk.audit.settings import AuditSettings
    from ropewalk.models.attention.intercept import AuditedModel

_HOMES = {
    "EXACT": "arithmetic",
    "STEPS": "results",
    "Arithmetic": "arithmetic",
    "Audit": "results",
    "AuditSettings": "settings",
    "AuditResult": "results",
    "Drift": "results",
    "FirstTokenEffect": "results",
    "Mitigation": "results",
    "RopeStage": "results",
    "StepAblation": "results",
    "Runner": "passes",
    "Series": "drift",
    "Sink": "results",
    "AuditedModel": "passes",
    "angle_error_with_turns": "effective_frequencies",
    "audit": "run",
    "audit_model": "run",
    "dominant_step": "results",
    "finding": "results",
    "first_token_effects": "first_token",
    "forward_passes": "run",
    "ablate_steps": "ablation",
    "logit_difference": "passes",
    "measure_drift": "drift",
    "measure_mitigations": "mitigations",
    "rope_findings": "effective_frequencies",
    "rope_stages": "effective_frequencies",
    "stock_arithmetic": "arithmetic",
}

__all__ = [
    "EXACT",
    "STEPS",
    "Arithmetic",
    "Audit",
    "AuditResult",
    "AuditSettings",
    "AuditedModel",
    "Drift",
    "FirstTokenEffect",
    "Mitigation",
    "RopeStage",
    "Runner",
    "Series",
    "Sink",
    "StepAblation",
    "ablate_steps",
    "angle_error_with_turns",
    "audit",
    "audit_model",
    "dominant_step",
    "finding",
    "first_token_effects",
    "forward_passes",
    "logit_difference",
    "measure_drift",
    "measure_mitigations",
    "rope_findings",
    "rope_stages",
    "stock_arithmetic",
]


__getattr__ = lazy_names(__name__, _HOMES)
# `from ropewalk import audit` may bind this package or its function, whichever was imported first.
make_callable(__name__, "run")


def __dir__() -> list[str]:
    return __all__
