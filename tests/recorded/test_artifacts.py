"""What ropewalk 0.1.0 wrote is read and gone on with: packed rows, a run, a search, evaluations.

They lie in ``artifacts/``; ``artifacts.yaml`` says what is done with each. One that can no longer be read is refused by
a sentence that names what changed.
"""

from __future__ import annotations

import pytest

from tests.recorded.recorded_cases import command_outputs, differences_from_before


@pytest.fixture(scope="module")
def said(outputs_of):
    return outputs_of("artifacts")["artifacts"]


@pytest.mark.slow
@pytest.mark.parametrize("step", command_outputs.read_kept("artifacts")["artifacts"])
def test_it_is_read_and_gone_on_with(said, step):
    assert differences_from_before("artifacts", "artifacts", {step: said[step]}) == []
