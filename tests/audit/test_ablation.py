"""Ablation: the steps add up to the audited arithmetic, and the one that was spoilt is named."""

from dataclasses import replace

import pytest
import torch

from ropewalk import PackedLayout, RopewalkError
from ropewalk.audit import EXACT, STEPS, AuditedModel, Runner, Series, ablate_steps, dominant_step
from ropewalk.audit.ablation import moved
from tests.audit.audit_cases import FLOAT64_FLOOR, LOW, drift_of_model, sharp_llama, token_rows


def test_all_steps_together_are_the_audited_arithmetic(runner, rows, audited_model):
    ablations = {ablated.step: ablated for ablated in ablate_steps(runner, rows, LOW, [0])}
    found = drift_of_model(audited_model, rows, [Series("bfloat16")], [0])
    assert pytest.approx(found.drift[0].D, rel=1e-9) == ablations["all"].D
    assert ablations["none"].D < FLOAT64_FLOOR
    assert ablations["none"].logit_error == 0
    assert set(ablations) == {"none", *STEPS, "all"}
    # Their errors are independent, so that the whole is between the largest of them and their sum.
    singles = [ablations[step].D for step in STEPS]
    assert max(singles) < 1.5 * ablations["all"].D
    assert 1.5 * sum(singles) > ablations["all"].D


def test_what_the_shift_does_not_touch_does_not_drift(runner, rows):
    """Rounding what is the same at both shifts gives the same; it is an error all the same, and the logits say so."""
    ablations = {ablated.step: ablated for ablated in ablate_steps(runner, rows, LOW, [0])}
    for step in ("softmax", "rest"):
        assert ablations[step].D < FLOAT64_FLOOR
        assert ablations[step].logit_error > 1e-5
        assert ablations[step].kl > 0


PLANTED = {
    # Exact but for one step, which is coarse: the ablation must name that step, and no other may show.
    "cos_sin": replace(EXACT, cos_sin=torch.bfloat16),
    "rotation": replace(EXACT, rotation=torch.bfloat16),
    "product": replace(EXACT, product="bfloat16", scores=torch.bfloat16),
}


@pytest.mark.parametrize("step", PLANTED)
def test_a_planted_error_is_named(runner, rows, step):
    ablations = ablate_steps(runner, rows, PLANTED[step], [0])
    assert dominant_step(ablations, 0).step == step
    assert all(ablated.D < FLOAT64_FLOOR for ablated in ablations if ablated.step in set(STEPS) - {step})


def test_bfloat16_angles_of_the_model_itself_are_named():
    """What an engine does that rounds positions or inv_freq: the model's own rotary module is what is audited."""
    model = sharp_llama()
    rotary = model.model.rotary_emb

    def rounded(x, position_ids):
        angles = (position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()).float()
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    rows = token_rows(2, 128)
    healthy = ablate_steps(Runner(AuditedModel.of(model), 1000), rows, LOW, [300])
    assert dominant_step(healthy, 300).step != "angles"
    rotary.forward = rounded
    planted = ablate_steps(Runner(AuditedModel.of(model), 1000), rows, LOW, [300])
    assert dominant_step(planted, 300).step == "angles"


def test_a_ladder_answers_for_its_own_shifts_alone(runner, rows):
    with pytest.raises(RopewalkError, match="shift of 5"):
        dominant_step(ablate_steps(runner, rows[:1], LOW, [0]), 5)


def test_moved_layouts():
    anchor = PackedLayout.from_lengths([2, 3], "anchor", 1)
    assert moved(anchor, 10).tolist() == [0, 11, 12, 13, 14, 15]
    full = PackedLayout.from_lengths([2, 3], "full", 0)
    assert moved(full, 10).tolist() == [10, 11, 12, 13, 14]
    reset = PackedLayout.from_lengths([2, 3], "intra_document", 0, "reset")
    assert moved(reset, 10).tolist() == [0, 1, 0, 1, 2]
