"""The probe on the processes of torchrun: each planted fault is named, and a correct trainer is silent."""

import json

import pytest

from tests.programs import run_together
from tests.verification.trainers.test_probe import NAMED
from tests.verification.trainers.torchrun_cases import LOOPS, OF_RANKS, ON_RANK_1

# A rank has its own longest document.
ON_TWO = {**NAMED, "wrong window": (["windows"], "reaches the whole document of 14 tokens")}
MEAN_OF_RANKS = (["token mean"], "a mean of the means of ranks")
OF_LOOP = {
    **ON_TWO,
    OF_RANKS: MEAN_OF_RANKS,
    ON_RANK_1: (["documents apart"], "rank 1: token"),
    # The last target of each row is lost, and the loop divides by all.
    "shifted labels": (["labels", "token mean"], "shifted twice"),
}
EXPECTED = {
    **{f"Trainer, {fault}": named for fault, named in ON_TWO.items()},
    f"Trainer, {OF_RANKS}": MEAN_OF_RANKS,
    **{f"loop, {fault}": OF_LOOP[fault] for fault in LOOPS},
}


@pytest.mark.slow
def test_a_planted_fault_alone_is_named_on_two_processes():
    # One test: apart, workers would each start processes for all cases.
    result, other = run_together(
        2, code="from tests.verification.trainers.torchrun_cases import main; main()"
    )
    assert result.returncode == 0, result.stderr
    assert (other.returncode, other.stdout) == (0, "")
    found = json.loads(result.stdout)
    assert found.keys() == EXPECTED.keys()
    assert {case: (each["ranks"], each["failed"]) for case, each in found.items()} == {
        case: (2, failed) for case, (failed, _) in EXPECTED.items()
    }
    unsaid = {
        case: found[case]["notes"]
        for case, (_, words) in EXPECTED.items()
        if words not in found[case]["notes"]
    }
    assert unsaid == {}


@pytest.mark.slow
def test_the_command_of_the_guide_names_a_fault_once_and_ends_with_an_error():
    target = "tests.verification.trainers.trainer_cases:mean_of_ranks"
    result, other = run_together(2, "probe-trainer", target, "--tokens", "2", "--json")
    assert result.returncode == 1
    assert other.stdout == ""
    checks = json.loads(result.stdout)["checks"]
    assert [check["name"] for check in checks if check["passed"] is False] == ["token mean"]
    said = [
        line for each in (result, other) for line in each.stderr.splitlines() if line.startswith("error: ")
    ]
    assert said == ["error: 1 of 9 checks failed: 'token mean'"]
