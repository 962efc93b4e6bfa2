"""Checkpoints of ranks and of one process: each resumes as the other, damage is named, a failed write costs nothing."""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ropewalk import RopewalkError
from ropewalk.io.files import remove_left_overs
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.rank_pool import RankFailure
from ropewalk.training.checkpoint.files import (
    RECORD,
    Position,
    check_checkpoint,
    checkpoints_in,
    latest_whole,
)
from ropewalk.training.checkpoint.sharded import METADATA, ShardedCheckpoints, _read_shards, load_checkpoint
from ropewalk.training.checkpoint.single import save_checkpoint
from tests.marks import slow_after
from tests.training.checkpoint.checkpoint_cases import (
    MESH,
    NAME,
    POSITION,
    assert_same_losses,
    assert_same_tensors,
)
from tests.training.checkpoint.rank_cases import (
    ALONE,
    Trainee,
    files_of,
    go_on,
    killed,
    on_a_full_disk,
    on_disks_apart,
    refused_on_ranks,
    resumed,
    saved,
)
from tests.training.family_cases import rows_with_padding, save_family
from tests.training.sharded_cases import save_tied_llama


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_metadata_runs_no_code_and_names_no_file_elsewhere(tmp_path):
    path = tmp_path / NAME
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    into = {"weight": torch.zeros(3)}
    _read_shards(path, into, ALONE, None)
    assert torch.equal(into["weight"], torch.ones(3))
    metadata = (path / METADATA).read_bytes()
    for damaged, why in (
        (pickle.dumps(RunsCode(tmp_path / "made")), r"cannot be read: it names \w+\.mkdir; do not use"),
        (metadata[:-10], "cannot be read: pickle data was truncated"),
        (
            metadata.replace(b"__0_0.distcp", b"../0_0.dist/"),
            "lists the file '../0_0.dist/', but may list only",
        ),
    ):
        (path / METADATA).write_bytes(damaged)
        with pytest.raises(RopewalkError, match=why):
            _read_shards(path, into, ALONE, None)
    assert not (tmp_path / "made").exists()


def test_the_background_writes_what_was_there_when_it_was_told_to(by_ranks):
    out, ranks = by_ranks
    assert not any(rank["early"] for rank in ranks)
    assert all(rank["late"] for rank in ranks)
    # Messages of the background have a group of their own, which ends with it.
    assert [rank["groups left"] for rank in ranks] == [0] * 4
    at_once, later = files_of(out / "sync" / NAME), files_of(out / "async" / NAME)
    shards = {f"__{rank}_0.distcp" for rank in range(4)}
    assert at_once.keys() == later.keys() == shards | {".metadata", RECORD}
    assert all(at_once[name] == later[name] for name in shards)


def test_the_same_mesh_goes_on_bit_for_bit(four_ranks, tied_llama, rows, by_ranks):
    out, before = by_ranks
    after = four_ranks.run(resumed, MESH, tied_llama, rows, out / "async" / NAME)
    for one, other in zip(before, after, strict=True):
        assert other["position"] == POSITION
        for key in ("losses", "drawn", "fingerprint"):
            assert other[key] == one[key]
    assert_same_tensors(after[0]["masters"], before[0]["masters"])
    assert len({tuple(rank["drawn"]) for rank in before}) == 4


@pytest.mark.parametrize(
    "shape", slow_after(1, [{"sequence": 2}, {"replicate": 2, "sequence": 2}, None]), ids=str
)
def test_another_mesh_goes_on_with_the_same_losses(four_ranks, two_ranks, tied_llama, rows, by_ranks, shape):
    out, before = by_ranks
    path = out / "sync" / NAME
    if shape is None:
        after = [go_on(Trainee(tied_llama, rows), path)]
    else:
        pool = two_ranks if shape == {"sequence": 2} else four_ranks
        after = pool.run(resumed, shape, tied_llama, rows, path)
    assert_same_tensors(after[0]["masters"], before[0]["masters"])
    for one, other in zip(before, after, strict=False):
        assert_same_losses(other["losses"], one["losses"])
        assert other["drawn"] == one["drawn"]


@pytest.mark.parametrize("family", slow_after(1, ["falcon_h1", "lfm2"]))
def test_recurrent_layers_go_on_bit_for_bit_and_on_another_mesh(two_ranks, family, tmp_path):
    save_family(tmp_path / family, family)
    rows = rows_with_padding()
    before = two_ranks.run(saved, {"ring": 2}, tmp_path / family, rows, tmp_path)
    path = tmp_path / "sync" / NAME
    same, other = (
        two_ranks.run(resumed, shape, tmp_path / family, rows, path)
        for shape in ({"ring": 2}, {"sequence": 2})
    )
    assert [rank["fingerprint"] for rank in same] == [rank["fingerprint"] for rank in before]
    alone = go_on(Trainee(tmp_path / family, rows), path)
    for after in (other[0], alone):
        assert_same_tensors(after["masters"], before[0]["masters"])
        (first, second), (expected, other_second) = after["losses"], before[0]["losses"]
        assert_same_losses([first], [expected])
        # AdamW divides the vanishing gradients of gates by their size, which shows in the next norm, not in the loss.
        assert second[0] == pytest.approx(other_second[0], rel=1e-6)


@pytest.mark.slow
def test_more_ranks_than_saved_it_keep_the_seeds_of_the_new_ones(
    two_ranks, four_ranks, tied_llama, rows, tmp_path
):
    before = two_ranks.run(saved, {"shard": 2}, tied_llama, rows, tmp_path)
    after = four_ranks.run(resumed, {"replicate": 2, "shard": 2}, tied_llama, rows, tmp_path / "sync" / NAME)
    assert_same_losses(after[0]["losses"], before[0]["losses"])
    assert [rank["drawn"] for rank in after[:2]] == [rank["drawn"] for rank in before]
    for rank in (2, 3):
        torch.manual_seed(200 + rank)
        assert after[rank]["drawn"] == torch.rand(3).tolist()


def test_ranks_go_on_from_one_process(two_ranks, tied_llama, rows, by_one):
    precision, path, masters, drawn, losses, _ = by_one
    after = two_ranks.run(resumed, {"sequence": 2}, tied_llama, rows, path, precision)
    assert_same_tensors(after[0]["masters"], masters)
    for rank in after:
        if precision == "float32":
            assert_same_losses(rank["losses"], losses)
    assert after[0]["drawn"] == drawn
    torch.manual_seed(201)
    assert after[1]["drawn"] == torch.rand(3).tolist()


def test_masters_of_ranks_become_those_of_one_process_in_bfloat16(tied_llama, rows, by_ranks):
    out, before = by_ranks
    one = Trainee(tied_llama, rows, "bfloat16")
    load_checkpoint(out / "sync" / NAME, one.model, one.optimizer, ALONE)
    assert_same_tensors(one.masters(), before[0]["masters"])
    for name, parameter in one.optimizer.parameters.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, one.optimizer.masters[name].bfloat16())
    matrices = [m for m in one.optimizer.masters.values() if m.dim() == 2]
    assert all((m != m.bfloat16().float()).float().mean() > 0.9 for m in matrices)


@pytest.mark.parametrize("asynchronous", slow_after(1, [False, True]), ids=["at once", "in the background"])
def test_one_full_disk_stops_all_ranks_and_costs_nothing(
    four_ranks, tied_llama, rows, tmp_path, asynchronous
):
    out = tmp_path / "checkpoints"
    ranks = four_ranks.run(on_a_full_disk, MESH, tied_llama, rows, out, asynchronous)
    names = [f"stage0-step{step:06d}" for step in range(1, 6)]
    for rank, (said, left) in enumerate(ranks):
        kind = "RopewalkError" if rank == 0 else "Echo"
        assert said == [(3, kind, f"cannot write {out / names[2]}: File too large (rank 2)")]
        # Step 3 failed and left nothing, nor was an older one deleted for it; the latest two are kept.
        assert left == [names[:1], names[:2], names[:2], [names[1], names[3]], names[3:]]
    assert checkpoints_in(out) == [out / name for name in names[3:]]
    assert all(check_checkpoint(path) is None for path in checkpoints_in(out))


def test_what_does_not_fit_is_refused_on_all_ranks(two_ranks, by_ranks, whole, tmp_path):
    save_tied_llama(tmp_path / "other", kv_heads=4)
    newer = shutil.copytree(whole, tmp_path / "newer")
    record = json.loads((newer / RECORD).read_text())
    (newer / RECORD).write_text(json.dumps({**record, "version": 2}))
    (tmp_path / "file").write_text("")
    cases = [by_ranks[0] / "sync" / NAME, whole, tmp_path / "nothing", newer]
    first, second = two_ranks.run(refused_on_ranks, tmp_path / "other", cases, tmp_path / "file" / "folder")
    expected = [
        "is damaged or belongs to another model: ",
        "model.layers.0.self_attn.k_proj.weight has shape [16, 32] in the checkpoint and [32, 32] in the model",
        "is not a checkpoint of a run: training_state.json cannot be read: No such file or directory",
        "has format version 2, but this version of ropewalk reads versions up to 1",
        "cannot write ",
        "cannot write ",
    ]
    for one, other, words in zip(first, second, expected, strict=True):
        assert words in one[1]
        assert "\n" not in one[1]
        assert one[0] == "RopewalkError"
        assert other == ("Echo", one[1])


def test_machines_that_share_no_disk_are_told_so(two_ranks, tied_llama, tmp_path):
    first, second = two_ranks.run(on_disks_apart, tied_llama, tmp_path)
    assert "__1_0.distcp, which another process wrote, is not visible on this machine" in first[1]
    assert second == ("Echo", first[1])
    assert list((tmp_path / "0").iterdir()) == []


def test_one_process_is_no_team(tied_llama, tmp_path):
    one = Trainee(tied_llama, [])
    with pytest.raises(RopewalkError, match="need a mesh of several processes"):
        ShardedCheckpoints(tmp_path, one.model, one.optimizer, RunContext(), 1)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_rank_killed_while_it_writes_leaves_the_last_checkpoint(
    two_ranks, tied_llama, rows, tmp_path, asynchronous
):
    with pytest.raises(RankFailure):
        two_ranks.run(killed, tied_llama, tmp_path, asynchronous)
    # What was being written may be there or not: rank 0 clears it away if it still can.
    path = latest_whole(tmp_path)
    assert path == tmp_path / "stage0-step000001"
    one = Trainee(tied_llama, rows)
    assert load_checkpoint(path, one.model, one.optimizer, ALONE) == Position(0, 1, 0)
    assert one.train(1) == Trainee(tied_llama, rows).train(1)
    remove_left_overs(tmp_path)
    save_checkpoint(tmp_path, one.model.model, None, one.optimizer, Position(0, 2, 0), 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["stage0-step000001", "stage0-step000002"]
