"""The table of a probe has one line for each check."""

from ropewalk.reporting.style import MISSING
from ropewalk.reporting.trainers import describe_trainer_probe
from ropewalk.verification.result import Check
from ropewalk.verification.trainers.probe import TrainerProbeResult


def test_each_check_has_one_line_with_its_result():
    made = [
        Check(0.0, 0.0, passed, note, name=note, compared="", seconds=0.0)
        for passed, note in ((True, "good"), (False, "bad"), (None, "other"))
    ]
    result = TrainerProbeResult("file.py:make", "Trainer", 8, 80, 2, {}, 1.0, tuple(made))
    table, _, counts = describe_trainer_probe(result)
    assert "Trainer: one step on 8 documents of 80 tokens in all, 2 processes" in table.title
    assert [row[1] for row in table.rows] == ["passed", "FAILED", MISSING]
    assert counts == "1 passed, 1 failed, 1 not run in 1 s"
    assert result.failed == ["bad"]
