"""What ropewalk 0.1.0 wrote is read and gone on with: packed rows, a run, a search, evaluations.

They lie in ``artifacts/``; ``artifacts.yaml`` says what is done with each. One that can no longer be read must be
refused by a sentence that names what changed, which then stands in :data:`REFUSED`.
"""

from __future__ import annotations

import pytest

from tests.recorded.recorded_cases import command_outputs, differences_from_before

RENAMED: dict[str, str] = {}
"""JSON keys that were given another name on purpose: the old name, and the new one."""

REFUSED: dict[str, str] = {
    "resume a run": "was written by another version of ropewalk",
    "go on with an evaluation": "was written by another version of ropewalk",
    "rescore an evaluation": "was written by another version of ropewalk",
    "rescore another": "was written by another version of ropewalk",
    "resume a search": "is the log of another search, with documents_sha256",
}
"""Steps on artifacts that are refused now, and a part of the sentence that says what changed."""


@pytest.fixture(scope="module")
def said(outputs_of):
    return outputs_of("artifacts")["artifacts"]


@pytest.mark.slow
@pytest.mark.parametrize("step", command_outputs.read_kept("artifacts")["artifacts"])
def test_it_is_read_and_gone_on_with(said, step):
    now = said[step]
    if step in REFUSED:
        assert now["status"] == 2
        assert REFUSED[step] in now["json"]["last line on stderr"]
    else:
        assert differences_from_before("artifacts", "artifacts", {step: now}, RENAMED) == []


def test_a_resumed_run_has_the_losses_of_an_undisturbed_one():
    """Of what is kept, which one machine computed: to the last bit."""
    resumed = command_outputs.read_kept("artifacts")["artifacts"]["resume a run"]
    whole = command_outputs.read_kept("commands")["extend"]["theta"]
    losses = [
        [line["loss"] for line in files[name]]
        for files, name in (
            (resumed["files"], "artifacts/run/metrics.jsonl"),
            (whole["files"], "run/metrics.jsonl"),
        )
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.slow
def test_rows_are_taken_up_and_not_packed_again(said):
    assert "take up rows" in REFUSED or said["take up rows"]["json"]["reused"]
