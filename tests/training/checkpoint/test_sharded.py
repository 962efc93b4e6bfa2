"""Checkpoints of ranks and of one process: each resumes as the other, damage is named, a failed write costs nothing."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropewalk import RopewalkError
from ropewalk.io.files import remove_left_overs
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.rank_pool import RankFailure
from ropewalk.training.checkpoint.files import (
    RECORD,
    FileDigest,
    Position,
    Record,
    check_checkpoint,
    checkpoints_in,
    latest_whole,
    read_position,
    read_record,
    write_record,
)
from ropewalk.training.checkpoint.sharded import (
    ShardedCheckpoints,
    export_model,
    load_checkpoint,
    load_weights,
)
from ropewalk.training.checkpoint.single import save_checkpoint
from tests.training.checkpoint.rank_cases import (
    ALONE,
    Trainee,
    checked_on_ranks,
    files_of,
    go_on,
    killed,
    latest_on_ranks,
    on_a_full_disk,
    on_disks_apart,
    only_weights,
    refused_on_ranks,
    resumed,
    saved,
    sentence,
)
from tests.training.sharded_cases import packed_rows, save_tied_llama

MESH = {"shard": 2, "sequence": 2}
POSITION = Position(0, 2, 999)
NAME = "stage0-step000002"


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "llama"
    save_tied_llama(folder)
    return folder


@pytest.fixture(scope="module")
def rows():
    return packed_rows(4)


@pytest.fixture(scope="module")
def by_ranks(four_ranks, tied_llama, rows, tmp_path_factory):
    """Four ranks' checkpoint after two steps, and what each rank did next."""
    out = tmp_path_factory.mktemp("sharded")
    return out, four_ranks.run(saved, MESH, tied_llama, rows, out)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def by_one(request, tied_llama, rows, tmp_path_factory):
    """One process's checkpoint after two steps, and what it did next."""
    one = Trainee(tied_llama, rows, request.param)
    one.train(2)
    out = tmp_path_factory.mktemp("whole")
    torch.manual_seed(7)
    path = save_checkpoint(out, one.model.model, None, one.optimizer, POSITION, 1)
    drawn = torch.rand(3).tolist()
    masters = one.masters()
    return request.param, path, masters, drawn, one.train(2), one.fingerprint()


@pytest.fixture(scope="module")
def whole(tied_llama, rows, tmp_path_factory):
    """One process's checkpoint after two steps, for what does not depend on its precision."""
    one = Trainee(tied_llama, rows)
    one.train(2)
    return save_checkpoint(
        tmp_path_factory.mktemp("whole"), one.model.model, None, one.optimizer, POSITION, 1
    )


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_same_losses(found, expected):
    """Float32 sums over other shards differ by their order: some units in the last place, as in test_sharded_step."""
    for (loss, norm), (loss1, norm1) in zip(found, expected, strict=True):
        assert loss == pytest.approx(loss1, rel=1e-6)
        assert norm == pytest.approx(norm1, rel=1e-5)


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
    "shape", [{"shard": 4}, {"replicate": 2, "sequence": 2}, {"sequence": 2}, None], ids=str
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_cuda_device_and_its_random_numbers_go_on(tied_llama, rows, tmp_path, precision):
    one = Trainee(tied_llama, rows, precision, device="cuda")
    one.train(2)
    path = save_checkpoint(tmp_path, one.model.model, None, one.optimizer, POSITION, 1)
    drawn = torch.rand(3, device="cuda").tolist()
    masters = one.masters()
    other = Trainee(tied_llama, rows, precision, device="cuda")
    load_checkpoint(path, other.model, other.optimizer, ALONE)
    assert torch.rand(3, device="cuda").tolist() == drawn
    assert_same_tensors(other.masters(), masters)
    assert_same_losses(other.train(1), one.train(1))


def test_one_process_goes_on_bit_for_bit(tied_llama, rows, by_one):
    precision, path, masters, drawn, losses, fingerprint = by_one
    after = go_on(Trainee(tied_llama, rows, precision), path)
    assert after["position"] == POSITION
    assert_same_tensors(after["masters"], masters)
    assert (after["drawn"], after["losses"], after["fingerprint"]) == (drawn, losses, fingerprint)


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


def test_weights_alone_and_plain_folders(four_ranks, tied_llama, rows, by_ranks, tmp_path):
    """From ranks to a plain folder, to one process's checkpoint, and back: the same bits all the way."""
    out, before = by_ranks
    exported = four_ranks.run(only_weights, {"shard": 4}, tied_llama, out / "sync" / NAME, tmp_path)[0]
    assert_same_tensors(exported, before[0]["masters"])
    one = Trainee(tied_llama, rows)
    load_checkpoint(out / "sync" / NAME, one.model, one.optimizer, ALONE)
    whole = save_checkpoint(tmp_path / "whole", one.model.model, None, one.optimizer, POSITION, 1)
    other = Trainee(tied_llama, rows)
    load_weights(whole, other.model, ALONE)
    assert_same_tensors(other.masters(), exported)
    export_model(one.model, tmp_path / "alone", None, ALONE, torch.float32)
    ids = torch.arange(40)[None]
    logits = [plain(tmp_path / name)(ids).logits for name in ("float32", "whole/" + NAME, "alone")]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    narrow = plain(tmp_path / "bfloat16")
    assert narrow.dtype == torch.bfloat16
    stored = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(torch.equal(p, exported[name].bfloat16()) for name, p in narrow.named_parameters())
    assert narrow.lm_head.weight is narrow.model.embed_tokens.weight


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def test_a_run_goes_on_from_what_older_versions_wrote(tied_llama, rows, by_one, tmp_path):
    """Names of a bare model, a record of three numbers, no digests; the optimiser knows the model as a part."""
    precision, path, _, _, losses, fingerprint = by_one
    old = shutil.copytree(path, tmp_path / NAME)
    (old / RECORD).write_text('{"stage": 0, "step": 2, "tokens": 999}')
    assert read_position(old) == POSITION
    assert check_checkpoint(old) is None
    one = Trainee(tied_llama, rows, precision)
    assert load_checkpoint(old, one.model, one.optimizer, ALONE) == POSITION
    assert one.train(2) == losses
    assert one.fingerprint() == fingerprint
    (old / "training_state.safetensors").write_bytes(b"short")
    with pytest.raises(RopewalkError, match="is damaged or incomplete"):
        load_checkpoint(old, one.model, one.optimizer, ALONE)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
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
        "is damaged, or of another model: ",
        "does not fit the model: model.layers.0.self_attn.k_proj.weight is [16, 32] there, [32, 32] here",
        "is no checkpoint of a run: training_state.json cannot be read: No such file or directory",
        "has format version 2, this ropewalk reads up to 1",
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
    assert "__1_0.distcp, which another process wrote, is not to be seen from this machine" in first[1]
    assert second == ("Echo", first[1])
    assert list((tmp_path / "0").iterdir()) == []


def test_one_process_is_no_team(tied_llama, tmp_path):
    one = Trainee(tied_llama, [])
    with pytest.raises(RopewalkError, match="is for several processes"):
        ShardedCheckpoints(tmp_path, one.model, one.optimizer, RunContext(), 1)


def harmed(path, name, how):
    file = path / name
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return f"{name} is missing"
    if how == "short":
        file.write_bytes(content[:-10])
        return f"{name} is 10 bytes short"
    if how == "long":
        file.write_bytes(content + b"...")
        return f"{name} is 3 bytes too long"
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{name} was altered: its SHA-256 differs"


@pytest.fixture(scope="module", params=["sharded", "whole"])
def checkpoint(request, by_ranks, whole):
    return by_ranks[0] / "sync" / NAME if request.param == "sharded" else whole


@pytest.mark.parametrize("how", ["missing", "short", "long", "flipped"])
def test_harm_to_any_file_is_named(two_ranks, checkpoint, tmp_path, how):
    expected = []
    for number, name in enumerate(sorted(set(files_of(checkpoint)) - {RECORD})):
        path = shutil.copytree(checkpoint, tmp_path / f"{number:02d}")
        assert check_checkpoint(path) is None
        expected.append(harmed(path, name, how))
        assert check_checkpoint(path) == expected[-1]
    assert len(expected) >= 4
    assert two_ranks.run(checked_on_ranks, tmp_path) == [expected] * 2


def test_a_flipped_bit_anywhere_in_the_record_is_noticed(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / NAME)
    content = (path / RECORD).read_bytes()
    # Every third place, to be quick: each number and name of the record has one.
    for place in range(0, len(content), 3):
        altered = bytearray(content)
        altered[place] ^= 1
        (path / RECORD).write_bytes(altered)
        with pytest.raises(RopewalkError, match=r"is no checkpoint of a run|has format version"):
            read_record(path)
    (path / RECORD).unlink()
    assert check_checkpoint(path) == f"{RECORD} cannot be read: No such file or directory"
    (path / RECORD).write_text("[1, 2]")
    assert f"{RECORD} is damaged" in check_checkpoint(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "shards/0", "..\\secret", "", "..", "a\0b"])
def test_a_record_leads_to_no_file_outside_its_folder(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"1")
    path = tmp_path / NAME
    path.mkdir()
    write_record(path, Record(Position(0, 1, 2), {name: FileDigest.of(tmp_path / "secret")}))
    with pytest.raises(RopewalkError, match=rf"{RECORD} lists the file .* names within its own folder alone"):
        read_record(path)
    assert "lists the file" in check_checkpoint(path)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(two_ranks, by_ranks, whole, tmp_path):
    assert latest_whole(tmp_path / "none") is None
    second, third = tmp_path / "stage0-step000010", tmp_path / "stage0-step000020"
    # The two formats side by side, as after a run that went on with more processes.
    first = shutil.copytree(whole, tmp_path / NAME)
    record = read_record(by_ranks[0] / "sync" / NAME)
    for path, step in ((second, 10), (third, 20)):
        shutil.copytree(by_ranks[0] / "sync" / NAME, path)
        write_record(path, dataclasses.replace(record, position=Position(0, step, 0)))
    assert checkpoints_in(tmp_path) == [first, second, third]
    assert latest_whole(tmp_path) == third
    harmed(third, "__1_0.distcp", "short")
    words = (
        "checkpoint stage0-step000020 is damaged (__1_0.distcp is 10 bytes short); the one before it that is whole is "
        f"stage0-step000010: remove the folder {third}, and --resume goes on from there"
    )
    assert sentence(lambda: latest_whole(tmp_path)) == ("RopewalkError", words)
    assert two_ranks.run(latest_on_ranks, tmp_path) == [("RopewalkError", words), ("Echo", words)]
    harmed(second, ".metadata", "missing")
    assert (
        f"is {NAME}: remove the folders {third}, {second}, and" in sentence(lambda: latest_whole(tmp_path))[1]
    )
    harmed(first, "model.safetensors", "flipped")
    assert "none before it is whole" in sentence(lambda: latest_whole(tmp_path))[1]


def test_what_a_killed_process_left_is_no_checkpoint_and_left_to_whoever_holds_the_folder(
    tied_llama, rows, tmp_path
):
    """Another process may be writing it: what is written here takes nothing away."""
    one = Trainee(tied_llama, rows)
    hidden = [".stage0-step000001.partial", f".stage0-step000002.{'0f' * 16}.partial", ".stage0-notes"]
    for name in hidden:
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text("{}")
    assert checkpoints_in(tmp_path) == []
    for step in (2, 3, 10):
        save_checkpoint(tmp_path, one.model.model, None, one.optimizer, Position(0, step, 0), 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*hidden, "stage0-step000003", "stage0-step000010"])
    remove_left_overs(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".stage0-notes", "stage0-step000003", "stage0-step000010"]


def test_a_rank_killed_while_it_writes_leaves_the_last_checkpoint(two_ranks, tied_llama, rows, tmp_path):
    with pytest.raises(RankFailure):
        two_ranks.run(killed, tied_llama, tmp_path)
    # What was being written may be there or not: rank 0 clears it away if it still can.
    path = latest_whole(tmp_path)
    assert path == tmp_path / "stage0-step000001"
    one = Trainee(tied_llama, rows)
    assert load_checkpoint(path, one.model, one.optimizer, ALONE) == Position(0, 1, 0)
    assert one.train(1) == Trainee(tied_llama, rows).train(1)
    remove_left_overs(tmp_path)
    save_checkpoint(tmp_path, one.model.model, None, one.optimizer, Position(0, 2, 0), 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["stage0-step000001", "stage0-step000002"]
