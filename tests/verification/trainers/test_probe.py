"""Each fault in a transformers Trainer is named, and no other; a correct trainer is silent."""

import pytest
import torch
import torch.nn.functional as F

from ropewalk.verification.settings import TrainerProbeSettings
from ropewalk.verification.trainers.probe import probe_trainer
from tests.verification.trainers.trainer_cases import FAULTS, faulty_trainer, llama

NAMED = {
    "none": ([], ""),
    "none, windows": ([], ""),
    "leak": (["documents apart"], "affects losses of document"),
    "shifted labels": (["labels"], "shifted twice"),
    "crossing targets": (["targets in their document"], "in another document"),
    "mean of means": (["token mean"], "a mean of the means of micro-batches"),
    "lost theta": (["RoPE in training"], "unscaled RoPE with rope_theta 10,000"),
    "theta lost on save": (["RoPE after save and load"], "unscaled RoPE with rope_theta 10,000"),
    "bfloat16 inv_freq": (["RoPE in training"], "rounded to bfloat16"),
    "wrong window": (["windows"], "reaches the whole document of 16 tokens"),
}
SETTINGS = TrainerProbeSettings(target="here", tokens=2)
ONE_PROCESS = ("none", "leak", "mean of means")
"""The others are planted on two processes, which check what one does (``test_probe_torchrun.py``)."""


def test_every_planted_fault_has_its_words():
    assert NAMED.keys() == FAULTS.keys()


@pytest.mark.parametrize("fault", ONE_PROCESS)
def test_a_planted_fault_alone_is_named(fault, tmp_path):
    result = probe_trainer(SETTINGS, function=lambda: faulty_trainer(tmp_path, fault))
    names, words = NAMED[fault]
    assert result.failed == names
    assert words in " ".join(check.note for check in result.checks if check.passed is False)
    if not names:
        assert all(check.passed for check in result.checks), result


def step_of(model, documents, rounds):
    def step():
        total = sum(len(each) - 1 for each in documents)
        for each in documents * rounds:
            ids = torch.tensor([each])
            logits = model(ids).logits[0, :-1]
            (F.cross_entropy(logits, ids[0, 1:], reduction="sum") / total).backward()

    return model, step


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "words"), [(1, []), (2, ["token mean", "whole documents"])])
def test_a_plain_loop_is_probed_through_its_model_and_step(rounds, words):
    result = probe_trainer(SETTINGS, function=lambda documents: step_of(llama(), documents, rounds))
    assert sorted(result.failed) == words


def test_a_loss_function_is_probed_for_leaks():
    model = llama().eval()

    def losses(documents, packed):
        with torch.no_grad():
            if packed:
                ids = torch.tensor([[token for each in documents for token in each]])
                token = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
                return [part.mean() for part in F.pad(token, (0, 1)).split([len(each) for each in documents])]
            return [model(torch.tensor([each]), labels=torch.tensor([each])).loss for each in documents]

    assert probe_trainer(SETTINGS, function=lambda documents: losses(documents, False)).failed == []
    assert probe_trainer(SETTINGS, function=lambda documents: losses(documents, True)).failed == [
        "documents apart"
    ]


@pytest.mark.slow
def test_a_checkpoint_may_state_the_config(tmp_path):
    """A loader that lost the base in memory is found by the config on disk."""
    config = llama().config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 7e4}
    config.save_pretrained(tmp_path)
    settings = SETTINGS.model_copy(update={"config": str(tmp_path)})
    result = probe_trainer(settings, function=lambda: faulty_trainer(tmp_path, "none"))
    assert result.failed == ["RoPE in training", "RoPE after save and load"]
