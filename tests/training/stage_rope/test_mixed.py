"""The two RoPEs of a stage with short rows: what transformers makes of the longrope that joins them."""

from dataclasses import replace

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, Ntk, Yarn
from ropewalk.rope.methods.longrope import NO_ROTATION
from ropewalk.training.stage_rope.mixed import refuse_equal, two_ropes
from tests.rope.rope_cases import FLOAT32_ORACLE, FLOAT64_ORACLE, assert_close, oracle

DIM, THETA, T, CONTEXT = 16, 10000.0, 64, 256
KEY = "stages.0.short_rows"
CHECKPOINT = Default(DIM, THETA), T
FACTORS = tuple(1.0 + i / 2 for i in range(DIM // 2))
METHODS = {
    "theta": Default(DIM, 5e5),
    "linear": Linear(DIM, THETA, 4.0),
    "ntk": Ntk(DIM, THETA, 4.0),
    "yarn": Yarn(DIM, THETA, 4.0, T),
    "yarn with a factor": Yarn(DIM, THETA, 4.0, T, attention_factor=0.9),
    "llama3": Llama3(DIM, THETA, 4.0, 1.0, 4.0, T),
    "longrope": LongRope(DIM, THETA, (1.0,) * 8, FACTORS, 1.2, T),
    "longrope of another base": LongRope(DIM, 5e5, (1.0,) * 8, FACTORS, 1.2, T),
}


def in_transformers(method: LongRope, length: int):
    """The frequencies that transformers computes from the method's entry of a config."""
    return oracle(method, {**method.to_entry(), "factor": CONTEXT / T}, CONTEXT, length)


@pytest.mark.parametrize("name", METHODS)
def test_the_config_has_the_original_rope_up_to_its_length_and_the_stage_s_beyond(name) -> None:
    method = METHODS[name]
    joined = two_ropes(method, CONTEXT, CHECKPOINT, KEY)
    long, factor = method.frequencies(CONTEXT)
    original = CHECKPOINT[0].frequencies().inv_freq
    for length, expected in ((1, original), (T, original), (T + 1, long), (CONTEXT, long)):
        for found, allowed in (
            (joined.frequencies(length), FLOAT64_ORACLE),
            (in_transformers(joined, length), FLOAT32_ORACLE),
        ):
            assert_close(found[0].double(), expected, allowed)
            # One factor at every length, so that training equals export.
            assert found[1] == factor
    # Otherwise the test would not tell the two apart.
    assert float((long / original - 1).abs().max()) > 0.1


def test_a_longrope_keeps_its_factors_to_the_last_bit() -> None:
    assert two_ropes(METHODS["longrope"], CONTEXT, CHECKPOINT, KEY) is METHODS["longrope"]


def test_a_longrope_checkpoint_keeps_its_short_factors_and_its_original_length() -> None:
    checkpoint = LongRope(DIM, THETA, (1.1,) * 8, FACTORS, 1.2, T)
    stage = replace(checkpoint, long_factor=tuple(2 * each for each in FACTORS))
    assert two_ropes(stage, 1024, (checkpoint, CONTEXT), KEY) is stage
    with pytest.raises(RopewalkError, match="leave short_factor out"):
        two_ropes(replace(stage, short_factor=(1.0,) * 8), 1024, (checkpoint, CONTEXT), KEY)


def test_dynamic_ntk_counts_as_unscaled() -> None:
    checkpoint = DynamicNtk(DIM, THETA, 2.0, T), T
    assert two_ropes(METHODS["yarn"], CONTEXT, checkpoint, KEY) == two_ropes(
        METHODS["yarn"], CONTEXT, CHECKPOINT, KEY
    )


def test_a_pair_that_does_not_turn_has_the_largest_factor() -> None:
    class Still(Default):
        def frequencies(self, sequence_length=None):
            found = super().frequencies()
            inv_freq = found.inv_freq.clone()
            inv_freq[-1] = 0.0
            return found._replace(inv_freq=inv_freq)

    joined = two_ropes(Still(DIM, THETA), CONTEXT, CHECKPOINT, KEY)
    assert joined.long_factor[-1] == NO_ROTATION
    assert joined.long_factor[:-1] == (1.0,) * 7


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_scaled_checkpoints_are_refused(name) -> None:
    with pytest.raises(RopewalkError, match=f"{KEY} needs .* but the model has {METHODS[name].name} RoPE"):
        two_ropes(METHODS["theta"], CONTEXT, (METHODS[name], T), KEY)


def test_two_equal_ropes_are_refused() -> None:
    same = two_ropes(CHECKPOINT[0], CONTEXT, CHECKPOINT, KEY)
    with pytest.raises(RopewalkError, match="keeps the checkpoint's for both"):
        refuse_equal(same, KEY)
    refuse_equal(two_ropes(METHODS["theta"], CONTEXT, CHECKPOINT, KEY), KEY)
