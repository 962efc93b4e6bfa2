"""Differences of attention: none between equal passes, and those of rounded angles alone."""

import math
from dataclasses import replace

import pytest
import torch

from ropewalk.audit.arithmetic import DTYPES, EXACT, stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.differences import differences
from ropewalk.audit.passes import Runner, logit_difference, longest, shifted
from ropewalk.audit.replaced_attention import replacing_attention
from tests.audit.plain_llamas import COMMON, LENGTH, UNIT, drift, row, tiny


@pytest.fixture(scope="module")
def llama():
    return AuditedModel.of(tiny())


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("angles", ["model", "exact"])
def test_two_runs_of_one_row_at_one_place_do_not_differ_at_all(llama, name, angles):
    runner = Runner(llama, 2**20)
    arithmetic = stock_arithmetic(DTYPES[name], angles)
    ids, positions = row(), shifted(LENGTH, 12345)
    first, second = (runner.run(ids, arithmetic, positions, keep=("hidden", "layers")) for _ in range(2))
    assert differences(runner, {0: ((1, first), (-1, second))})[0].D == 0.0
    assert torch.equal(first.received, second.received)
    assert torch.equal(first.hidden, second.hidden)
    assert logit_difference(runner, first, second).rms == 0.0


def sharpness(audited_model, ids):
    """scale |q| |k|, the largest of all layers: by how much a score changes with an angle, per radian."""
    found = []

    def answer(call):
        norms = [float(x.norm(dim=-1).max()) for x in (call.query, call.key)]
        found.append(call.options.scale_of(call.query.shape[-1]) * math.prod(norms))
        return call.value.repeat_interleave(len(call.query) // len(call.value), dim=0)

    with replacing_attention(audited_model.model, answer, torch.float64):
        audited_model.model.model(ids[None], use_cache=False)
    return max(found)


@pytest.mark.parametrize("shift", [1, 2**10, 2**20, 2**24, 2**30])
def test_float64_attention_of_one_layer_moves_by_its_angles_rounding_alone(shift):
    """Angle = position · inv_freq, rounded: off by 2^-53 of itself, twice for a pair of tokens.

    A score changes by that times scale |q| |k|; a softmax by at most twice its scores' largest change, in the sum of
    absolute differences; D sums that over the row's queries. Rounding of the scores themselves does not depend on
    the position: the same with position 2 head_dim and what a sum of the row adds.
    """
    audited_model = AuditedModel.of(tiny(num_hidden_layers=1))
    ids = row()
    roundings = 2 * (shift + LENGTH) + 4 * COMMON["head_dim"]
    score = sharpness(audited_model, ids) * roundings * UNIT
    bound = LENGTH * (2 * 2 * score + 2 * LENGTH * UNIT)
    found = drift(Runner(audited_model, longest([shift], LENGTH)), EXACT, 0, shift)
    assert found <= bound
    # The bound is one that float32's angles break.
    assert (
        drift(Runner(audited_model, longest([shift], LENGTH)), replace(EXACT, angles="model"), 0, shift)
        > bound
    )


@pytest.mark.parametrize("shift", [1, 1000, 2**20])
def test_float64_drift_is_below_what_any_dtype_shows(llama, shift):
    runner = Runner(llama, longest([shift], LENGTH))
    exact = drift(runner, EXACT, 0, shift)
    assert exact < 1e-8
    for name in ("float32", "bfloat16", "float16"):
        assert drift(runner, stock_arithmetic(DTYPES[name]), 0, shift) > 100 * exact
