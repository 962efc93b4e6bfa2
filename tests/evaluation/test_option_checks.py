"""Options that contradict each other or the processes are refused, and --parallel gives a mesh that suits the heads."""

from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.option_checks import check_together, degrees_in, shape_for
from ropewalk.evaluation.settings import EvaluationSettings
from ropewalk.parallel import MeshShape


def test_degrees_of_the_option() -> None:
    assert degrees_in("sequence=4") == MeshShape(sequence=4)
    assert degrees_in(" shard=2, ring=3 ,sequence=4") == MeshShape(1, 2, 3, 4)
    for wrong in (
        "",
        "sequence",
        "sequence=0",
        "sequence=-1",
        "heads=2",
        "sequence=2,sequence=2",
        "ring=1.5",
        "ring=²",
    ):
        with pytest.raises(
            RopewalkError, match=r"--parallel .* contains .*; use each of the keys .* at most once"
        ):
            degrees_in(wrong)


def test_the_mesh_suits_processes_and_heads() -> None:
    assert shape_for(None, 4, 8) == MeshShape(sequence=4)
    assert shape_for("shard=2,sequence=2", 4, 8) == MeshShape(shard=2, sequence=2)
    with pytest.raises(
        RopewalkError, match=r"sequence=2 needs 2 processes, but torchrun started 4; run torchrun .* 2 "
    ):
        shape_for("sequence=2", 4, 8)
    told = r"12 attention heads are not divisible by sequence=8; give either --parallel ring=2,sequence=4 or"
    with pytest.raises(RopewalkError, match=told):
        shape_for(None, 8, 12)
    assert shape_for("ring=2,sequence=4", 8, 12).sequence_degree == 8


def test_options_that_need_one_process_or_several() -> None:
    def check(processes: int, device: str = "cpu", **given: Any) -> None:
        check_together(EvaluationSettings(model="embedded", loading={"device": device}, **given), processes)

    check(1, "cuda:1", average=True)
    check(2, parallel="sequence=2")
    with pytest.raises(
        RopewalkError, match="needs several processes; start them with torchrun --nproc-per-node 8 -m"
    ):
        check(1, "auto", parallel="shard=2,sequence=4")
    with pytest.raises(RopewalkError, match="--average needs a single process, but torchrun started 2"):
        check(2, average=True)
    with pytest.raises(RopewalkError, match="--server needs a single process"):
        check(2, serving={"url": "http://localhost"})
    with pytest.raises(RopewalkError, match="unknown device 'gpu'"):
        check(2, "gpu")
