"""Single checks: which there are, what they say, and faults that need no planting."""

import pytest

from ropewalk.errors import RunFailure
from ropewalk.parallel import MeshShape
from ropewalk.parallel.rank_pool import RankFailure
from ropewalk.verification import Check, Planned, VerifyResult, planned_checks, run_checks, run_planned
from ropewalk.verification.checks import claims
from ropewalk.verification.run import reason_of


@pytest.mark.parametrize("kind", ["ranks", "shards", "loss"])
@pytest.mark.parametrize("shape", [MeshShape(ring=2, sequence=2), MeshShape(shard=2, sequence=2)], ids=str)
def test_four_ranks_pass(four_ranks, shallow_case, kind, shape):
    check = four_ranks.run(run_planned, Planned(kind, "", "", shape), shallow_case)[0]
    assert check.passed, check


def test_a_check_that_raises_has_failed_and_the_others_still_run():
    planned = [Planned("labels", name, "") for name in ("first", "second", "third")]

    def call(each):
        if each.name == "first":
            raise RankFailure("rank 1: Traceback:\n  line\nropewalk.errors.EngineError: no engine for this")
        if each.name == "second":
            raise RankFailure(
                "rank 0: Traceback:\n  line\nropewalk.errors.RopewalkError: the disk is full\nrank 1: late"
            )
        return Check(0.0, 0.0, True, name=each.name, compared="", seconds=0.0)

    checks = run_checks(planned, call)
    assert [check.passed for check in checks] == [False, False, True]
    assert [check.note for check in checks] == [
        "stopped: no engine for this",
        "stopped: the disk is full",
        "",
    ]
    result = VerifyResult("", None, 2, 32, 64, "full", "float32", "cpu", {}, "", None, 0.0, tuple(checks))
    assert result.failed == ["first", "second"]
    counts = {name: result.to_json()[name] for name in ("passed", "failed", "not_run")}
    assert counts == {"passed": 1, "failed": 2, "not_run": 0}


def test_every_check_has_a_kind_and_a_place_of_its_own(case):
    found = claims()
    assert len({claim.place for claim in found.values() if not claim.kind.startswith("engine")}) == len(
        [kind for kind in found if not kind.startswith("engine")]
    )
    assert [each.kind for each in planned_checks(case, 2)][:2] == ["labels", "documents"]
    assert {each.kind for each in planned_checks(case, 2)} == set(found)


def test_reasons_are_one_line():
    assert reason_of(RunFailure("it broke")) == "it broke"
    assert reason_of(RuntimeError("first\nsecond")) == "RuntimeError: first"
