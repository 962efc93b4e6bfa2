"""Measure how far arithmetic breaks relative positions in a model, which step causes it, and what mitigates it.

Names are imported on first use: reading results must not require torch. Its files::

    run, settings, results         the whole audit, what it is asked, and what it found
    audited_model                  how a model's layers rotate, measured on a few tokens
    replaced_attention             a model's attention computed outside of it
    arithmetic, layer_attention    the precision of each step, and attention of a layer in it
    passes, differences            forward passes of a row, and what differs between two of them
    drift, ablation                how far attention moves with the row, and which step moves it
    first_token, mitigations       what part the first token has, and what reduces the drift
    random_parameters              the model with random parameters, as a control
    effective_frequencies          the frequencies that a model really rotates with
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import make_callable, on_first_use

if TYPE_CHECKING:
    from ropewalk.audit.ablation import ablate_steps as ablate_steps
    from ropewalk.audit.arithmetic import (
        EXACT as EXACT,
        Arithmetic as Arithmetic,
        stock_arithmetic as stock_arithmetic,
    )
    from ropewalk.audit.drift import Series as Series, measure_drift as measure_drift
    from ropewalk.audit.effective_frequencies import (
        angle_error_with_turns as angle_error_with_turns,
        rope_findings as rope_findings,
        rope_stages as rope_stages,
    )
    from ropewalk.audit.first_token import first_token_effects as first_token_effects
    from ropewalk.audit.audited_model import AuditedModel as AuditedModel
    from ropewalk.audit.mitigations import measure_mitigations as measure_mitigations
    from ropewalk.audit.passes import Runner as Runner, logit_difference as logit_difference
    from ropewalk.audit.results import (
        STEPS as STEPS,
        Audit as Audit,
        AuditResult as AuditResult,
        Drift as Drift,
        FirstTokenEffect as FirstTokenEffect,
        Mitigation as Mitigation,
        RopeStage as RopeStage,
        Sink as Sink,
        StepAblation as StepAblation,
        dominant_step as dominant_step,
        finding as finding,
    )
    from ropewalk.audit.run import (
        audit as audit,
        audit_model as audit_model,
    )
    from ropewalk.audit.settings import AuditSettings as AuditSettings
else:
    __getattr__, __dir__ = on_first_use(__name__)

# `from ropewalk import search` may bind this package or its function, whichever was imported first.
make_callable(__name__, "ropewalk.jobs")
