"""Two ranks train the decoder of a model with encoders as one process does."""

import pytest

from tests.marks import slow_after
from tests.models.multimodal import save_whole
from tests.training.family_cases import rows_with_padding, two_steps, two_steps_on_ranks

EXACT = 2.0**-36
"""Relative, of losses and norms, and absolute, of weights near 1: float64's rounding, 2**-53, grows by no more than
2**17 in two steps; whatever one side rounds to float32, or computes otherwise, is off by 2**-24 at least."""


@pytest.mark.parametrize("family", slow_after(1, ["qwen3_vl", "gemma3", "kimi_k25"]))
def test_two_steps_in_float64_are_those_of_one_process(two_ranks, tmp_path, family):
    """Losses, norms, and the weights that FSDP2 shards over the ranks, which are those of the decoder."""
    save_whole(tmp_path, family)
    steps, weights = two_steps(tmp_path, rows_with_padding())
    (found, gathered), _ = two_ranks.run(two_steps_on_ranks, {"shard": 2}, tmp_path, rows_with_padding())
    for mine, alone in zip(found, steps, strict=True):
        assert mine[:2] == pytest.approx(alone[:2], rel=EXACT)
    assert gathered.keys() == weights.keys()
    assert not any("vis" in name for name in weights)
    worst = max((float((gathered[name] - value).abs().max()), name) for name, value in weights.items())
    assert worst[0] <= EXACT, worst
