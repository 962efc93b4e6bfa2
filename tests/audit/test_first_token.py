"""The first-token experiment: parts make the whole, and an error is ascribed to the token that has it."""

from dataclasses import replace

import pytest
import torch

from ropewalk.audit import EXACT, AuditedModel, Runner, ablate_steps, first_token_effects
from ropewalk.audit.first_token import placements
from tests.audit.audit_cases import FLOAT64_FLOOR, LOW, sharp_llama


def test_parts_of_the_first_token_and_the_others_make_the_whole(runner, rows):
    first, others, whole = first_token_effects(runner, rows, LOW)
    assert (first.shifted, others.shifted, whole.shifted) == ("first", "others", "all")
    assert first.share_of_D + others.share_of_D == pytest.approx(1)
    assert first.share_of_logits + others.share_of_logits == pytest.approx(1)
    assert whole.share_of_D == whole.share_of_logits == pytest.approx(1)
    assert whole.D_exact < FLOAT64_FLOOR
    assert pytest.approx(whole.D_arithmetic, rel=1e-6) == whole.D
    # Moving a part changes relative positions, also where arithmetic is exact.
    assert min(first.D_exact, others.D_exact) > 0.1


def test_exact_arithmetic_has_no_part_in_it(runner, rows):
    for effect in first_token_effects(runner, rows[:1], EXACT):
        # Four terms that cancel, but for the order of adding them.
        assert effect.D_arithmetic < 1e-12
        assert effect.logit_arithmetic == 0
        # Two shifts in float64.
        assert effect.D_rounding < FLOAT64_FLOOR


def test_an_error_of_the_first_token_alone_is_ascribed_to_it(rows):
    """A module that turns position 1 a little too far where it is the row's first: moving that is what drifts."""
    model = sharp_llama(rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    rotary = model.model.rotary_emb

    def broken(x, position_ids):
        # In float64 up to the error that is planted.
        angles = (position_ids[..., None] * rotary.inv_freq.double())[0]
        if position_ids[0, 0] == 1:
            angles[0] += 0.01
        both = torch.cat((angles, angles), dim=-1)[None]
        return both.cos(), both.sin()

    audited_model = AuditedModel.of(model)
    rotary.forward = broken
    planted = replace(EXACT, angles="model")
    first, others, whole = first_token_effects(Runner(audited_model, 1000), rows, planted, 0, 1)
    assert whole.D > 1e-3
    assert first.D_rounding == pytest.approx(whole.D, rel=1e-4)
    assert first.share_of_D == pytest.approx(1, abs=1e-4)
    assert first.share_of_logits == pytest.approx(1, abs=1e-4)
    # inv_freq is held in float32, the same at both shifts: what is left of it is at the first token's distance.
    assert others.D_rounding < 1e-4 * whole.D


def test_rounding_all_tokens_is_rounding_the_rotation(runner, rows):
    _, _, whole = first_token_effects(runner, rows, LOW)
    rotation_alone = replace(
        LOW, scores=torch.float64, softmax=torch.float64, weights=torch.float64, rest=torch.float64
    )
    ablations = {ablated.step: ablated for ablated in ablate_steps(runner, rows, rotation_alone, [0])}
    # The same but for the sums of q·k, which run in float32 there.
    assert whole.D_rounding == pytest.approx(ablations["all"].D, rel=1e-3)


def test_placements():
    found = placements(4, 0, 16)
    assert found["none"].tolist() == [0, 1, 2, 3]
    assert found["first"].tolist() == [16, 1, 2, 3]
    assert found["others"].tolist() == [0, 17, 18, 19]
    assert found["all"].tolist() == [16, 17, 18, 19]
