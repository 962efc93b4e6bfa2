"""How a verification is shown: every check in the table, reasons below it, and counts that add up."""

from dataclasses import replace

import pytest

from ropewalk.reporting.style import MISSING
from ropewalk.reporting.verification import describe_trainer_probe, describe_verification
from ropewalk.verification.result import Check, VerifyResult
from ropewalk.verification.trainers.probe import TrainerProbeResult


def check(name, error, budget, passed, seconds, note=""):
    return Check(error, budget, passed, note, name=name, compared="a with b", seconds=seconds)


CHECKS = (
    check("labels", 0.0, 0.0, True, 0.25),
    check("ranks", 3.21e-5, 1e-7, False, 1.0, "rank 1 differs"),
    check("ring", None, None, None, 0.0, "not run here: one rank"),
    check("loss", 2e-8, 1e-7, True, 2.0, "as good as equal"),
)
RESULT = VerifyResult(
    "of-mine", None, 4, 1024, 32768, "anchor", "float32", "cpu", {}, "1 rank", None, 3.4, CHECKS
)


def shown(result):
    table, *rest = describe_verification(result)
    return table, [line for line in rest if line]


def test_every_check_is_a_row_with_its_verdict():
    table, _ = shown(RESULT)
    assert table.title == "of-mine: 4 sequences of 1,024 tokens, pattern anchor; 1 rank"
    assert table.rows == (
        ("labels", "0", "0", "yes", "0.2"),
        ("ranks", "3.2e-05", "1.0e-07", "NO", "1.0"),
        ("ring", MISSING, MISSING, MISSING, "0.0"),
        ("loss", "2.0e-08", "1.0e-07", "yes", "2.0"),
    )


def test_reasons_stand_below_failures_last_and_counts_add_up():
    _, lines = shown(RESULT)
    assert lines == [
        "not run: ring: one rank",
        "failed: ranks: rank 1 differs",
        "2 passed, 1 failed, 1 not run in 3 s",
    ]


@pytest.mark.parametrize(("layers", "said"), [(1, "of-mine, first layer:"), (3, "of-mine, first 3 layers:")])
def test_a_part_of_the_layers_is_said_in_the_title(layers, said):
    table, _ = shown(replace(RESULT, layers=layers))
    assert table.title.startswith(said)


def test_each_check_of_a_probe_has_one_line_with_its_result():
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
