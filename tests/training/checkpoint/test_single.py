"""Checkpoints of one process go on bit for bit, with their random numbers, and as weights alone."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropewalk.training.checkpoint.sharded import export_model, load_checkpoint, load_weights
from ropewalk.training.checkpoint.single import save_checkpoint
from tests.training.checkpoint.checkpoint_cases import NAME, POSITION, assert_same_losses, assert_same_tensors
from tests.training.checkpoint.rank_cases import ALONE, Trainee, go_on, only_weights


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
