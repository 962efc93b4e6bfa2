"""What ranks run in the test of ``ropewalk verify`` under torchrun."""

import contextlib
import io

import pytest

import ropewalk.verification.checks.effective_rope as effective_rope
from ropewalk.cli.app import main
from ropewalk.verification import Check
from ropewalk.verification.run import run_planned


def command(arguments):
    """Exit status of a command line, and what it printed on stdout."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        status = main(arguments)
    return status, stdout.getvalue()


def run_with_a_cast(planned, case):
    """A check where the whole model is cast, which rounds the frequencies that transformers' own module holds.

    Only RoPE as loaded can tell, and only that is computed: of the others a run without the cast has the results.
    """
    if planned.kind != "rope":
        return Check(1.25e-16, 2.5e-15, True, name=planned.name, compared=planned.compared, seconds=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effective_rope, "cast_parameters", lambda model, dtype: model.to(dtype))
        return run_planned(planned, case)
