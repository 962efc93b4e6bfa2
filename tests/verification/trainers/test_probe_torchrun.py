"""The probe under torchrun itself: on two processes, each planted fault is named, and a correct trainer is silent."""

import json
import os
import subprocess
import sys

import pytest

from tests.places import ROOT
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


def torchrun(*arguments):
    """Two processes of torchrun's own agent, each an interpreter of its own, as users start them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_a_planted_fault_alone_is_named_on_two_processes():
    # One test: apart, workers would each start torchrun for all cases.
    result = torchrun("tests/verification/trainers/torchrun_cases.py")
    assert result.returncode == 0, result.stderr
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
    result = torchrun("-m", "ropewalk", "probe-trainer", target, "--tokens", "2", "--json")
    assert result.returncode == 1
    # One object: rank 1 prints nothing.
    checks = json.loads(result.stdout)["checks"]
    assert [check["name"] for check in checks if check["passed"] is False] == ["token mean"]
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert said == ["error: 1 of 9 checks failed: 'token mean'"]
