"""verify: check that packing, parallelism, and saving and loading checkpoints do not change a model's results.

Its files::

    run, settings, result   the whole verification, what it is asked, and what it found
    case, computing         the model and rows that are verified, and their losses and gradients
    checks                  the checks, one file each
    trainers                the same questions to somebody else's trainer (probe-trainer)
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.verification.case import Case as Case, prepare as prepare
    from ropewalk.verification.checks import (
        Claim as Claim,
        Planned as Planned,
        planned_checks as planned_checks,
    )
    from ropewalk.verification.result import Check as Check, Outcome as Outcome, VerifyResult as VerifyResult
    from ropewalk.verification.run import (
        run_checks as run_checks,
        run_in as run_in,
        run_planned as run_planned,
        verify as verify,
    )
    from ropewalk.verification.settings import VerifySettings as VerifySettings
else:
    __getattr__, __dir__ = on_first_use(__name__)
